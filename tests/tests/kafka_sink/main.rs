//! The Kafka sink against the list of cases of all sinks, as far as they concern one that appends, and against cases of its own.

use oncegate_tests::{
    appending_conformance_cases,
    conformance::{self, kafka::Topics},
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

appending_conformance_cases!(tests, Topics);

mod own;
mod owners;
