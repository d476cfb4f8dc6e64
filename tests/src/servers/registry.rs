//! A stand-in for a schema registry: the part of Confluent's HTTP API that readers use, and faults at will.

use std::{
    collections::{BTreeMap, HashMap},
    convert::Infallible,
    sync::Arc,
};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpListener;

#[derive(Default)]
struct State {
    answers: BTreeMap<String, String>,
    /// Answered instead, while set.
    fault: Option<(StatusCode, String)>,
    /// What `Authorization` must be, if anything.
    authorization: Option<String>,
    asked: HashMap<String, usize>,
}

/// A schema registry on a free port, for as long as it is held.
#[derive(Clone)]
pub struct Registry {
    state: Arc<Mutex<State>>,
    port: u16,
}

impl Registry {
    /// Listens at once.
    pub async fn start() -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let state = Arc::new(Mutex::new(State::default()));
        let served = state.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let state = served.clone();
                let service = service_fn(move |request: Request<Incoming>| {
                    let answer = state.lock().answer(&request);
                    async move { Ok::<_, Infallible>(answer) }
                });
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
            }
        });
        Self { state, port }
    }

    /// Where it is.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Keeps a schema under `id`. `kind` is `AVRO`, `PROTOBUF` or `JSON`; references are name and subject, whose version is 1.
    pub fn register(&self, id: u32, kind: &str, schema: &str, references: &[(&str, &str)]) {
        let answer = answer(kind, schema, references);
        self.state.lock().answers.insert(format!("/schemas/ids/{id}"), answer);
    }

    /// Keeps a schema as version 1 of `subject`, as others refer to it. The subject stands in the path as it was encoded.
    pub fn subject(&self, subject: &str, kind: &str, schema: &str, references: &[(&str, &str)]) {
        let answer = answer(kind, schema, references);
        self.state.lock().answers.insert(format!("/subjects/{subject}/versions/1"), answer);
    }

    /// Answers so from now on; none: as it should.
    pub fn fail(&self, fault: Option<(StatusCode, &str)>) {
        self.state.lock().fault = fault.map(|(status, body)| (status, body.to_owned()));
    }

    /// Takes nobody in without this `Authorization`.
    pub fn protect(&self, authorization: &str) {
        self.state.lock().authorization = Some(authorization.to_owned());
    }

    /// How often `path` was asked for.
    pub fn asked(&self, path: &str) -> usize {
        self.state.lock().asked.get(path).copied().unwrap_or(0)
    }
}

fn answer(kind: &str, schema: &str, references: &[(&str, &str)]) -> String {
    let references: Vec<_> = references
        .iter()
        .map(|(name, subject)| serde_json::json!({ "name": name, "subject": subject, "version": 1 }))
        .collect();
    let mut answer = serde_json::json!({ "schema": schema });
    // Registries say nothing of the type where it is Avro.
    if kind != "AVRO" {
        answer["schemaType"] = kind.into();
    }
    if !references.is_empty() {
        answer["references"] = references.into();
    }
    answer.to_string()
}

impl State {
    fn answer(&mut self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        let path = request.uri().path().to_owned();
        *self.asked.entry(path.clone()).or_default() += 1;
        let given = request.headers().get("authorization").and_then(|value| value.to_str().ok());
        let (status, body) = match (&self.fault, self.answers.get(&path)) {
            _ if self.authorization.as_deref().is_some_and(|wanted| given != Some(wanted)) => {
                (StatusCode::UNAUTHORIZED, r#"{"error_code":40101,"message":"Unauthorized"}"#.to_owned())
            }
            (Some((status, body)), _) => (*status, body.clone()),
            (None, Some(answer)) => (StatusCode::OK, answer.clone()),
            (None, None) => {
                (StatusCode::NOT_FOUND, r#"{"error_code":40403,"message":"Schema not found"}"#.to_owned())
            }
        };
        let mut response = Response::new(Full::new(Bytes::from(body)));
        *response.status_mut() = status;
        response
    }
}
