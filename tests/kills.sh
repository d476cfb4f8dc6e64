#!/usr/bin/env bash
# Real kills at length: each sink and mode through as many `kill -9` as are asked for, one test after the other.
#   tests/kills.sh                     1,000 kills each: hours
#   tests/kills.sh 100 redis files     100 kills each, of these sinks
# Prints what each test said, and a table at the end. `ONCEGATE_TARGET` names a folder with `oncegate` and `deps`, built before, so that
# the tree can be worked on meanwhile.
set -uo pipefail
cd "$(dirname "$0")/.."

export ONCEGATE_KILLS=${1:-1000}
shift || true
wanted=("${@:-all}")

# sink, test binary, test.
tests="
postgres   http_crash        every_acknowledged_key_is_in_the_table_once_through_fifty_kills
postgres   relay_crash       each_mode_ends_in_its_model_through_kills_ended_backends_and_lost_replies
sqlite     relay_sqlite      a_relay_into_sqlite_ends_in_its_model_through_kills
files      files_crash       every_acknowledged_record_is_in_one_file_once_through_kills
files      files_crash       a_relay_into_files_ends_in_its_model_through_kills
redis      redis_crash       http_into_redis_ends_in_its_model_through_kills_of_both_and_lost_replies
redis      redis_crash       relays_into_redis_end_in_their_models_through_kills_of_both_and_lost_replies
clickhouse clickhouse_crash  every_acknowledged_record_is_one_row_of_clickhouse_through_kills_of_both
clickhouse clickhouse_crash  a_relay_into_clickhouse_ends_in_its_model_through_kills_of_both
kafka      kafka_to_kafka    kafka_to_kafka_each_event_once_and_in_order_through_kills
upstream   http_upstream     stop_gives_each_key_one_effect_at_most_through_kills
upstream   http_upstream     retry_gives_each_key_one_effect_through_kills_where_the_service_honours_keys
starrocks  stream_load_crash every_acknowledged_record_is_one_row_of_starrocks_through_kills
starrocks  stream_load_crash starrocks_inserts_at_length
starrocks  stream_load_crash starrocks_upserts_at_length
starrocks  stream_load_crash starrocks_keeps_the_newest_at_length
doris      stream_load_crash every_acknowledged_record_is_one_row_of_doris_through_kills
doris      stream_load_crash doris_inserts_at_length
doris      stream_load_crash doris_upserts_at_length
doris      stream_load_crash doris_keeps_the_newest_at_length
"

if [ -z "${ONCEGATE_TARGET:-}" ]; then
    cargo build --workspace || exit 1
fi

run() {
    if [ -n "${ONCEGATE_TARGET:-}" ]; then
        ONCEGATE_BIN="$ONCEGATE_TARGET/oncegate" "$ONCEGATE_TARGET/deps/$1" --exact "$2" --include-ignored --nocapture
    else
        cargo test -q -p oncegate-tests --test "$1" -- --exact "$2" --include-ignored --nocapture
    fi
}

table=() failed=0
while read -r sink binary name; do
    [ -n "$sink" ] || continue
    [ "${wanted[0]}" = all ] || [[ " ${wanted[*]} " == *" $sink "* ]] || continue
    start=$SECONDS result=held
    printf '\n==> %s: %s\n' "$sink" "$name"
    run "$binary" "$name" </dev/null || { result=FAILED; failed=1; }
    table+=("$(printf '| %s | `%s` | %s | %d | %s |' "$sink" "$name" "$ONCEGATE_KILLS" $((SECONDS - start)) "$result")")
    printf '%s\n' "${table[-1]}"
done <<<"$tests"
printf '\n| sink | test | kills | s | |\n| --- | --- | --- | --- | --- |\n'
printf '%s\n' "${table[@]}"
exit $failed
