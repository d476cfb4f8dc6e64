//! A client of schema registries that speak Confluent's HTTP API: `GET /schemas/ids/{id}`, and the references of what it answers.
//!
//! Every fault says whether the registry has answered: an id that it does not know is the record's fault, anything else is not, and
//! may be over by the next attempt.

use std::{fmt, sync::Arc, time::Duration};

use base64::Engine;
use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::Full;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use crate::http_client::{Place, Wire, shown, trust};
pub use crate::schema::{Schema, SchemaKind};

/// The largest answer, bytes.
pub const MAX_ANSWER: usize = 4 << 20;
/// For messages about URLs.
const WHAT: &str = "a schema registry";
/// The most schemas that one may refer to, directly or not.
pub const MAX_REFERENCES: usize = 256;

/// Where a registry is, and who asks.
#[derive(Clone)]
pub struct RegistryConfig {
    /// `http://host:port` or `https://host/path`; several are tried in turn.
    pub urls: Vec<String>,
    /// User and password of basic authentication.
    pub user: Option<(String, String)>,
    /// Bound on one request, connecting included.
    pub timeout: Duration,
}

impl fmt::Debug for RegistryConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let urls: Vec<&str> = self.urls.iter().map(|url| shown(url)).collect();
        f.debug_struct("RegistryConfig")
            .field("urls", &urls)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

/// Why there is no schema.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RegistryFault {
    /// The registry has answered that there is no such schema.
    #[error("{0}")]
    Unknown(String),
    /// Not reached, not let in, or not understood: may be over by the next attempt.
    #[error("{0}")]
    Trouble(String),
}

use RegistryFault::{Trouble, Unknown};

/// A client. Makes a connection for each schema: there are few of them.
#[derive(Clone, Debug)]
pub struct Registry {
    config: RegistryConfig,
    tls: Arc<rustls::ClientConfig>,
}

impl Registry {
    /// Checks the URLs; connects to nothing. Says what is wrong and what to do.
    pub fn new(config: RegistryConfig) -> Result<Self, String> {
        if config.urls.is_empty() {
            return Err("the registry has no URL; name one, such as \"http://127.0.0.1:8081\"".to_owned());
        }
        for url in &config.urls {
            Place::parse(url, WHAT)?;
        }
        Ok(Self { config, tls: trust()? })
    }

    /// For messages: where it is.
    pub fn name(&self) -> String {
        self.config.urls.iter().map(|url| shown(url)).collect::<Vec<_>>().join(", ")
    }

    /// The schema of that id, with its references.
    pub async fn schema(&self, id: u32) -> Result<Schema, RegistryFault> {
        let what = format!("schema {id}");
        let answer = self.ask(&format!("/schemas/ids/{id}"), &what).await?;
        let mut schema = Schema { kind: answer.kind()?, text: answer.schema, references: Vec::new() };
        // Depth first, so that what is referred to comes first; a reference of two names is fetched once a name.
        enum Step {
            Fetch(Reference),
            Keep(String, String),
        }
        let mut steps: Vec<Step> = answer.references.into_iter().rev().map(Step::Fetch).collect();
        let mut fetched = 0;
        while let Some(step) = steps.pop() {
            let reference = match step {
                Step::Keep(name, text) => {
                    if !schema.references.iter().any(|(known, _)| *known == name) {
                        schema.references.push((name, text));
                    }
                    continue;
                }
                Step::Fetch(reference) => reference,
            };
            if schema.references.iter().any(|(known, _)| *known == reference.name) {
                continue;
            }
            fetched += 1;
            if fetched > MAX_REFERENCES {
                return Err(Unknown(format!(
                    "{what} refers to more than {MAX_REFERENCES} others, or to itself; register a flatter one"
                )));
            }
            let Reference { name, subject, version } = reference;
            let path = format!("/subjects/{}/versions/{version}", percent_encode(&subject));
            let answer = self.ask(&path, &format!("subject {subject:?}, to which {what} refers,")).await?;
            steps.push(Step::Keep(name, answer.schema));
            steps.extend(answer.references.into_iter().rev().map(Step::Fetch));
        }
        Ok(schema)
    }

    /// Asks one URL after the other until one answers.
    async fn ask(&self, path: &str, what: &str) -> Result<Answer, RegistryFault> {
        let mut faults = Vec::new();
        for url in &self.config.urls {
            let asked = tokio::time::timeout(self.config.timeout, self.get(url, path, what)).await;
            match asked {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(Unknown(fault))) => return Err(Unknown(fault)),
                Ok(Err(Trouble(fault))) => faults.push(format!("{}: {fault}", shown(url))),
                Err(_) => faults.push(format!("{}: no answer within {:?}", shown(url), self.config.timeout)),
            }
        }
        Err(Trouble(format!("the schema registry gives no {what}: {}", faults.join("; "))))
    }

    async fn get(&self, url: &str, path: &str, what: &str) -> Result<Answer, RegistryFault> {
        let place = Place::parse(url, WHAT).map_err(Trouble)?;
        let trouble = |fault: &dyn fmt::Display| Trouble(fault.to_string());
        let mut request = Request::get(format!("{}{path}", place.path))
            .header(header::HOST, &place.authority)
            .header(header::ACCEPT, "application/vnd.schemaregistry.v1+json, application/json");
        let user = place.user.clone().or_else(|| self.config.user.clone());
        if let Some((user, password)) = user {
            let token = base64::engine::general_purpose::STANDARD.encode(format!("{user}:{password}"));
            request = request.header(header::AUTHORIZATION, format!("Basic {token}"));
        }
        let request = request.body(Full::new(Bytes::new())).map_err(|fault| trouble(&fault))?;
        let mut wire = Wire::open(&place, &self.tls).await.map_err(Trouble)?;
        let answer = wire.ask(request, MAX_ANSWER).await.map_err(|fault| Trouble(fault.text))?;
        let (status, body) = (answer.status, answer.body);
        match status {
            StatusCode::OK => serde_json::from_slice(&body)
                .map_err(|_| Trouble("the answer is not what a schema registry gives".to_owned())),
            StatusCode::NOT_FOUND => {
                // 40401 to 40403 are the registry's own; a proxy or a wrong path answers 404 without them.
                let code = serde_json::from_slice::<ErrorBody>(&body).ok().map(|body| body.error_code);
                match code {
                    Some(40_401..=40_403) => Err(Unknown(format!(
                        "the schema registry knows no {what} ({})",
                        code.unwrap_or_default()
                    ))),
                    _ => Err(Trouble("404, and not from a schema registry; check the URL's path".to_owned())),
                }
            }
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                Err(Trouble(format!("{status}; check user and password")))
            }
            other => Err(Trouble(other.to_string())),
        }
    }
}

#[derive(serde::Deserialize)]
struct Answer {
    schema: String,
    #[serde(default, rename = "schemaType")]
    schema_type: Option<String>,
    #[serde(default)]
    references: Vec<Reference>,
}

impl Answer {
    fn kind(&self) -> Result<SchemaKind, RegistryFault> {
        match self.schema_type.as_deref() {
            None | Some("AVRO") => Ok(SchemaKind::Avro),
            Some("PROTOBUF") => Ok(SchemaKind::Protobuf),
            Some("JSON") => Ok(SchemaKind::Json),
            Some(_) => Err(Unknown("the schema's type is none of AVRO, PROTOBUF, JSON".to_owned())),
        }
    }
}

#[derive(serde::Deserialize)]
struct Reference {
    name: String,
    subject: String,
    version: i64,
}

#[derive(serde::Deserialize)]
struct ErrorBody {
    error_code: u32,
}

/// Fit for one segment of a path.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

fn percent_encode(text: &str) -> String {
    utf8_percent_encode(text, SEGMENT).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_checked_and_never_show_a_password() {
        let place = Place::parse("https://me:p%40ss@registry.example.com/api/", WHAT).unwrap();
        assert_eq!(
            (place.host.as_str(), place.port, place.path.as_str()),
            ("registry.example.com", 443, "/api")
        );
        assert_eq!(place.user, Some(("me".to_owned(), "p@ss".to_owned())));
        assert_eq!(place.authority, "registry.example.com");
        let place = Place::parse("http://[::1]:8081", WHAT).unwrap();
        assert_eq!((place.host.as_str(), place.port, place.path.as_str()), ("::1", 8081, ""));
        for bad in ["", "localhost:8081", "ftp://a", "http://", "http://me:secret@a?b=c", "http://a b"] {
            let said = Place::parse(bad, WHAT).map(|_| ()).unwrap_err();
            assert!(said.contains("http://host:port") && !said.contains("secret"), "{said}");
        }
        let config = RegistryConfig {
            urls: vec!["http://me:hunter2@a".into()],
            user: Some(("me".into(), "hunter2".into())),
            timeout: Duration::from_secs(1),
        };
        assert!(!format!("{:?}", Registry::new(config).unwrap()).contains("hunter2"));
    }

    #[test]
    fn subjects_are_fit_for_a_path() {
        assert_eq!(percent_encode("a/b:c d-value.é"), "a%2Fb%3Ac%20d-value.%C3%A9");
    }
}
