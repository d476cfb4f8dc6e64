//! HTTP and relays into Redis, through kills of the gateway and of the server, connections cut around a batch, and replies that come too
//! late: the keys equal the model, field by field, and the marks hold each event once.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use oncegate_tests::{
    eventually, for_kills,
    gateway::Gateway,
    http_client::HttpClient,
    kills,
    redis_proxy::{RedisProxy, Snag},
    route::OrdersRoute,
    servers::{Hashes, Kafka, Produced, Redis},
    workload::{Change, Mode, Order, Workload, now_us, rfc3339},
};
use rand::{Rng, SeedableRng, rngs::StdRng, seq::SliceRandom};

const PARTITIONS: u32 = 4;
const COPIES: u32 = 20;
/// Shorter than the replies that come too late.
const TIMEOUT: Duration = Duration::from_millis(800);
const SEED: u64 = 31;

/// The route with a Redis sink in place of its own.
fn toml(route: &OrdersRoute) -> String {
    let name = &route.name;
    let sink = format!(
        "type = \"redis\"\nprefix = \"{name}:\"\ndurability = \"always\"\ntimeout = \"{}ms\"\n\
         columns = {{ order_id = \"text\", user_id = \"integer\", amount = \"number\", currency = \"text\", status = \"text\", \
         updated_at = \"timestamp\", note = \"text\" }}",
        TIMEOUT.as_millis()
    );
    let text = route.toml();
    let changed =
        text.replace("type = \"postgres\"", &sink).replace(&format!("table = \"public.{name}\"\n"), "");
    assert!(changed != text && !changed.contains("table ="), "{changed}");
    changed
}

/// What Redis must hold of `orders`.
fn expected(name: &str, mode: Mode, orders: &BTreeMap<String, Order>) -> Hashes {
    let row = |order: &Order| {
        let moment = rfc3339(order.updated_us);
        // As the version it has nine decimals.
        let moment = if mode == Mode::UpsertIfNewer { moment.replace('Z', "000Z") } else { moment };
        let fields = [
            ("order_id", order.order_id.clone()),
            ("user_id", order.user_id.to_string()),
            ("amount", order.amount.clone()),
            ("currency", order.currency.to_owned()),
            ("status", order.status.to_owned()),
            ("updated_at", moment),
            ("note", order.note.clone()),
        ];
        fields.map(|(field, value)| (field.to_owned(), value)).into()
    };
    orders.values().map(|order| (format!("{name}:{}", order.order_id), row(order))).collect()
}

/// The first rows that differ.
fn differences(found: &Hashes, expected: &Hashes) -> Vec<String> {
    let keys: std::collections::BTreeSet<_> = found.keys().chain(expected.keys()).collect();
    keys.into_iter()
        .filter(|key| found.get(*key) != expected.get(*key))
        .take(5)
        .map(|key| format!("{key}: {:?}, not {:?}", found.get(key), expected.get(key)))
        .collect()
}

fn assert_equal(redis: &Redis, name: &str, expected: &Hashes) {
    let found = redis.hashes(0, &format!("{name}:"));
    let differences = differences(&found, expected);
    assert!(differences.is_empty(), "{name}: {} keys of {}: {differences:#?}", found.len(), expected.len());
}

/// How many keys the marks of a route hold.
fn marked(redis: &Redis, route: &str) -> usize {
    let mut connection = redis.connect(0);
    let keys: Vec<String> =
        redis::cmd("KEYS").arg(format!("oncegate:{{{route}}}:marks:*")).query(&mut connection).expect("keys");
    let count = |key: String| -> usize {
        let marks: Vec<(String, redis::Value)> =
            redis::cmd("HGETALL").arg(key).query(&mut connection).expect("marks");
        let about = marks.iter().filter(|(field, _)| field.ends_with("/about")).map(|(_, about)| {
            let redis::Value::BulkString(about) = about else { panic!("a text, not {about:?}") };
            let about = String::from_utf8_lossy(about).into_owned();
            about.rsplit(' ').next().and_then(|count| count.parse::<usize>().ok()).expect("a count")
        });
        about.sum()
    };
    keys.into_iter().map(count).sum()
}

/// What has been done to gateway, server and connections.
#[derive(Debug, Default)]
struct Done {
    kills: usize,
    server_kills: usize,
    snags: usize,
    cuts: usize,
}

/// One round of trouble; gateway and server run in the end.
async fn trouble(
    round: usize,
    gateway: &mut Gateway,
    redis: &mut Redis,
    proxy: &RedisProxy,
    random: &mut StdRng,
    done: &mut Done,
) {
    let late = Snag::Late(2 * TIMEOUT);
    let snag = [Snag::Reply, Snag::Before, Snag::After, late, Snag::Half][round % 5];
    let sprung = proxy.snag(snag);
    done.snags += usize::from(tokio::time::timeout(Duration::from_secs(5), sprung).await.is_ok());
    tokio::time::sleep(Duration::from_millis(random.random_range(0..300))).await;
    match round % 4 {
        1 => {
            proxy.cut_all();
            done.cuts += 1;
        }
        2 => {
            redis.kill();
            tokio::time::sleep(Duration::from_millis(random.random_range(0..300))).await;
            redis.run();
            done.server_kills += 1;
        }
        _ => {}
    }
    tokio::time::sleep(Duration::from_millis(random.random_range(0..300))).await;
    gateway.kill();
    done.kills += 1;
    gateway.spawn();
    // Some are killed again while they start.
    if round % 5 != 4 {
        gateway.ready(Duration::from_secs(60)).await;
    }
}

/// One mode's topic, keys and what is left to produce.
struct Course {
    name: &'static str,
    workload: Workload,
    expected: Hashes,
    produced: usize,
}

/// Relays of all modes at once, `records` each, through `kills`.
async fn relays(names: [&'static str; 3], records: usize, kills: usize) {
    let (kafka, mut redis) = (Kafka::shared(), Redis::start(""));
    let proxy = RedisProxy::start(redis.port()).await;
    let url = redis.url_through(proxy.port(), 0);
    let mut courses = Vec::new();
    let mut config = String::new();
    for (seed, (name, mode)) in
        (SEED..).zip(names.into_iter().zip([Mode::Insert, Mode::Upsert, Mode::UpsertIfNewer]))
    {
        kafka.topic(name, PARTITIONS.cast_signed()).await;
        let workload = Workload::generate(mode, seed, records, COPIES, now_us());
        let expected = expected(name, mode, &workload.model());
        courses.push(Course { name, workload, expected, produced: 0 });
        let route = OrdersRoute::new(name, mode, &url).relay(&kafka.brokers(), name, name).as_instance("one");
        config += &toml(&route);
    }
    let mut gateway = Gateway::new(&config);
    gateway.start().await;
    let mut random = StdRng::seed_from_u64(SEED);
    let (mut done, begun) = (Done::default(), Instant::now());
    for round in 0..kills {
        for course in &mut courses {
            let until = records * (round + 1) / kills;
            let slice = course.workload.sent[course.produced..until].iter();
            kafka.produce(
                course.name,
                slice.map(|change| change.produced(PARTITIONS)).collect::<Vec<Produced>>(),
            );
            course.produced = until;
        }
        trouble(round, &mut gateway, &mut redis, &proxy, &mut random, &mut done).await;
    }
    gateway.ready(Duration::from_secs(60)).await;
    println!("{done:?} within {:?}, {} writes", begun.elapsed(), proxy.writes());
    assert!(done.snags * 2 > kills, "{done:?}");
    for course in &courses {
        let prefix = format!("{}:", course.name);
        eventually("all events in the marks", Duration::from_secs(180), async || {
            let marked = marked(&redis, course.name);
            if marked >= course.workload.distinct { Ok(()) } else { Err(format!("{prefix} {marked}")) }
        })
        .await;
    }
    // What would come twice would come now.
    tokio::time::sleep(Duration::from_secs(1)).await;
    for course in &courses {
        assert_equal(&redis, course.name, &course.expected);
        assert_eq!(marked(&redis, course.name), course.workload.distinct, "{}: each event once", course.name);
    }
    println!("all of {} records after {:?}", 3 * records, begun.elapsed());
    // An empty store learns from the marks; the topics are not read again.
    assert!(gateway.terminate().await.success(), "{}", gateway.log_tail(20));
    gateway.delete_store();
    gateway.start().await;
    for course in &courses {
        let copies = course.workload.sent.iter().take(records / 10);
        kafka.produce(course.name, copies.map(|change| change.produced(PARTITIONS)).collect::<Vec<_>>());
        eventually("the copies are read", Duration::from_secs(60), async || {
            let ends = kafka.ends(course.name, PARTITIONS.cast_signed());
            let committed = kafka.committed(course.name, PARTITIONS.cast_signed(), course.name);
            if ends == committed { Ok(()) } else { Err(format!("{committed:?} of {ends:?}")) }
        })
        .await;
        assert_equal(&redis, course.name, &course.expected);
        assert_eq!(marked(&redis, course.name), course.workload.distinct, "{}", course.name);
    }
    assert!(gateway.terminate().await.success(), "{}", gateway.log_tail(20));
}

#[tokio::test(flavor = "multi_thread")]
async fn relays_into_redis_end_in_their_models_through_kills_of_both_and_lost_replies() {
    relays(["inserted", "upserted", "newest"], 12_000, kills(8)).await;
}

/// The long run: see docs/redis.md for its command.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes"]
async fn relays_into_redis_end_in_their_models_through_fifty_kills() {
    relays(["inserted-long", "upserted-long", "newest-long"], 300_000, 50).await;
}

/// What one client has sent and had acknowledged.
struct Sent {
    workload: Workload,
    count: usize,
}

fn payload(change: &Change) -> String {
    match change {
        Change::Put(order) => order.json(),
        Change::Delete { order_id, updated_us } => {
            format!(r#"{{"order_id":"{order_id}","updated_at":"{}","deleted":true}}"#, rfc3339(*updated_us))
        }
    }
}

/// Sends one record until it is decided; whether it was a copy.
async fn send(client: &mut HttpClient, route: &str, change: &Change, deadline: Instant) -> bool {
    let path = format!("/v1/{route}");
    let done = client.post_until_acknowledged(&path, &[], payload(change), deadline).await;
    let (status, outcome) = (done.response.status, done.response.header("oncegate-outcome").to_owned());
    assert!(matches!(status, 200 | 201), "{status}: {}", done.response.text());
    assert!(["written", "updated", "stale", "duplicate"].contains(&outcome.as_str()), "{outcome}");
    outcome == "duplicate"
}

#[tokio::test(flavor = "multi_thread")]
async fn http_into_redis_ends_in_its_model_through_kills_of_both_and_lost_replies() {
    const CLIENTS: u64 = 3;
    const ROUNDS: usize = 10;
    let rounds = kills(ROUNDS);
    let mut redis = Redis::start("");
    let proxy = RedisProxy::start(redis.port()).await;
    let url = redis.url_through(proxy.port(), 0);
    let routes = [("changed", Mode::Upsert), ("versioned", Mode::UpsertIfNewer)];
    let mut config = String::new();
    for (name, mode) in routes {
        let options = "delete_when = \"/deleted\"";
        // The relay's form of versions stands beside the payload; here they are in it.
        let route = OrdersRoute::new(name, Mode::Upsert, &url).options(options);
        let text = toml(&route).replace("window = \"24h\"", "unknown_fields = \"ignore\"\nwindow = \"24h\"");
        config += &match mode {
            Mode::UpsertIfNewer => {
                text.replace("mode = \"upsert\"", "mode = \"upsert-if-newer\"\nversion = \"updated_at\"")
            }
            _ => text,
        };
    }
    let mut gateway = Gateway::new(&config);
    gateway.start().await;
    let over = Arc::new(AtomicBool::new(false));
    let deadline = Instant::now() + for_kills(Duration::from_secs(180), ROUNDS);
    let records = 1600 * rounds.max(ROUNDS) / ROUNDS;
    let clients: Vec<_> = (0..CLIENTS)
        .flat_map(|number| routes.map(|route| (number, route)))
        .map(|(number, (name, mode))| {
            let (over, mut client) = (over.clone(), HttpClient::new(gateway.listen()));
            tokio::spawn(async move {
                let workload = Workload::generate(mode, SEED * 100 + number, records, COPIES, now_us());
                let mut known = std::collections::HashSet::new();
                let mut count = 0;
                while !over.load(Ordering::Relaxed) && count < workload.sent.len() {
                    let change = &workload.sent[count];
                    let copy = !known.insert((change.order_id().to_owned(), change.updated_us()));
                    let duplicate = send(&mut client, name, change, deadline).await;
                    assert!(duplicate || !copy, "{name}: a copy was answered as new: {change:?}");
                    count += 1;
                }
                (name, Sent { workload, count })
            })
        })
        .collect();
    let mut random = StdRng::seed_from_u64(SEED);
    let mut done = Done::default();
    for round in 0..rounds {
        trouble(round, &mut gateway, &mut redis, &proxy, &mut random, &mut done).await;
    }
    gateway.ready(Duration::from_secs(60)).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    over.store(true, Ordering::Relaxed);
    let mut sent = Vec::new();
    for client in clients {
        sent.push(client.await.expect("no client gave up"));
    }
    let mut models = BTreeMap::new();
    for (name, mode) in routes {
        let (mut model, mut distinct) = (BTreeMap::new(), 0);
        for (_, Sent { workload, count }) in sent.iter().filter(|(route, _)| *route == name) {
            let workload = Workload { sent: workload.sent[..*count].to_vec(), ..workload.clone() };
            let known: std::collections::HashSet<_> =
                workload.sent.iter().map(|change| (change.order_id(), change.updated_us())).collect();
            distinct += known.len();
            model.extend(workload.model());
        }
        println!("{done:?}: {name}: {distinct} events acknowledged, {} rows", model.len());
        assert!(distinct > 300, "{name}: only {distinct} events");
        models.insert(name, (expected(name, mode, &model), distinct));
    }
    assert!(done.snags * 2 > rounds, "{done:?}");
    let check = || {
        for (name, (expected, distinct)) in &models {
            assert_equal(&redis, name, expected);
            assert_eq!(marked(&redis, name), *distinct, "{name}: each event once");
        }
    };
    check();
    // Everything once more, in any order: an old change that took effect now would overwrite a newer one.
    let mut client = HttpClient::new(gateway.listen());
    for (name, Sent { workload, count }) in &sent {
        let mut again: Vec<&Change> = workload.sent[..*count].iter().collect();
        again.shuffle(&mut random);
        for change in again.into_iter().take(400) {
            assert!(send(&mut client, name, change, deadline).await, "{name}: {change:?}");
        }
    }
    check();
    assert!(gateway.terminate().await.success(), "{}", gateway.log_tail(20));
}

/// P6: what a server that went back has lost is reported, and taken again as new, also where the connection stood all the time.
#[tokio::test(flavor = "multi_thread")]
async fn p6_http_into_a_redis_that_went_back_takes_the_lost_records_again() {
    let patience = Duration::from_secs(60);
    let mut redis = Redis::start("appendfsync everysec");
    let route = OrdersRoute::new("orders", Mode::Insert, &redis.url(0));
    let text = toml(&route).replace("durability = \"always\"", "durability = \"everysec\"");
    let mut gateway = Gateway::new(&text);
    gateway.start().await;
    let workload = Workload::generate(Mode::Insert, 52, 200, 0, now_us());
    let mut client = HttpClient::new(gateway.listen());
    let mut send =
        async |at: usize| send(&mut client, "orders", &workload.sent[at], Instant::now() + patience).await;
    for at in 0..100 {
        assert!(!send(at).await, "{at}");
    }
    redis.kill();
    redis.keep_files("early");
    redis.run();
    for at in 100..200 {
        assert!(!send(at).await, "{at}");
    }
    redis.kill();
    redis.restore("early");
    redis.run();
    // The store knew all of them: the verdict has to wait until the server was asked again.
    for at in (0..200).rev() {
        assert_eq!(send(at).await, at < 100, "{at}");
    }
    gateway.logged(&["went back", "http/0", "send them again"], patience).await;
    let model = expected("orders", Mode::Insert, &workload.model());
    assert_equal(&redis, "orders", &model);

    // Nothing breaks: the next heartbeat finds it.
    redis.command(0, &["FLUSHDB"]).expect("emptied");
    eventually("a look at the server", patience, async || {
        let shards = redis.hashes(0, "oncegate:{orders}:shard:");
        if shards.is_empty() { Err("it was not taken again") } else { Ok(()) }
    })
    .await;
    for at in 0..200 {
        assert!(!send(at).await, "{at}");
    }
    assert_equal(&redis, "orders", &model);
}
