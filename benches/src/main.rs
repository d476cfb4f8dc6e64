//! Benchmarks. Each prints one table from one run: arm, figure, unit, ratio to each rival, whether the result was checked right.
//!
//! `cargo run --release -p benches -- list`

#[cfg(feature = "duckdb")]
mod duckdb;
mod http;
mod kafka;
mod load;
mod olap;
mod plot;
mod rebalance;
mod relay;
mod report;
mod store;

use clap::{Parser, Subcommand, ValueEnum};

#[derive(Parser)]
#[command(name = "benches")]
struct Arguments {
    #[command(subcommand)]
    bench: Bench,
    /// How much to run.
    #[arg(long, value_enum, default_value_t = Scale::Small, global = true)]
    scale: Scale,
    /// How to print.
    #[arg(long, value_enum, default_value_t = Format::Text, global = true)]
    format: Format,
}

#[derive(Subcommand)]
enum Bench {
    /// Names the benches.
    List,
    /// Kafka to Postgres, against COPY and staged ON CONFLICT.
    Relay {
        /// Only arms whose name holds this.
        #[arg(long, default_value = "")]
        arm: String,
    },
    /// Kafka to Kafka, against a plain transactional loop without marks and dedup.
    Kafka {
        /// Only figures whose name holds this.
        #[arg(long, default_value = "")]
        arm: String,
    },
    /// A shard with many live keys moves to another instance: until it writes there. Starts real gateways: build `oncegate` with the
    /// same profile first.
    Rebalance {
        /// Live keys of all shards; the scale's, if not given.
        #[arg(long)]
        keys: Option<u64>,
    },
    /// The HTTP door: single writes against pgbench, copies against a bare hyper echo, NDJSON against SQLite's own rate.
    Http {
        /// Only arms whose name holds this.
        #[arg(long, default_value = "")]
        arm: String,
    },
    /// Kafka to ClickHouse against direct inserts of the same blocks; Kafka to DuckDB against the bare appender (feature `duckdb`); the
    /// write proxy against a bare reverse proxy, and against an echo for copies.
    Olap {
        /// Only figures whose name holds this.
        #[arg(long, default_value = "")]
        arm: String,
    },
    /// The dedup store: durable check-and-settle, memory and disk for each key, expiry, restart; against redb rows, fjall and Redis.
    Store {
        /// Only arms whose name holds this.
        #[arg(long, default_value = "")]
        arm: String,
        /// Live keys; the scale's, if not given.
        #[arg(long)]
        keys: Option<u64>,
        /// Memory budget of our arms: a small one makes small slots; 40 bytes a key, if not given.
        #[arg(long)]
        memory_bytes: Option<u64>,
        /// Where to write a chart of the arms, as SVG.
        #[arg(long)]
        plot: Option<std::path::PathBuf>,
    },
    /// Fills a store and waits to be killed.
    #[command(hide = true)]
    StoreFill {
        /// Where.
        #[arg(long)]
        folder: std::path::PathBuf,
        #[command(flatten)]
        fill: store::Fill,
    },
    /// The rival of the HTTP bench, in a process of its own.
    #[command(hide = true)]
    Echo,
    /// A rival of the write proxy, in a process of its own.
    #[command(hide = true)]
    Proxy {
        /// The service behind it.
        #[arg(long)]
        to: std::net::SocketAddr,
    },
}

/// How much a bench runs.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Scale {
    /// A few minutes on 2 cores.
    Small,
    /// The figures of the issue.
    Full,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Text,
    Json,
}

fn main() {
    let arguments = Arguments::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let report = runtime.block_on(async {
        match &arguments.bench {
            Bench::List => {
                println!("relay\nkafka\nrebalance\nhttp\nolap\nstore");
                None
            }
            Bench::Relay { arm } => Some(relay::run(arguments.scale, arm).await),
            Bench::Kafka { arm } => Some(kafka::run(arguments.scale, arm).await),
            Bench::Rebalance { keys } => Some(rebalance::run(arguments.scale, *keys).await),
            Bench::Store { arm, keys, memory_bytes, plot } => {
                let (scale, arm, keys, memory_bytes, plot) =
                    (arguments.scale, arm.clone(), *keys, *memory_bytes, plot.clone());
                Some(
                    tokio::task::spawn_blocking(move || {
                        store::run(scale, &arm, keys, memory_bytes, plot.as_deref())
                    })
                    .await
                    .expect("no panic"),
                )
            }
            Bench::StoreFill { folder, fill } => {
                store::fill(folder, fill);
                None
            }
            Bench::Echo => {
                http::serve_echo().await;
                None
            }
            Bench::Proxy { to } => {
                olap::serve_proxy(*to).await;
                None
            }
            Bench::Olap { arm } => Some(olap::run(arguments.scale, arm).await),
            Bench::Http { arm } => Some(http::run(arguments.scale, arm).await),
        }
    });
    if let Some(report) = report {
        match arguments.format {
            Format::Text => report.print_text(),
            Format::Json => report.print_json(),
        }
        if !report.correct() {
            std::process::exit(1);
        }
    }
    // Threads of clients that are still at rest need no farewell.
    std::process::exit(0);
}
