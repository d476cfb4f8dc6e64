//! `[sinks.NAME]` with `type = "http"`, and the routes that go there.

use std::{path::PathBuf, time::Duration};

use adapters::upstream::{Upstream, UpstreamConfig};

use super::{
    naming,
    read::{Section, days, ms, secs},
    route,
    server::ServerConfig,
};
use crate::{
    door::http::forward::{AnswerRules, ForwardConfig, ForwardNaming, OnUnknown, ServerErrors},
    key::IdempotencyKey,
};

/// What the sink says; the rest is the route's.
pub(super) struct UpstreamAt {
    upstream: UpstreamConfig,
    answers: PathBuf,
    max_bytes: u64,
    rules: AnswerRules,
    make_key: bool,
    max_concurrent: usize,
}

impl UpstreamAt {
    /// One request with all its attempts and the time between them.
    fn takes_at_most(&self) -> Duration {
        let attempts = if self.rules.on_unknown == OnUnknown::Retry { self.rules.attempts } else { 1 };
        (self.upstream.timeout + self.upstream.connect_timeout) * attempts + secs(5) * (attempts - 1)
    }
}

/// Whether the sink is an HTTP service.
pub(super) fn is_upstream(section: &Section<'_, '_>) -> bool {
    section.item("type").is_some_and(|item| item.value.as_str() == Some("http"))
}

pub(super) fn upstream(section: Section<'_, '_>) -> Option<UpstreamAt> {
    let url_item = section.required("url", "\"http://HOST:8080\"");
    let url = url_item.clone().map(|item| item.secret()).and_then(|item| item.text());
    let answers = section.required("answers", "\"FOLDER\"").and_then(|item| {
        let folder = item.text()?;
        if folder.is_empty() {
            item.fault("is empty", "name a folder on a local disk");
        }
        Some(folder)
    });
    let upstream = UpstreamConfig {
        url: url.clone().unwrap_or_default(),
        connect_timeout: section.duration("connect_timeout", ms(100)..=secs(600), secs(5)),
        timeout: section.duration("request_timeout", ms(10)..=secs(3600), secs(30)),
        keep_alive: section.duration("keep_alive", ms(0)..=secs(3600), secs(4)),
        max_answer: section.size("stored_answer_max", 0..=64 << 20, 1 << 20) as usize,
    };
    if let (Some(item), Some(_)) = (url_item, &url)
        && let Err(fault) = Upstream::new(upstream.clone())
    {
        item.secret().fault(fault, "write http://HOST:PORT or https://HOST/PATH");
    }
    let defaults = AnswerRules::default();
    let on_unknown_item = section.item("on_unknown");
    let on_unknown = on_unknown_item
        .and_then(|item| item.choice(&[("stop", OnUnknown::Stop), ("retry", OnUnknown::Retry)]))
        .unwrap_or_default();
    let server_errors = section.choice(
        "server_errors",
        &[("unknown", ServerErrors::Unknown), ("final", ServerErrors::Final), ("retry", ServerErrors::Retry)],
        ServerErrors::default(),
    );
    let attempts_item = section.item("attempts");
    if let (Some(item), OnUnknown::Stop) = (&attempts_item, on_unknown) {
        item.fault("counts with on_unknown = \"retry\" only", "remove it, or set on_unknown = \"retry\"");
    }
    let attempts = attempts_item.and_then(|item| item.integer(1..=20)).unwrap_or(defaults.attempts.into());
    let not_applied = match section.item("not_applied") {
        None => defaults.not_applied,
        Some(item) => item
            .list()
            .iter()
            .filter_map(|item| item.integer(400..=599))
            .filter_map(|status| u16::try_from(status).ok())
            .collect(),
    };
    let made = Some(UpstreamAt {
        upstream,
        answers: answers.clone().unwrap_or_default().into(),
        max_bytes: section.size("answers_max_size", 1 << 20..=1 << 44, 1 << 30),
        rules: AnswerRules {
            on_unknown,
            server_errors,
            not_applied,
            attempts: u32::try_from(attempts).unwrap_or(1),
            ignore_mismatch: false,
        },
        make_key: section.flag("make_key", false),
        max_concurrent: section.count("max_concurrent", 1..=100_000, 1_000) as usize,
    });
    section.close();
    made.filter(|_| url.is_some() && answers.is_some())
}

/// `upstream` is none if its sink has faults: the route is looked at all the same.
pub(super) fn route(
    name: String,
    section: Section<'_, '_>,
    upstream: Option<&UpstreamAt>,
    server: Option<&ServerConfig>,
) -> Option<ForwardConfig> {
    if let Some(item) = section.item("kafka") {
        item.fault("does not fit an HTTP service, which takes requests and no records", "remove it");
    }
    let key = naming::key(&section, false, false);
    let digest = naming::digest(&section);
    let tenant_item = section.item("tenant");
    let tenant = tenant_item.as_ref().map(|item| item.texts()).unwrap_or_default();
    if let (Some(item), Some(name)) =
        (&tenant_item, tenant.iter().find(|name| http::HeaderName::from_bytes(name.as_bytes()).is_err()))
    {
        item.fault(format!("{name:?} is no name of a header"), "write it as \"x-account\"");
    }
    let ignore_mismatch = section.choice("mismatch", &[("reject", false), ("ignore", true)], false);
    let pass_keyless = section.choice("keyless", &[("refuse", false), ("pass", true)], false);
    let window_item = section.item("window");
    let window =
        window_item.as_ref().and_then(|item| item.duration(secs(1)..=route::MAX_WINDOW)).unwrap_or(days(1));
    if let (Some(item), Some(upstream)) = (&window_item, upstream)
        && window < upstream.takes_at_most()
    {
        item.fault(
            "is shorter than a request may take with all its attempts: its key would be forgotten while it is on its way",
            "widen it, or lower the sink's request_timeout or attempts",
        );
    }
    if let (Some(upstream), crate::naming::DigestOver::Pointers(_)) = (upstream, &digest)
        && upstream.rules.on_unknown == OnUnknown::Retry
    {
        section.fault(
            "names members in `digest`, and its sink sends again what is unknown: a copy with another body would go out under the first one's key",
            "leave `digest` out, or set on_unknown = \"stop\"",
        );
    }
    let wait = section.duration("wait", ms(0)..=secs(300), secs(5));
    let limits = route::http(&section, key.as_ref(), server.map(|server| server.bodies));
    section.item("sink");
    section.close();
    let (limits, _) = limits?;
    let upstream = upstream?;
    let key = key?;
    let make_key = upstream.make_key && key.explicit() != IdempotencyKey::Require;
    Some(ForwardConfig {
        upstream: upstream.upstream.clone(),
        book: upstream.answers.join(&name),
        max_bytes: upstream.max_bytes,
        naming: ForwardNaming { key, digest, tenant },
        rules: AnswerRules { ignore_mismatch, ..upstream.rules.clone() },
        pass_keyless,
        make_key,
        max_concurrent: upstream.max_concurrent,
        window,
        wait,
        limits,
        name,
    })
}
