//! Where the server is, and who connects to it.

use std::{fmt, sync::Arc};

use ::redis::{ConnectionAddr, IntoConnectionInfo, RedisConnectionInfo};
use rustls::pki_types::ServerName;
use tokio_rustls::TlsConnector;

use crate::sink::Misfit;

/// A parsed URL.
pub(super) struct Address {
    pub(super) host: String,
    pub(super) port: u16,
    /// User, password, database.
    pub(super) login: RedisConnectionInfo,
    pub(super) tls: Option<(TlsConnector, ServerName<'static>)>,
}

/// Without user and password.
impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Address").field("host", &self.host).field("port", &self.port).finish_non_exhaustive()
    }
}

impl Address {
    /// What is wrong is said without the URL: it may hold a password.
    pub(super) fn parse(url: &str) -> Result<Self, Misfit> {
        let misfit = |what: String| {
            Misfit {
            what,
            remedy: "write redis://[[user]:password@]host[:port][/database], or rediss:// for TLS; percent-encode what is special in a password".to_owned(),
        }
        };
        let (tls, rest) = match url.split_once("://") {
            Some(("redis", rest)) => (false, rest),
            Some(("rediss", rest)) => (true, rest),
            Some((scheme @ ("unix" | "redis+unix"), _)) => {
                return Err(misfit(format!("the scheme {scheme}:// of the Redis URL is not in this build")));
            }
            _ => return Err(misfit("the Redis URL begins with neither redis:// nor rediss://".to_owned())),
        };
        if rest.contains(['?', '#']) {
            return Err(misfit("the Redis URL has options, of which none is known here".to_owned()));
        }
        // The crate knows TLS only with a stack of its own: the stream is made here.
        let info = format!("redis://{rest}")
            .into_connection_info()
            .map_err(|error| misfit(format!("the Redis URL cannot be read: {}", error.category())))?;
        let ConnectionAddr::Tcp(host, port) = info.addr().clone() else {
            return Err(misfit("the Redis URL names no host".to_owned()));
        };
        let login = info.redis_settings().clone();
        let tls = if tls { Some(connector(&host).map_err(misfit)?) } else { None };
        Ok(Self { host, port, login, tls })
    }
}

fn connector(host: &str) -> Result<(TlsConnector, ServerName<'static>), String> {
    let name = ServerName::try_from(host.trim_start_matches('[').trim_end_matches(']').to_owned())
        .map_err(|_| "the host of the Redis URL is no name that a certificate could bear".to_owned())?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = rustls::RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|fault| format!("TLS cannot be set up: {fault}"))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok((TlsConnector::from(Arc::new(config)), name))
}
