//! HTTP and a relay into files, through kills of the gateway, while a reader takes every finished file away: what it has in the end is
//! each acknowledged record once, byte for byte, and nothing else.

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use oncegate_tests::{
    callers::Callers,
    conformance::folders::{book, finished_lines},
    gateway::Gateway,
    servers::{Kafka, Produced},
};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// Without `ONCEGATE_KILLS`; the relay has half of them.
const KILLS: usize = 24;
/// One record in so many is a copy of an earlier one, or bad.
const COPY_EVERY: usize = 5;
const BAD_EVERY: usize = 500;
const RELAYED: usize = 60_000;

/// Takes finished files away as they come.
struct Reader {
    folder: PathBuf,
    lines: Arc<Mutex<Vec<String>>>,
    files: Arc<AtomicUsize>,
    over: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Reader {
    fn start(folder: PathBuf) -> Self {
        fs::create_dir_all(&folder).expect("a folder");
        let mut reader =
            Self { folder, lines: Arc::default(), files: Arc::default(), over: Arc::default(), thread: None };
        let (folder, lines, files, over) =
            (reader.folder.clone(), reader.lines.clone(), reader.files.clone(), reader.over.clone());
        reader.thread = Some(std::thread::spawn(move || {
            let mut random = StdRng::seed_from_u64(3);
            while !over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(random.random_range(1..40)));
                let entries = fs::read_dir(&folder).expect("the folder can be read");
                let names = entries.map(|entry| entry.expect("an entry").path());
                for path in names.filter(|path| path.extension().is_some_and(|ending| ending == "ndjson")) {
                    let text = fs::read_to_string(&path).expect("a finished file");
                    assert!(text.ends_with('\n'), "{}: a torn line", path.display());
                    // Some are left lying for a while: they must not change.
                    if random.random_bool(0.2) {
                        std::thread::sleep(Duration::from_millis(30));
                        assert!(
                            fs::read_to_string(&path).expect("it is there") == text,
                            "{}",
                            path.display()
                        );
                    }
                    fs::remove_file(&path).expect("it is ours to take");
                    lines.lock().expect("no panic").extend(text.lines().map(str::to_owned));
                    files.fetch_add(1, Ordering::Relaxed);
                }
            }
        }));
        reader
    }

    /// Waits until as many lines have come as `model` has, stops, and compares.
    async fn equals(mut self, model: &BTreeMap<String, String>) {
        oncegate_tests::eventually("all rows in finished files", Duration::from_secs(120), async || {
            let count = self.lines.lock().expect("no panic").len();
            if count >= model.len() { Ok(()) } else { Err(format!("{count} lines of {}", model.len())) }
        })
        .await;
        // What would come twice would come now.
        tokio::time::sleep(Duration::from_secs(4)).await;
        self.over.store(true, Ordering::Relaxed);
        self.thread.take().expect("it runs").join().expect("files are finished once they are seen");
        let mut lines = self.lines.lock().expect("no panic").clone();
        lines.extend(finished_lines(&self.folder));
        lines.sort();
        let mut expected: Vec<String> = model.values().cloned().collect();
        expected.sort();
        println!("{} lines in {} files", lines.len(), self.files.load(Ordering::Relaxed));
        let doubles = lines.windows(2).filter(|pair| pair[0] == pair[1]).count();
        assert_eq!((lines.len(), doubles), (expected.len(), 0), "lines, and those that are there twice");
        assert!(lines == expected, "the files do not equal the model");
    }
}

fn sink(name: &str, folder: &std::path::Path) -> String {
    format!(
        "[sinks.{name}]\ntype = \"files\"\nfolder = \"{}\"\nroll_rows = 300\nroll_after = \"1s\"\n",
        folder.display()
    )
}

fn payload(n: usize) -> String {
    format!("{{\"id\":\"k{n:07}\", \"amount\":{n}.50, \"note\":\"\\u00e9 é\"}}")
}

#[tokio::test(flavor = "multi_thread")]
async fn every_acknowledged_record_is_in_one_file_once_through_kills() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let reader = Reader::start(folder.path().join("out"));
    let route = "[routes.events]\nsink = \"out\"\nkey = \"/id\"\nlanes = { http = 2 }\n";
    let mut gateway = Gateway::new(&(sink("out", &reader.folder) + route));
    gateway.start().await;

    let callers = Callers::start(gateway.listen(), "/v1/events", payload);
    let mut random = StdRng::seed_from_u64(11);
    let kills = oncegate_tests::kills(KILLS);
    gateway.goes_through(kills, 50..600, &mut random).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let acknowledged = callers.end().await;
    let model: BTreeMap<String, String> =
        acknowledged.into_iter().map(|n| (format!("k{n:07}"), payload(n))).collect();
    println!("{kills} kills, {} keys acknowledged", model.len());
    assert!(model.len() > 1000, "only {} keys", model.len());
    reader.equals(&model).await;
    assert!(gateway.terminate().await.success(), "{}", gateway.log_tail(20));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_into_files_ends_in_its_model_through_kills() {
    const TOPIC: &str = "to_files";
    let kafka = Kafka::shared();
    kafka.topic(TOPIC, 2).await;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let reader = Reader::start(folder.path().join("out"));
    let place = reader.folder.clone();
    let route = format!(
        "[routes.{TOPIC}]\nkey = \"/id\"\nevent_time = {{ kafka = \"timestamp\" }}\nsink = \"out\"\n\
         [routes.{TOPIC}.kafka]\nbrokers = \"{}\"\ntopics = [\"{TOPIC}\"]\ngroup = \"{TOPIC}\"\ninstance = \"one\"\n",
        kafka.brokers()
    );
    let mut gateway = Gateway::new(&(sink("out", &reader.folder) + &route));
    gateway.start().await;
    let mut random = StdRng::seed_from_u64(7);
    let (mut model, mut bad) = (BTreeMap::new(), 0);
    let rounds = oncegate_tests::kills(KILLS / 2);
    for round in 0..rounds {
        let part = RELAYED * round / rounds..RELAYED * (round + 1) / rounds;
        let records = part.map(|n| {
            // A copy comes in the other partition as well.
            let copy = n % COPY_EVERY == COPY_EVERY - 1;
            let n = if copy { n - 1 - random.random_range(0..3) } else { n };
            let payload = if n % BAD_EVERY == 7 { "{\"no\":\"id\"}".to_owned() } else { payload(n) };
            if n % BAD_EVERY == 7 {
                bad += 1;
            } else {
                model.insert(format!("k{n:07}"), payload.clone());
            }
            let partition = random.random_range(0..2);
            Produced { partition, payload: Some(payload.into_bytes()), ..Produced::default() }
        });
        kafka.produce(TOPIC, records.collect::<Vec<_>>());
        tokio::time::sleep(Duration::from_millis(random.random_range(100..600))).await;
        gateway.kill();
        gateway.spawn();
        gateway.ready(Duration::from_secs(60)).await;
    }
    reader.equals(&model).await;
    let letters: usize = book(&place)
        .query_row("SELECT count(*) FROM oncegate_dead_letters", [], |row| row.get(0))
        .expect("the dead letters can be counted");
    assert_eq!(letters, bad, "one dead letter for each bad record");
}
