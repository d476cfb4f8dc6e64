#!/usr/bin/env bash
# Fuzzes the parsers of bytes from outside with libFuzzer, by coverage, on stable Rust and without cargo-fuzz.
#   fuzz/run.sh              a minute each
#   fuzz/run.sh 3600 avro    an hour of one
# New inputs that reach more are kept in fuzz/corpus (not in the repository); what fails goes to fuzz/artifacts, and is run again by
# `fuzz/target/HOST/release/TARGET FILE`. With cargo-fuzz: `cargo fuzz run --sanitizer none TARGET fuzz/seeds/TARGET`.
set -uo pipefail
cd "$(dirname "$0")"

seconds=${1:-60}
shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <(find fuzz_targets -name '*.rs' -printf '%f\n' | sed 's/\.rs$//' | sort)

# As cargo-fuzz sets them. Naming the target keeps them from build scripts and macros.
host=$(rustc -vV | sed -n 's/^host: //p')
export RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares"
bins=()
for target in "${targets[@]}"; do bins+=(--bin "$target"); done
cargo build --release --target "$host" "${bins[@]}" || exit 1

failed=0
printf '| target | seeds | executions | a second | edges | result |\n| --- | --- | --- | --- | --- | --- |\n'
for target in "${targets[@]}"; do
    mkdir -p "corpus/$target" "artifacts/$target"
    log=$(mktemp)
    result=held
    "target/$host/release/$target" "corpus/$target" "seeds/$target" -max_total_time="$seconds" -max_len=16384 -timeout=10 -rss_limit_mb=2048 \
        -print_final_stats=1 -artifact_prefix="artifacts/$target/" >"$log" 2>&1 || { result=FAILED; failed=1; }
    stat() { sed -n "s/^stat::$1: *//p" "$log" | tail -1; }
    edges=$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$log" | tail -1)
    printf '| `%s` | %d | %s | %s | %s | %s |\n' "$target" "$(find "seeds/$target" -type f | wc -l)" \
        "$(stat number_of_executed_units)" "$(stat average_exec_per_sec)" "${edges:-0}" "$result"
    [ "$result" = held ] || tail -30 "$log"
    rm -f "$log"
done
exit $failed
