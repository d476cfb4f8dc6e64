//! A request's body as it comes in: decoded, bounded, timed, and never taken for complete when it broke off.

use std::{
    future::poll_fn,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use async_compression::{
    tokio::bufread::{GzipDecoder, ZstdDecoder},
    zstd::DParameter,
};
use bytes::{Buf as _, Bytes, BytesMut};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::{
    io::{AsyncBufRead, AsyncRead, ReadBuf},
    time::{Instant, Sleep, sleep_until},
};

use super::{
    head::{Coding, too_large},
    problem::{Kind, Trouble},
};

/// Bytes decoded at a time.
const DECODED_PIECE: usize = 32 << 10;
/// A zstd window above 8 MiB is refused (RFC 9659): a small body must not ask for much memory.
const ZSTD_WINDOW_LOG: u32 = 23;

/// The bytes on the wire.
struct Wire {
    incoming: Incoming,
    /// What Content-Length promised, and what came of it.
    promised: Option<u64>,
    came: u64,
    current: Bytes,
    failure: Option<Trouble>,
}

impl Wire {
    /// The next bytes; none only at the end of a complete body.
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Trouble>>> {
        loop {
            let frame = std::pin::pin!(self.incoming.frame());
            return Poll::Ready(match ready!(Future::poll(frame, cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) if data.is_empty() => continue,
                    Ok(data) => {
                        self.came += data.len() as u64;
                        Some(Ok(data))
                    }
                    // Trailers say nothing about records.
                    Err(_) => continue,
                },
                Some(Err(error)) => Some(Err(broken(&error))),
                None if self.promised.is_some_and(|promised| promised != self.came) => {
                    let detail = "the body ended before Content-Length bytes came; nothing of its last record was taken";
                    Some(Err(Trouble::new(Kind::BodyIncomplete, detail)))
                }
                None => None,
            });
        }
    }
}

fn broken(error: &hyper::Error) -> Trouble {
    let detail = if error.is_timeout() {
        return Trouble::new(Kind::RequestTimeout, "the body did not come in time");
    } else if error.is_incomplete_message() || error.is_closed() || error.is_canceled() {
        "the connection ended before the body did; nothing of its last record was taken"
    } else {
        "the body's framing is broken; nothing of its last record was taken"
    };
    Trouble::new(Kind::BodyIncomplete, detail)
}

/// The wire as a decoder reads it.
impl AsyncBufRead for Wire {
    fn poll_fill_buf(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<&[u8]>> {
        let wire = self.get_mut();
        if wire.current.is_empty() {
            match ready!(wire.poll_piece(cx)) {
                Some(Ok(piece)) => wire.current = piece,
                Some(Err(trouble)) => {
                    wire.failure = Some(trouble);
                    return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
                }
                None => {}
            }
        }
        Poll::Ready(Ok(&wire.current))
    }

    fn consume(self: Pin<&mut Self>, amount: usize) {
        self.get_mut().current.advance(amount);
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let ready = ready!(self.as_mut().poll_fill_buf(cx))?;
        let amount = ready.len().min(out.remaining());
        out.put_slice(&ready[..amount]);
        self.consume(amount);
        Poll::Ready(Ok(()))
    }
}

enum Source {
    Plain(Wire),
    Gzip(Box<GzipDecoder<Wire>>),
    Zstd(Box<ZstdDecoder<Wire>>),
}

impl Source {
    fn poll_piece(
        &mut self,
        room: &mut BytesMut,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Trouble>>> {
        let outcome = match self {
            Source::Plain(wire) => return wire.poll_piece(cx),
            Source::Gzip(decoder) => ready!(poll_decoder(Pin::new(&mut **decoder), room, cx)),
            Source::Zstd(decoder) => ready!(poll_decoder(Pin::new(&mut **decoder), room, cx)),
        };
        let wire = match self {
            Source::Plain(wire) => wire,
            Source::Gzip(decoder) => decoder.get_mut(),
            Source::Zstd(decoder) => decoder.get_mut(),
        };
        Poll::Ready(match outcome {
            Ok(piece) if piece.is_empty() => None,
            Ok(piece) => Some(Ok(piece)),
            Err(error) => Some(Err(wire.failure.take().unwrap_or_else(|| {
                Trouble::new(Kind::BodyUndecodable, format!("{error}; nothing of the last record was taken"))
            }))),
        })
    }
}

fn poll_decoder(
    decoder: Pin<&mut impl AsyncRead>,
    room: &mut BytesMut,
    cx: &mut Context<'_>,
) -> Poll<io::Result<Bytes>> {
    room.resize(DECODED_PIECE, 0);
    let mut out = ReadBuf::new(room);
    ready!(decoder.poll_read(cx, &mut out))?;
    let filled = out.filled().len();
    Poll::Ready(Ok(room.split_to(filled).freeze()))
}

/// How long a body may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// Between two pieces.
    pub(super) idle: Duration,
    /// For the whole request.
    pub(super) until: Instant,
}

/// A body that is being read.
pub(super) struct Body {
    source: Source,
    room: BytesMut,
    taken: u64,
    limit: u64,
    patience: Patience,
    last_piece: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Body {
    /// `limit` counts decoded bytes.
    pub(super) fn new(
        incoming: Incoming,
        coding: Coding,
        promised: Option<u64>,
        limit: u64,
        patience: Patience,
    ) -> Self {
        let wire = Wire { incoming, promised, came: 0, current: Bytes::new(), failure: None };
        let source = match coding {
            Coding::Identity => Source::Plain(wire),
            Coding::Gzip => {
                let mut decoder = GzipDecoder::new(wire);
                decoder.multiple_members(true);
                Source::Gzip(Box::new(decoder))
            }
            Coding::Zstd => {
                let mut decoder =
                    ZstdDecoder::with_params(wire, &[DParameter::window_log_max(ZSTD_WINDOW_LOG)]);
                decoder.multiple_members(true);
                Source::Zstd(Box::new(decoder))
            }
        };
        Self { source, room: BytesMut::new(), taken: 0, limit, patience, last_piece: None, timer: None }
    }

    /// The next decoded bytes; none once the body is complete. Dropping the future loses nothing.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, Trouble> {
        poll_fn(|cx| self.poll_next(cx)).await.transpose()
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Trouble>>> {
        match self.source.poll_piece(&mut self.room, cx) {
            Poll::Ready(Some(Ok(piece))) => {
                self.taken += piece.len() as u64;
                if self.timer.is_some() {
                    self.last_piece = Some(Instant::now());
                }
                let within = self.taken <= self.limit;
                Poll::Ready(Some(if within { Ok(piece) } else { Err(too_large(self.limit)) }))
            }
            Poll::Pending => self.poll_patience(cx),
            ready => ready,
        }
    }

    /// Nothing is there yet. hyper always says so once before it hands over bytes that came with the head, so the timer is
    /// armed only when it says so again.
    fn poll_patience(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Trouble>>> {
        let Some(last_piece) = self.last_piece else {
            self.last_piece = Some(Instant::now());
            cx.waker().wake_by_ref();
            return Poll::Pending;
        };
        let Patience { idle, until } = self.patience;
        loop {
            let due = (last_piece + idle).min(until);
            let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(due)));
            ready!(timer.as_mut().poll(cx));
            if Instant::now() >= due {
                let detail = if due == until {
                    "the whole request took too long; send it in smaller parts".to_owned()
                } else {
                    format!("nothing of the body came for {} ms", idle.as_millis())
                };
                return Poll::Ready(Some(Err(Trouble::new(Kind::RequestTimeout, detail))));
            }
            timer.as_mut().reset(due);
        }
    }

    /// The reader pauses for reasons of its own: the client's time does not run.
    pub(super) fn pause(&mut self) {
        self.last_piece = None;
        self.timer = None;
    }

    /// The whole body. `grow` is asked before bytes beyond the promised length are kept.
    pub(super) async fn collect(
        &mut self,
        mut grow: impl FnMut(usize) -> Result<(), Trouble>,
    ) -> Result<Bytes, Trouble> {
        let Some(first) = self.next().await? else { return Ok(Bytes::new()) };
        // A body in one piece is not copied.
        grow(first.len())?;
        let Some(second) = self.next().await? else { return Ok(first) };
        let mut whole = Vec::with_capacity((first.len() + second.len()) * 2);
        whole.extend_from_slice(&first);
        let mut piece = Some(second);
        while let Some(bytes) = piece {
            grow(bytes.len())?;
            whole.extend_from_slice(&bytes);
            piece = self.next().await?;
        }
        Ok(whole.into())
    }

    /// Reads and drops the body; whether it was complete.
    pub(super) async fn discard(&mut self) -> bool {
        loop {
            match self.next().await {
                Ok(Some(_)) => {}
                Ok(None) => return true,
                Err(_) => return false,
            }
        }
    }
}
