//! One connection: it never makes itself anew, since the server behind it may be an older one then (P6).

use std::{
    collections::BTreeMap,
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use ::redis::{
    AsyncConnectionConfig, Cmd, Pipeline, RedisError, Value, aio::MultiplexedConnection, cmd, pipe,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    task::AbortHandle,
};

use super::{
    Shared,
    address::Address,
    reply::{self, Class},
    script::{Call, Script, TEXTS},
    server::Server,
};
use crate::sink::{Life, Pulse, SinkError};

/// A connection and the scripts that its server knows.
pub(super) struct Link {
    connection: MultiplexedConnection,
    shas: Vec<String>,
    driver: AbortHandle,
    /// Some shard was acquired on it: only then is it a connection to deliver on (P6).
    pub(super) acquired: bool,
    /// Ends with the stream, or with this.
    pulse: Pulse,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// Ends the life that others are told by as soon as the stream ends, whoever is reading then.
struct Watched<S> {
    stream: S,
    pulse: Option<Pulse>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let (before, room) = (buffer.filled().len(), buffer.remaining());
        let result = Pin::new(&mut self.stream).poll_read(context, buffer);
        match &result {
            Poll::Ready(Ok(())) if buffer.filled().len() > before || room == 0 => {}
            Poll::Ready(_) => self.pulse = None,
            Poll::Pending => {}
        }
        result
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// What stopped a call.
#[derive(Debug)]
pub(super) enum Fault {
    /// The server answered with an error.
    Server(RedisError),
    /// The connection broke, or the answer made no sense: what was sent may be at work.
    Lost(String),
}

impl Fault {
    fn of(error: RedisError) -> Self {
        match error.code() {
            Some(_) => Fault::Server(error),
            None => Fault::Lost(reply::text_of(&error)),
        }
    }

    /// Of a call that changes nothing, or is safe to repeat.
    pub(super) fn not_applied(self) -> SinkError {
        match self {
            Fault::Server(error) => match reply::classify(&reply::text_of(&error)) {
                Class::Refused { retry, advice } => {
                    SinkError::NotApplied { reason: format!("{}; {advice}", reply::text_of(&error)), retry }
                }
                Class::Doubt => SinkError::NotApplied { reason: reply::text_of(&error), retry: true },
            },
            Fault::Lost(reason) => SinkError::NotApplied { reason, retry: true },
        }
    }
}

/// Nothing happened, and trying again may help.
pub(super) fn again(reason: impl Into<String>) -> SinkError {
    SinkError::NotApplied { reason: reason.into(), retry: true }
}

impl Shared {
    /// Makes a connection, loads the scripts, and asks what server it leads to. Whether that one fits is the caller's to look at.
    pub(super) async fn connect(&self) -> Result<(Link, Server), SinkError> {
        let limit = self.config.connect_timeout;
        let made = Box::pin(async {
            let Address { host, port, tls, .. } = &self.address;
            let stream = TcpStream::connect((host.trim_matches(['[', ']']), *port))
                .await
                .map_err(|error| Fault::Lost(error.to_string()))?;
            stream.set_nodelay(true).map_err(|error| Fault::Lost(error.to_string()))?;
            match tls {
                None => self.log_in(stream).await,
                Some((tls, name)) => {
                    let stream = tls.connect(name.clone(), stream).await;
                    self.log_in(stream.map_err(|error| Fault::Lost(format!("TLS: {error}")))?).await
                }
            }
        });
        match tokio::time::timeout(limit, made).await {
            Ok(Ok(made)) => Ok(made),
            Ok(Err(fault)) => Err(match fault.not_applied() {
                SinkError::NotApplied { reason, retry } => {
                    SinkError::NotApplied { reason: format!("cannot connect to Redis: {reason}"), retry }
                }
                other => other,
            }),
            Err(_) => Err(again(format!("connecting to Redis took more than {} ms", limit.as_millis()))),
        }
    }

    async fn log_in<S>(&self, stream: S) -> Result<(Link, Server), Fault>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let pulse = Pulse::begin();
        let stream = Watched { stream, pulse: Some(pulse.clone()) };
        // Each call is bounded where it is made.
        let config = AsyncConnectionConfig::new().set_response_timeout(None).set_connection_timeout(None);
        let login = self.address.login.clone().set_lib_name("oncegate", env!("CARGO_PKG_VERSION"));
        // The crate says that a log-in failed, and the server's word stands in what it quotes.
        let made = MultiplexedConnection::new_with_config(&login, stream, config).await;
        let (mut connection, driver) = made.map_err(|error| match reply::text_of(&error) {
            text if error.kind() == ::redis::ErrorKind::AuthenticationFailed => {
                Fault::Server((::redis::ErrorKind::Extension, "WRONGPASS", text).into())
            }
            _ => Fault::of(error),
        })?;
        let driver = tokio::spawn(driver).abort_handle();
        let mut loading = pipe();
        for text in TEXTS {
            loading.cmd("SCRIPT").arg("LOAD").arg(text);
        }
        let shas = loading.query_async(&mut connection).await.map_err(Fault::of)?;
        let mut link = Link { connection, shas, driver, acquired: false, pulse };
        let server = Server::ask(&mut link).await?;
        Ok((link, server))
    }
}

impl Link {
    /// Whether the connection still stands.
    pub(super) fn stands(&self) -> bool {
        self.pulse.life().stands()
    }

    /// What others are told by.
    pub(super) fn life(&self) -> Life {
        self.pulse.life()
    }

    /// One command, bounded by the caller.
    pub(super) async fn command(&mut self, command: &Cmd) -> Result<Value, Fault> {
        match self.connection.send_packed_command(command).await {
            Ok(Value::ServerError(error)) => Err(Fault::of(error.into())),
            Ok(value) => Ok(value),
            Err(error) => Err(Fault::of(error)),
        }
    }

    /// Several commands at once, each of which answers with a text, bounded by the caller.
    pub(super) async fn commands(&mut self, commands: &Pipeline) -> Result<Vec<String>, Fault> {
        commands.query_async(&mut self.connection).await.map_err(Fault::of)
    }

    /// Several hashes at once.
    pub(super) async fn hashes(
        &mut self,
        commands: &Pipeline,
    ) -> Result<Vec<BTreeMap<String, Vec<u8>>>, Fault> {
        commands.query_async(&mut self.connection).await.map_err(Fault::of)
    }

    /// One script, within `limit`. A server that does not know it any more is told again: it has not run.
    pub(super) async fn run(&mut self, script: Script, call: &Call, limit: Duration) -> Result<Value, Fault> {
        let command = call.command(&self.shas[script as usize]);
        let running = async {
            match self.command(&command).await {
                Err(Fault::Server(error)) if error.code() == Some("NOSCRIPT") => {
                    self.command(cmd("SCRIPT").arg("LOAD").arg(TEXTS[script as usize])).await?;
                    self.command(&command).await
                }
                result => result,
            }
        };
        let late = || Fault::Lost(format!("Redis did not answer within {} ms", limit.as_millis()));
        tokio::time::timeout(limit, running).await.map_err(|_| late())?
    }

    /// `INFO`.
    pub(super) async fn info(&mut self) -> Result<String, Fault> {
        match self.command(&cmd("INFO")).await? {
            Value::BulkString(text) => Ok(String::from_utf8_lossy(&text).into_owned()),
            Value::VerbatimString { text, .. } => Ok(text),
            _ => Err(Fault::Lost("INFO was answered by something else".to_owned())),
        }
    }
}
