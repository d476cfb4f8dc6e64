//! Every sink against the one list of cases in `oncegate_tests::conformance`. Postgres runs as a server of the tests' own.

use oncegate_tests::{
    conformance::{self, targets},
    conformance_cases,
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
