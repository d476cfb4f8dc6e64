//! One connection: how it is made (TLS, time-outs, name), and what an error on it means.

use std::{sync::Arc, time::Duration};

use percent_encoding::percent_decode_str;
use rustls::{
    ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::CryptoProvider,
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject},
};
use tokio_postgres::{Client, Config, config::SslMode, error::SqlState};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::sink::{Misfit, Pulse};

/// How to reach the server; checked once, when the sink is made.
#[derive(Clone)]
pub(super) struct Address {
    config: Config,
    tls: MakeRustlsConnect,
}

impl Address {
    /// Reads `url` (as libpq does, with `sslmode` = `disable`, `prefer`, `require`, `verify-ca` or `verify-full`, and
    /// `sslrootcert`).
    ///
    /// `prefer` encrypts if the server can and checks no certificate, as libpq does; the stricter modes check
    /// certificate and host name against `sslrootcert`, or the system's roots.
    pub(super) fn new(url: &str, connect_timeout: Duration) -> Result<Address, Misfit> {
        let (url, ssl) = take_ssl_options(url);
        let mut config: Config = url.parse().map_err(|error: tokio_postgres::Error| Misfit {
            what: format!("the url of the Postgres sink cannot be read: {}", cause(&error)),
            remedy: "write it as postgres://user:password@host:5432/database".into(),
        })?;
        let verify = match ssl.mode.as_deref() {
            None | Some("prefer" | "allow") => {
                config.ssl_mode(SslMode::Prefer);
                false
            }
            Some("disable") => {
                config.ssl_mode(SslMode::Disable);
                false
            }
            Some("require" | "verify-ca" | "verify-full") => {
                config.ssl_mode(SslMode::Require);
                true
            }
            Some(other) => {
                return Err(Misfit {
                    what: format!("sslmode {other:?} is not known"),
                    remedy: "use disable, prefer, require, verify-ca or verify-full".into(),
                });
            }
        };
        if config.get_password().is_none()
            && let Ok(password) = std::env::var("PGPASSWORD")
        {
            config.password(password);
        }
        config
            .connect_timeout(connect_timeout)
            .keepalives(true)
            .keepalives_idle(Duration::from_secs(5))
            .keepalives_interval(Duration::from_secs(2))
            .keepalives_retries(3)
            .tcp_user_timeout(Duration::from_secs(10));
        let tls = MakeRustlsConnect::new(tls_config(verify, ssl.root_cert.as_deref())?);
        Ok(Address { config, tls })
    }

    /// Connects under `application_name`; the connection's task ends with the client or the server, and the pulse with it.
    pub(super) async fn connect(
        &self,
        application_name: &str,
    ) -> Result<(Client, Pulse), tokio_postgres::Error> {
        let mut config = self.config.clone();
        config.application_name(application_name);
        let (client, connection) = config.connect(self.tls.clone()).await?;
        let pulse = Pulse::begin();
        let ends = pulse.clone();
        tokio::spawn(async move {
            let ended = connection.await;
            drop(ends);
            if let Err(error) = ended {
                tracing::debug!(error = %cause(&error), "connection to Postgres ended");
            }
        });
        Ok((client, pulse))
    }
}

/// Options that libpq knows and the driver does not.
struct SslOptions {
    mode: Option<String>,
    root_cert: Option<String>,
}

/// Takes `sslmode` and `sslrootcert` out of a url or a `key=value` list.
fn take_ssl_options(url: &str) -> (String, SslOptions) {
    let mut ssl = SslOptions { mode: None, root_cert: None };
    let mut keep = |pair: &str| match pair.split_once('=') {
        Some(("sslmode", value)) => {
            ssl.mode = Some(value.to_owned());
            false
        }
        Some(("sslrootcert", value)) => {
            ssl.root_cert = Some(percent_decode_str(value).decode_utf8_lossy().into_owned());
            false
        }
        _ => true,
    };
    let is_url = url.starts_with("postgres://") || url.starts_with("postgresql://");
    let kept = if is_url {
        match url.split_once('?') {
            None => url.to_owned(),
            Some((front, query)) => {
                let pairs: Vec<&str> = query.split('&').filter(|pair| keep(pair)).collect();
                if pairs.is_empty() { front.to_owned() } else { format!("{front}?{}", pairs.join("&")) }
            }
        }
    } else {
        // Quoted values may hold spaces, so only whole, plain words are taken out.
        let words: Vec<&str> = url.split(' ').filter(|word| keep(word)).collect();
        words.join(" ")
    };
    (kept, ssl)
}

fn tls_config(verify: bool, root_cert: Option<&str>) -> Result<ClientConfig, Misfit> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let unusable = |error: &dyn std::fmt::Display| Misfit {
        what: format!("TLS cannot be set up: {error}"),
        remedy: "report this build".into(),
    };
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| unusable(&error))?;
    if !verify && root_cert.is_none() {
        let verifier = Arc::new(AnyCertificate(provider));
        return Ok(builder.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth());
    }
    let mut roots = RootCertStore::empty();
    match root_cert {
        Some(path) => {
            let bad = |error: &dyn std::fmt::Display| Misfit {
                what: format!("sslrootcert {path:?} cannot be used: {error}"),
                remedy: "give a readable PEM file with the certificate of the server's authority".into(),
            };
            let certificates = CertificateDer::pem_file_iter(path).map_err(|error| bad(&error))?;
            for certificate in certificates {
                let certificate = certificate.map_err(|error| bad(&error))?;
                roots.add(certificate).map_err(|error| bad(&error))?;
            }
            if roots.is_empty() {
                return Err(bad(&"it holds no certificate"));
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

/// For `sslmode=prefer`: encryption against onlookers, without knowing the server; what libpq does there.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(
            message,
            cert,
            signature,
            &self.0.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(
            message,
            cert,
            signature,
            &self.0.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// `oncegate/<route>/`: what the application names of a route's connections begin with (P5).
pub(super) fn application_prefix(route: &str) -> String {
    let plain = |character: char| character.is_ascii_alphanumeric() || matches!(character, '_' | '-' | '.');
    if route.len() <= 32 && route.chars().all(plain) {
        return format!("oncegate/{route}/");
    }
    // The server cuts names at 63 bytes and replaces what is not ASCII: a hash keeps routes apart.
    let hash = route
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let head: String =
        route.chars().map(|character| if plain(character) { character } else { '_' }).take(15).collect();
    format!("oncegate/{head}~{hash:016x}/")
}

/// The whole name, within the server's 63 bytes.
pub(super) fn application_name(route: &str, owner: &str) -> String {
    let mut name = application_prefix(route);
    name.extend(owner.chars().map(|character| if character.is_ascii_graphic() { character } else { '_' }));
    name.truncate(63);
    name
}

/// What an error of the server means for a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Class {
    /// One of the rows is at fault.
    Row,
    /// The transaction is undone; trying it again may help.
    Again,
    /// The transaction is undone; the configuration or the schema must change first.
    Never,
    /// The connection is lost, or will be: whether a commit that was sent took effect is not known.
    Lost,
}

/// Sorts an error by its SQLSTATE.
pub(super) fn classify(error: &tokio_postgres::Error) -> Class {
    let Some(server) = error.as_db_error() else { return Class::Lost };
    let fatal = matches!(server.severity(), "FATAL" | "PANIC");
    class_of(fatal, server.code().code(), server.message())
}

fn class_of(fatal: bool, code: &str, message: &str) -> Class {
    match code.get(..2).unwrap_or("") {
        _ if fatal => Class::Lost,
        _ if code == SqlState::QUERY_CANCELED.code() => Class::Again,
        "22" | "23" | "44" | "54" | "P0" | "21" => Class::Row,
        "08" | "57" | "58" | "XX" => Class::Lost,
        "40" | "53" | "55" | "25" | "26" | "72" => Class::Again,
        _ if code == "0A000" && message.contains("cached plan") => Class::Again,
        _ if raised_by_code(code) => Class::Row,
        _ => Class::Never,
    }
}

/// Whether triggers and functions raise `code`: routines (38, 39), and the classes that the SQL standard leaves to those
/// who write them, of which the server has taken some.
fn raised_by_code(code: &str) -> bool {
    match code.get(..2).unwrap_or("") {
        "53" | "54" | "55" | "57" | "58" | "72" | "XX" => false,
        "38" | "39" => true,
        class => class.starts_with(|first| matches!(first, '5'..='9' | 'I'..='Z')),
    }
}

/// Says what the server refused, without its message and detail: they may hold values.
pub(super) fn refusal(error: &tokio_postgres::Error) -> String {
    let Some(server) = error.as_db_error() else { return "connection lost".into() };
    let code = server.code().code();
    let mut text = match code {
        "23502" => "null in a column that is not null",
        "23503" => "no such row in the table that it refers to",
        "23505" => "the value of a unique key is taken",
        "23514" => "a check does not hold",
        "23P01" => "it overlaps another row",
        "22001" => "too long",
        "22003" => "number out of range",
        "22P02" | "22P03" | "22007" | "22008" => "not a value of the column's type",
        "P0001" => "a trigger refused it",
        "44000" => "a check of the view does not hold",
        "21000" => "it meets another row of the same batch",
        _ if code.starts_with("54") => "it passes a limit of the server",
        _ if raised_by_code(code) => "a trigger or function refused it",
        _ => "the server refused it",
    }
    .to_owned();
    for (what, name) in
        [("constraint", server.constraint()), ("column", server.column()), ("type", server.datatype())]
    {
        if let Some(name) = name {
            text.push_str(&format!(", {what} {name:?}"));
        }
    }
    text.push_str(&format!(" (SQLSTATE {code})"));
    text
}

/// The innermost cause: what the driver's `Display` leaves out. Never a message that may hold values of a row.
pub(super) fn cause(error: &tokio_postgres::Error) -> String {
    if let Some(server) = error.as_db_error() {
        return told(server.code().code(), server.message());
    }
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        text = format!("{text}: {inner}");
        source = inner.source();
    }
    text
}

/// The message, if its class is one in which the server speaks of itself, the schema or the transaction.
fn told(code: &str, message: &str) -> String {
    match code.get(..2).unwrap_or("") {
        "08" | "0A" | "25" | "26" | "28" | "3D" | "3F" | "40" | "42" | "53" | "55" | "57" | "58" | "72"
        | "XX" => format!("{message} (SQLSTATE {code})"),
        _ => format!("the server reports an error; its message may hold values of a row (SQLSTATE {code})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_that_triggers_choose_are_the_rows_fault() {
        // A trigger of the shop raised its own code, U0001, for one bad order. The code was not known, so it counted as
        // an error of the schema: the whole route stopped for one row.
        for code in ["U0001", "50001", "60000", "99999", "IA001", "ZZ000", "38000", "38001", "39004", "P0001"]
        {
            assert_eq!(class_of(false, code, "order 17"), Class::Row, "{code}");
            assert_eq!(class_of(true, code, "order 17"), Class::Lost, "{code}: the connection is gone");
        }
        for (codes, class) in [
            (["22001", "23514", "44000", "54000", "P0002"], Class::Row),
            (["08006", "57P01", "58030", "XX000", "XX002"], Class::Lost),
            (["40001", "53200", "55P03", "57014", "72000"], Class::Again),
            (["42P01", "28000", "3D000", "0A000", "HV000"], Class::Never),
        ] {
            for code in codes {
                assert_eq!(class_of(false, code, ""), class, "{code}");
            }
        }
        assert_eq!(class_of(false, "0A000", "cached plan must not change result type"), Class::Again);
    }

    #[test]
    fn a_message_is_told_only_where_the_server_speaks_of_itself() {
        // A trigger put the card number of the order into its message, and the message went to the log.
        let message = "card 4111 is refused";
        for code in ["U0001", "38000", "39001", "P0001", "22P02", "23505", "44000", "HV000", "99999", "?"] {
            let text = told(code, message);
            assert!(!text.contains("4111") && text.contains(code), "{code}: {text}");
        }
        for code in ["08006", "0A000", "28P01", "3D000", "40P01", "42P01", "53300", "55P03", "57P03", "XX000"]
        {
            assert_eq!(told(code, message), format!("card 4111 is refused (SQLSTATE {code})"));
        }
    }

    #[test]
    fn ssl_options_are_taken_out_of_urls_and_lists() {
        let (url, ssl) =
            take_ssl_options("postgres://u@h/d?sslmode=verify-full&x=1&sslrootcert=%2Ftmp%2Fca.pem");
        assert_eq!(
            (url.as_str(), ssl.mode.as_deref(), ssl.root_cert.as_deref()),
            ("postgres://u@h/d?x=1", Some("verify-full"), Some("/tmp/ca.pem"))
        );
        let (list, ssl) = take_ssl_options("host=h sslmode=require dbname=d");
        assert_eq!((list.as_str(), ssl.mode.as_deref()), ("host=h dbname=d", Some("require")));
        assert_eq!(take_ssl_options("postgres://u@h/d?sslmode=prefer").0, "postgres://u@h/d");
    }

    #[test]
    fn a_bad_url_or_mode_or_certificate_is_a_misfit() {
        let second = Duration::from_secs(1);
        for url in [
            "nonsense",
            "postgres://h/d?sslmode=maybe",
            "postgres://h/d?sslmode=require&sslrootcert=/nonexistent",
        ] {
            assert!(Address::new(url, second).is_err(), "{url}");
        }
        assert!(Address::new("postgres://h/d?sslmode=require", second).is_ok());
    }

    #[test]
    fn application_names_keep_routes_apart_within_the_servers_bound() {
        assert_eq!(application_name("orders", "host-1:77"), "oncegate/orders/host-1:77");
        let long = application_name(&"é".repeat(40), &"o".repeat(80));
        assert_eq!(long.len(), 63);
        assert!(long.is_ascii() && long.starts_with(&application_prefix(&"é".repeat(40))));
        assert_ne!(application_prefix(&"x".repeat(40)), application_prefix(&"x".repeat(41)));
    }
}
