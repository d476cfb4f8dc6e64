//! Start-up checks: what does not fit is named, with what to do.

use adapters::{
    redis::{Durability, RedisConfig, RedisSink},
    sink::{Mode, Sink},
};
use oncegate_tests::servers::Redis;

use crate::rig::{config, server};

/// What a sink of this configuration has against the server.
async fn misfits(config: RedisConfig) -> Vec<String> {
    let sink = RedisSink::new(config).expect("a good configuration");
    match sink.probe().await {
        Ok(_) => Vec::new(),
        Err(misfits) => {
            assert!(misfits.iter().all(|misfit| !misfit.remedy.is_empty()), "{misfits:?}");
            misfits.iter().map(ToString::to_string).collect()
        }
    }
}

/// One of them, which says `word`.
#[track_caller]
fn assert_one(found: &[String], word: &str) {
    assert!(found.len() == 1 && found[0].contains(word), "{word}: {found:#?}");
}

#[tokio::test]
async fn the_servers_settings_are_looked_at() {
    let redis = server();
    let config = config(&redis, Mode::UpsertIfNewer).await;
    let always = RedisConfig { durability: Durability::Always, ..config.clone() };
    assert!(misfits(always.clone()).await.is_empty());
    for (setting, value, word, back) in [
        ("maxmemory-policy", "allkeys-lru", "evicted", "noeviction"),
        ("maxmemory-policy", "allkeys-random", "evicted", "volatile-ttl"),
        ("appendfsync", "everysec", "durability = \"always\"", "always"),
        ("appendfsync", "no", "appendfsync \"no\"", "always"),
        ("appendonly", "no", "appendonly is no", "yes"),
        ("no-appendfsync-on-rewrite", "yes", "no-appendfsync-on-rewrite", "no"),
        ("proto-max-bulk-len", "1048576", "proto-max-bulk-len", "536870912"),
    ] {
        redis.command(0, &["CONFIG", "SET", setting, value]).expect("set");
        assert_one(&misfits(always.clone()).await, word);
        redis.command(0, &["CONFIG", "SET", setting, back]).expect("set");
    }
    assert!(misfits(always.clone()).await.is_empty(), "volatile-ttl evicts no key of ours");
    redis.command(0, &["CONFIG", "SET", "appendfsync", "everysec"]).expect("set");
    assert!(misfits(config.clone()).await.is_empty());
    redis.command(0, &["CONFIG", "SET", "appendonly", "no"]).expect("set");
    assert_one(&misfits(config.clone()).await, "asks for more");
    assert!(misfits(RedisConfig { durability: Durability::Any, ..config.clone() }).await.is_empty());
    redis.command(0, &["CONFIG", "SET", "appendonly", "yes"]).expect("set");

    // The user's permissions; CONFIG is not needed.
    let as_user = |rule: &str| {
        redis
            .command(0, &["ACL", "SETUSER", "gate", "reset", "on", ">secret", "~*", "+@all"])
            .expect("a user");
        redis.command(0, &["ACL", "SETUSER", "gate", rule]).expect("a rule");
        RedisConfig { url: redis.url(1).replace("redis://", "redis://gate:secret@"), ..config.clone() }
    };
    assert!(misfits(as_user("-config")).await.is_empty());
    assert_one(
        &misfits(RedisConfig { durability: Durability::Always, ..as_user("-config") }).await,
        "may not be read",
    );
    assert_one(&misfits(as_user("-xadd")).await, "XADD on keys of Oncegate");
    assert_one(&misfits(as_user("-unlink")).await, "UNLINK on rows");
    assert_one(&misfits(as_user("-info")).await, "NOPERM");
    assert_one(
        &misfits(as_user("nopass")).await.into_iter().chain(["none".into()]).collect::<Vec<_>>(),
        "none",
    );
    let wrong =
        RedisConfig { url: redis.url(1).replace("redis://", "redis://gate:wrong@"), ..config.clone() };
    redis.command(0, &["ACL", "SETUSER", "gate", "reset", "on", ">secret"]).expect("a rule");
    let found = misfits(wrong).await;
    assert_one(&found, "WRONGPASS");
    assert!(!found[0].contains("wrong@"), "{found:?}");

    // What is at the prefix.
    redis.command(1, &["SET", "rows:?", "text"]).expect("set");
    assert_one(&misfits(config.clone()).await, "there is a string");
    let other = RedisConfig { prefix: "row?:".to_owned(), ..config.clone() };
    assert!(misfits(other).await.is_empty(), "signs of patterns mean themselves");

    redis.command(0, &["REPLICAOF", "127.0.0.1", "1"]).expect("set");
    assert_one(&misfits(config).await, "\"slave\"");
}

#[tokio::test]
async fn clusters_and_no_servers_are_refused_by_name() {
    let redis = Redis::start("databases 1\ncluster-enabled yes");
    let server = server();
    let config = config(&server, Mode::Insert).await;
    let cluster = RedisConfig { url: redis.url(0), ..config.clone() };
    assert_one(&misfits(cluster).await, "cluster mode");
    let nobody = RedisConfig { url: "redis://127.0.0.1:1/0".to_owned(), ..config };
    assert_one(&misfits(nobody).await, "cannot connect to Redis");
}
