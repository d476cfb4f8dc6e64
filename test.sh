#!/usr/bin/env bash
# Passes all tests on a fresh Debian machine with Rust: installs what they need, servers included, then builds, lints and tests.
#   ./test.sh            everything, but for what is asked for by name
#   ./test.sh --duckdb   the DuckDB sink too: fetches its library, builds it in (some minutes)
#   ./test.sh --quick    without the live tests (no Postgres, no Kafka, no Redis, no ClickHouse, nothing installed beyond a C compiler)
set -euo pipefail
cd "$(dirname "$0")"

quick=false
duckdb=false
for argument in "$@"; do
    case "$argument" in
    --quick) quick=true ;;
    --duckdb) duckdb=true ;;
    *)
        echo "usage: ./test.sh [--quick] [--duckdb]" >&2
        exit 2
        ;;
    esac
done

# The version in the line after the broker's artifact: the tests look for the jars under it.
kafka_version=$(sed -n '/<artifactId>kafka_2\.13</{n;s|.*<version>\(.*\)</version>.*|\1|p}' tests/src/servers/kafka-pom.xml)
[ -n "$kafka_version" ] || {
    echo "tests/src/servers/kafka-pom.xml names no version of kafka_2.13" >&2
    exit 1
}
kafka_jars="${ONCEGATE_TEST_CACHE:-$PWD/target/test-servers}/kafka-$kafka_version"
# As tests/src/servers/clickhouse.rs looks for it.
clickhouse_version=$(sed -n 's|^const ENGINE: &str = "chdb-\(.*\)";$|\1|p' tests/src/servers/clickhouse.rs)
clickhouse_engine="${ONCEGATE_TEST_CACHE:-$PWD/target/test-servers}/chdb-$clickhouse_version"
duckdb_version=1.5.6-r.1
duckdb_library="${ONCEGATE_TEST_CACHE:-$PWD/target/test-servers}/duckdb-$duckdb_version"
summary=()
failed=()

# Runs one step, keeps its time, goes on after a failure: one run shows everything that is wrong.
step() {
    local name=$1 start=$SECONDS result=ok
    shift
    printf '\n==> %s\n' "$name"
    "$@" || { result=FAILED; failed+=("$name"); }
    summary+=("$(printf '%-44s %5d s  %s' "$name" $((SECONDS - start)) "$result")")
    [ "$result" = ok ]
}

finish() {
    printf '\n%s\n' "summary"
    printf '  %s\n' "${summary[@]}"
    printf '  %-44s %5d s\n' total "$SECONDS"
    if [ ${#failed[@]} -gt 0 ]; then
        printf 'FAILED: %s\n' "${failed[@]}"
        exit 1
    fi
    echo "all passed"
}

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        echo "needs root to run: $*" >&2
        return 1
    fi
}

# The packages that are missing, by what they must provide.
missing_packages() {
    command -v cc >/dev/null || echo gcc
    command -v c++ >/dev/null || echo g++
    command -v make >/dev/null || echo make
    command -v pkg-config >/dev/null || echo pkg-config
    ls /usr/include/zlib.h >/dev/null 2>&1 || echo zlib1g-dev
    $quick && return
    ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || echo postgresql
    command -v redis-server >/dev/null || echo redis-server
    python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
    java -version >/dev/null 2>&1 || echo default-jre-headless
    [ -d "$kafka_jars" ] || command -v mvn >/dev/null || echo maven
}

install_packages() {
    local packages
    mapfile -t packages < <(missing_packages)
    if [ ${#packages[@]} -gt 0 ]; then
        echo "installing: ${packages[*]}"
        apt_install "${packages[@]}" || return 1
    fi
    if ! cargo fmt --version >/dev/null 2>&1 || ! cargo clippy --version >/dev/null 2>&1; then
        rustup component add rustfmt clippy || return 1
    fi
    echo "nothing is missing"
}

apt_install() {
    # The tests start servers of their own; Debian's default cluster is neither wanted nor used.
    as_root mkdir -p /etc/postgresql-common/createcluster.d &&
        echo 'create_main_cluster = false' |
        as_root tee /etc/postgresql-common/createcluster.d/oncegate-tests.conf >/dev/null &&
        as_root env DEBIAN_FRONTEND=noninteractive apt-get update -q &&
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$@"
}

fetch_kafka() {
    if [ -d "$kafka_jars" ]; then
        echo "Kafka $kafka_version is there: $kafka_jars"
        return
    fi
    # Moved into place when it is whole, so that a broken download is not taken for Kafka.
    rm -rf "$kafka_jars.part" &&
        mvn -q -B -f tests/src/servers/kafka-pom.xml org.apache.maven.plugins:maven-dependency-plugin:copy-dependencies \
        -DincludeScope=runtime -DoutputDirectory="$kafka_jars.part" &&
        mv "$kafka_jars.part" "$kafka_jars"
}

# The ClickHouse engine as a Python package, 0.5 GB; or none if the tests are given a server.
fetch_clickhouse() {
    if [ -n "${ONCEGATE_TEST_CLICKHOUSE:-}" ]; then
        echo "the tests use the ClickHouse of ONCEGATE_TEST_CLICKHOUSE"
        return
    fi
    if [ -d "$clickhouse_engine" ]; then
        echo "the ClickHouse engine is there: $clickhouse_engine"
        return
    fi
    # Moved into place when it is whole. Of what is in it only its python is run, which finds its packages by where it stands.
    rm -rf "$clickhouse_engine.part" &&
        python3 -m venv "$clickhouse_engine.part" &&
        "$clickhouse_engine.part/bin/pip" -q install --no-compile --disable-pip-version-check "chdb-core-lite==$clickhouse_version" &&
        mv "$clickhouse_engine.part" "$clickhouse_engine"
}

# Two test binaries at a time, for most of their time is waiting; in each, one test at a time, for its tests share servers. The longest
# come first. What one prints is shown when it has ended.
live_tests() {
    local first=(kafka_sink kafka_door http_to_kafka relay_crash sink_conformance kafka_to_kafka two_owners) names output
    mapfile -t names < <(
        printf '%s\n' "${first[@]}"
        find tests/tests -mindepth 1 -maxdepth 1 -printf '%f\n' | sed 's/\.rs$//' | sort | grep -vxF -f <(printf '%s\n' "${first[@]}")
    )
    cargo test -p oncegate-tests --lib --tests --no-run || return 1
    output=$(mktemp -d)
    export output
    printf '%s\n' "${names[@]}" | xargs -P 2 -I NAME bash -c '
        start=$SECONDS result=ok
        RUST_TEST_THREADS=1 cargo test -q -p oncegate-tests --test NAME >"$output/NAME" 2>&1 || result=FAILED
        printf "\n--> %s: %d s, %s\n" NAME $((SECONDS - start)) $result
        cat "$output/NAME"
        [ $result = ok ]'
    local result=$?
    rm -rf "$output"
    cargo test -p oncegate-tests --lib || return 1
    return $result
}

# DuckDB's library, from the npm registry that npm is set to.
fetch_duckdb() {
    if [ -d "$duckdb_library" ]; then
        echo "DuckDB's library is there: $duckdb_library"
        return
    fi
    command -v npm >/dev/null || apt_install npm || return 1
    # Moved into place when it is whole.
    rm -rf "$duckdb_library.part" && mkdir -p "$duckdb_library.part" &&
        npm pack --silent --pack-destination "$duckdb_library.part" "@duckdb/node-bindings-linux-x64@$duckdb_version" &&
        tar -xzf "$duckdb_library.part"/*.tgz -C "$duckdb_library.part" --strip-components 1 package/libduckdb.so &&
        rm "$duckdb_library.part"/*.tgz &&
        mv "$duckdb_library.part" "$duckdb_library"
}

# Builds and runs all that the feature adds: the sink's own tests, its cases of the list, and its kills.
test_duckdb() {
    local -x DUCKDB_LIB_DIR=$duckdb_library LD_LIBRARY_PATH=$duckdb_library${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    cargo clippy -q -p adapters -p oncegate-tests --features adapters/duckdb,oncegate-tests/duckdb --all-targets -- -D warnings &&
        cargo test -p adapters --features duckdb --lib --no-fail-fast -- duckdb:: &&
        cargo build --workspace --features oncegate-tests/duckdb &&
        RUST_TEST_THREADS=1 cargo test -p oncegate-tests --features duckdb --test sink_conformance --test duckdb_crash --no-fail-fast -- duckdb
}

packages=(--workspace)
$quick && packages=(--workspace --exclude oncegate-tests)

trap 'printf "\ninterrupted\n"; exit 130' INT TERM
step "packages of the system" install_packages || finish
$quick || step "Kafka from Maven Central" fetch_kafka || finish
$quick || step "ClickHouse engine from PyPI" fetch_clickhouse || finish
step "build" cargo build "${packages[@]}" --all-targets || finish
step "format" cargo fmt --all --check || true
step "clippy" cargo clippy -q "${packages[@]}" --all-targets -- -D warnings || true
step "clippy of interleavings" cargo clippy -q -p dedup-store --features shuttle --all-targets -- -D warnings || true
step "interleavings of the store's threads" cargo test -p dedup-store --features shuttle --lib --no-fail-fast || true
step "tests without servers" cargo test --workspace --exclude oncegate-tests --lib --bins --tests --no-fail-fast || true
$quick || step "tests with live servers" live_tests || true
if $duckdb; then
    step "DuckDB's library from npm" fetch_duckdb && { step "tests of the DuckDB sink" test_duckdb || true; }
fi
step "documentation tests" cargo test "${packages[@]}" --doc || true
finish
