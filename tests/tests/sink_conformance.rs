//! Every sink against the one list of cases in `oncegate_tests::conformance`. Postgres and Redis run as servers of the tests'
//! own.

use oncegate_tests::{
    appending_conformance_cases, book_conformance_cases,
    conformance::{
        self, clickhouse::Tables, folders::Folders, redis::Databases, stream_load::Loads, targets,
    },
    conformance_cases, keyed_conformance_cases,
};

macro_rules! tests {
    ($target:expr; $($module:ident :: $case:ident),+ $(,)?) => {
        $(
            #[tokio::test]
            async fn $case() {
                conformance::$module::$case(&$target).await;
            }
        )+
    };
}

mod sqlite {
    use super::*;

    conformance_cases!(tests, targets::Sqlite);
}

mod postgres {
    use super::*;

    conformance_cases!(tests, targets::Live);
}

#[cfg(feature = "duckdb")]
mod duckdb {
    use super::*;

    conformance_cases!(tests, conformance::duckdb::Duckdb);
}

/// Other misfits than those of tables are in the sink's own tests.
mod redis {
    use super::*;

    keyed_conformance_cases!(tests, Databases);
}

/// Files keep no rows that others could meet: of the other cases, those with upserts, deletes, columns and constraints are no questions
/// there. Dead letters of refused rows, which the list's case asks for by the name of a column, are in the sink's own tests.
mod files {
    use super::*;

    appending_conformance_cases!(tests, Folders);
}

/// ClickHouse keeps no row that another could meet in `insert` mode, and refuses none that the encoder took: what is left is the book.
/// Modes and values are in the sink's own tests.
mod clickhouse {
    use super::*;

    book_conformance_cases!(tests, Tables);
}

/// Nor do StarRocks and Doris, of which a stand-in runs: one of them, as the book is the same. Refused rows, modes, values and the other's
/// ways are in the sink's own tests.
mod starrocks {
    use super::*;

    book_conformance_cases!(tests, Loads(adapters::stream_load::Dialect::StarRocks));
}
