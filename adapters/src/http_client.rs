//! One HTTP/1.1 connection, with TLS if the URL says so: for those who ask a server and must know what became of a request.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper::{body::Incoming, client::conn::http1::SendRequest};
use hyper_util::rt::TokioIo;
use percent_encoding::percent_decode_str;
use rustls::pki_types::ServerName;
use tokio::{net::TcpStream, task::JoinHandle};
use tokio_rustls::TlsConnector;

/// A URL without user and password.
pub(crate) fn shown(url: &str) -> &str {
    url.rsplit_once('@').map_or(url, |(_, rest)| rest)
}

/// The system's certificates.
pub(crate) fn trust() -> Result<Arc<rustls::ClientConfig>, String> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = rustls::RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|fault| format!("TLS cannot be set up: {fault}; report this build"))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(Arc::new(tls))
}

/// A connection. Dropping it closes it, also in the middle of a request.
pub(crate) struct Wire {
    sender: SendRequest<Full<Bytes>>,
    driver: JoinHandle<()>,
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// A whole answer.
#[cfg_attr(
    not(any(feature = "clickhouse", feature = "registry", feature = "stream-load")),
    allow(dead_code, reason = "an upstream takes its answers piece by piece")
)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    #[cfg_attr(
        not(any(feature = "clickhouse", feature = "stream-load")),
        expect(dead_code, reason = "a registry's answers have none that count")
    )]
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

/// There is no whole answer.
pub(crate) struct NoAnswer {
    /// Nothing of the request has left this process.
    #[cfg_attr(
        not(any(feature = "clickhouse", feature = "stream-load", feature = "upstream")),
        expect(dead_code, reason = "a question may be asked again in any case")
    )]
    pub(crate) unsent: bool,
    pub(crate) text: String,
}

impl Wire {
    /// Connects. The error is for people.
    pub(crate) async fn open(place: &Place, tls: &Arc<rustls::ClientConfig>) -> Result<Self, String> {
        let stream =
            TcpStream::connect((place.host.as_str(), place.port)).await.map_err(|fault| fault.to_string())?;
        // Small requests are not held back for more.
        stream.set_nodelay(true).map_err(|fault| fault.to_string())?;
        if place.tls {
            let name = ServerName::try_from(place.host.clone()).map_err(|fault| fault.to_string())?;
            let stream = TlsConnector::from(tls.clone())
                .connect(name, stream)
                .await
                .map_err(|fault| fault.to_string())?;
            Self::over(stream).await
        } else {
            Self::over(stream).await
        }
    }

    async fn over<S>(stream: S) -> Result<Self, String>
    where
        S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin + 'static,
    {
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|fault| fault.to_string())?;
        // Its fault is also that of the request.
        let driver = tokio::spawn(async move { drop(connection.await) });
        Ok(Self { sender, driver })
    }

    /// Sends `request` and takes the head of its answer.
    pub(crate) async fn begin(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, NoAnswer> {
        self.sender.ready().await.map_err(|fault| NoAnswer { unsent: true, text: fault.to_string() })?;
        self.sender.try_send_request(request).await.map_err(|mut fault| NoAnswer {
            unsent: fault.take_message().is_some(),
            text: fault.into_error().to_string(),
        })
    }

    /// Whether the other side has not closed it yet.
    #[cfg(feature = "upstream")]
    pub(crate) fn is_open(&self) -> bool {
        !self.sender.is_closed()
    }

    /// Whether it takes another request, once the answer to the last one is read.
    #[cfg(feature = "upstream")]
    pub(crate) async fn usable(&mut self) -> bool {
        self.sender.ready().await.is_ok()
    }

    #[cfg_attr(
        not(any(feature = "clickhouse", feature = "registry", feature = "stream-load")),
        allow(dead_code, reason = "an upstream takes its answers piece by piece")
    )]
    /// Sends `request` and takes the whole answer of at most `bound` bytes. After a fault the connection is of no more use.
    pub(crate) async fn ask(
        &mut self,
        request: Request<Full<Bytes>>,
        bound: usize,
    ) -> Result<Answer, NoAnswer> {
        let (head, body) = self.begin(request).await?.into_parts();
        let body = Limited::new(body, bound)
            .collect()
            .await
            .map_err(|fault| NoAnswer { unsent: false, text: format!("{fault} (at most {bound} bytes)") })?
            .to_bytes();
        Ok(Answer { status: head.status, headers: head.headers, body })
    }
}

/// A URL taken apart.
#[derive(Clone)]
pub(crate) struct Place {
    pub(crate) tls: bool,
    /// Without user and password.
    pub(crate) authority: String,
    pub(crate) host: String,
    pub(crate) port: u16,
    /// Without a slash at the end.
    pub(crate) path: String,
    pub(crate) user: Option<(String, String)>,
}

impl Place {
    /// `what` is there: for the message.
    pub(crate) fn parse(url: &str, what: &str) -> Result<Self, String> {
        let bad =
            || format!("{:?} is no URL of {what}; write http://host:port or https://host/path", shown(url));
        let uri: Uri = url.parse().map_err(|_| bad())?;
        let tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(bad()),
        };
        let authority = uri.authority().ok_or_else(bad)?;
        let host = authority.host().trim_matches(['[', ']']).to_owned();
        if host.is_empty() || uri.query().is_some() {
            return Err(bad());
        }
        let user = authority.as_str().rsplit_once('@').map(|(user, _)| {
            let (user, password) = user.split_once(':').unwrap_or((user, ""));
            (percent_decode(user), percent_decode(password))
        });
        let port = authority.port_u16().unwrap_or(if tls { 443 } else { 80 });
        let authority = shown(authority.as_str()).to_owned();
        Ok(Self { tls, authority, host, port, path: uri.path().trim_end_matches('/').to_owned(), user })
    }
}

fn percent_decode(text: &str) -> String {
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_escaped_stays() {
        assert_eq!(percent_decode("a%2Fb%zz%"), "a/b%zz%");
    }
}
