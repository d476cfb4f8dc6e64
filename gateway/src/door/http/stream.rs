//! The byte stream under a connection: it does not wait for ever to write, does not reset a client that is still sending
//! when it is closed, and gives hyper's own answers to malformed heads a body.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Sleep, sleep},
};

use super::{
    ListenOptions,
    problem::{Kind, Trouble},
    reply::{About, problem_body},
};

/// See the module.
pub(super) struct Patient {
    stream: TcpStream,
    write_timeout: Duration,
    linger: Duration,
    max_head: usize,
    timer: Option<Pin<Box<Sleep>>>,
    closing: bool,
    refusal: Option<Refusal>,
}

/// An answer that goes out in place of hyper's empty one.
struct Refusal {
    bytes: Vec<u8>,
    sent: usize,
    /// What hyper takes for written once it is out.
    stands_for: usize,
}

impl Patient {
    pub(super) fn new(stream: TcpStream, options: &ListenOptions) -> Self {
        let ListenOptions { write_timeout, linger, max_head, .. } = *options;
        Self { stream, write_timeout, linger, max_head, timer: None, closing: false, refusal: None }
    }

    /// Fails a write that made no progress for too long.
    fn progress<T>(&mut self, written: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.timer = None;
            return written;
        }
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(self.write_timeout)));
        ready!(timer.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    /// Sends the refusal; answers with the length of what it stands for.
    fn poll_refusal(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        while let Some(refusal) = &mut self.refusal {
            if refusal.sent == refusal.bytes.len() {
                let stands_for = refusal.stands_for;
                self.refusal = None;
                return Poll::Ready(Ok(stands_for));
            }
            let written = Pin::new(&mut self.stream).poll_write(cx, &refusal.bytes[refusal.sent..]);
            let written = ready!(self.progress(written, cx))?;
            if let Some(refusal) = &mut self.refusal {
                refusal.sent += written;
            }
        }
        Poll::Ready(Ok(0))
    }

    /// hyper answers a malformed head by itself, with a status and nothing else. The door's own answers have a body, so an
    /// empty one is hyper's.
    fn refusal_for(&self, head: &[u8]) -> Option<Refusal> {
        const EMPTY: &str = "content-length: 0\r\n";
        if !head.starts_with(b"HTTP/1.1 4") && !head.starts_with(b"HTTP/1.0 4") {
            return None;
        }
        let text = std::str::from_utf8(head).ok().filter(|text| text.ends_with("\r\n\r\n"))?;
        let trouble = match text.get(9..12)? {
            "400" => Trouble::new(
                Kind::BadRequest,
                "the request line, a header, Content-Length or Transfer-Encoding is malformed or contradicts another",
            ),
            "414" => Trouble::new(Kind::UriTooLong, "send a shorter target"),
            "431" => Trouble::new(
                Kind::HeadTooLarge,
                format!("the head has more than {} bytes or 100 headers; send fewer", self.max_head),
            ),
            _ => return None,
        };
        let (before, after) = text.split_once(EMPTY)?;
        let body = problem_body(&trouble, About::default(), true);
        let mut bytes = format!(
            "{before}content-type: application/problem+json\r\ncontent-language: en\r\ncontent-length: {}\r\n{after}",
            body.len()
        )
        .into_bytes();
        bytes.extend_from_slice(&body);
        Some(Refusal { bytes, sent: 0, stands_for: head.len() })
    }
}

impl AsyncRead for Patient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, out)
    }
}

impl AsyncWrite for Patient {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.refusal.is_none() {
            self.refusal = self.refusal_for(bytes);
        }
        if self.refusal.is_some() {
            return self.poll_refusal(cx);
        }
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.progress(written, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        // An answer without a body is one slice.
        if let [only] = slices {
            return self.poll_write(cx, only);
        }
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.progress(written, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    /// Closes our side, then takes what still comes until the client closes too or `linger` is over: unread bytes would
    /// make the kernel reset the connection, and the client might never see the answer.
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if !this.closing {
            ready!(Pin::new(&mut this.stream).poll_shutdown(cx))?;
            this.closing = true;
            this.timer = None;
        }
        let linger = this.linger;
        let timer = this.timer.get_or_insert_with(|| Box::pin(sleep(linger)));
        let mut waste = [0; 16 << 10];
        while timer.as_mut().poll(cx).is_pending() {
            let mut out = ReadBuf::new(&mut waste);
            match ready!(Pin::new(&mut this.stream).poll_read(cx, &mut out)) {
                Ok(()) if !out.filled().is_empty() => {}
                // Closed or broken: nothing more comes.
                _ => break,
            }
        }
        Poll::Ready(Ok(()))
    }
}
