//! `Gate::once`, and keys that are taken back (P12).

use dedup_store::Store;
use tokio::time::timeout;

use super::{
    faults::DeliverFault,
    rig::{Relay, Rig, call, outcome, pass, plain},
};
use crate::{
    gate::{Gate, Once, OnceError},
    outcome::Outcome,
};

type Fault = std::io::Error;

async fn ran(gate: &Gate, name: &str) -> Result<Once<u32>, OnceError<Fault>> {
    gate.once(name, || async { Ok::<u32, Fault>(7) }).await
}

// ---- P12 ---------------------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn p12_a_key_taken_back_is_new_again_and_no_later_catch_up_brings_it_back() {
    let rig = Rig::listed(1);
    let gate = rig.gate("a", (1, 0)).await;
    let first = call(&gate, &plain("k", "v")).await;
    gate.forget(first.fingerprint.unwrap()).await.unwrap();
    gate.crash();
    // Learnt from the marks alone.
    let gate = rig.gate("a", (1, 0)).await;
    assert_eq!(outcome(&gate, &plain("k", "w")).await, Outcome::Written, "also with other content");
    assert_eq!(outcome(&gate, &plain("k", "w")).await, Outcome::Duplicate);
    gate.crash();
    let gate = rig.gate("a", (1, 0)).await;
    assert_eq!(outcome(&gate, &plain("k", "w")).await, Outcome::Duplicate, "what came after it holds");
    assert_eq!(rig.table(), ["k=v", "k=w"]);
}

/// The key was taken back in the callers' shard alone. Its fact stood in a partition's marks, and the next empty store brought
/// it back.
#[tokio::test(start_paused = true)]
async fn p12_a_key_is_taken_back_whichever_shard_settled_it() {
    let rig = Rig::listed(2);
    let relay = Relay::start(&rig, "a", (2, 2), 3).await;
    for partition in 0..3 {
        relay.push(partition, &plain(&format!("k{partition}"), "v"));
        relay.settled(partition, 1).await;
        let known = call(&relay.gate, &plain(&format!("k{partition}"), "v")).await;
        assert_eq!(known.outcome, Outcome::Duplicate);
        relay.gate.forget(known.fingerprint.unwrap()).await.unwrap();
    }
    let topic = relay.crash();
    let relay = Relay::resume(&rig, "a", (2, 2), &topic, rig.memory()).await;
    for partition in 0..3 {
        assert_eq!(outcome(&relay.gate, &plain(&format!("k{partition}"), "w")).await, Outcome::Written);
    }
    let topic = relay.crash();
    // What was written after that is learnt again too, in whatever order the shards are read.
    let relay = Relay::resume(&rig, "a", (2, 2), &topic, rig.memory()).await;
    for partition in 0..3 {
        assert_eq!(outcome(&relay.gate, &plain(&format!("k{partition}"), "w")).await, Outcome::Duplicate);
    }
}

#[tokio::test(start_paused = true)]
async fn p12_taking_a_key_back_outlives_an_unknown_commit_and_says_when_it_could_not() {
    let rig = Rig::listed(3);
    let gate = rig.gate("a", (1, 0)).await;
    for fault in [DeliverFault::UnknownApplied, DeliverFault::UnknownLost, DeliverFault::NotAppliedKept] {
        let key = call(&gate, &plain("k", "v")).await.fingerprint.unwrap();
        rig.script([fault]);
        gate.forget(key).await.unwrap();
        assert_eq!(gate.store().peek(&key).unwrap(), None, "{fault:?}");
    }
    let key = call(&gate, &plain("k", "v")).await.fingerprint.unwrap();
    rig.script([DeliverFault::Final]);
    assert!(gate.forget(key).await.unwrap_err().contains("no such column"));
    assert_eq!(outcome(&gate, &plain("k", "v")).await, Outcome::Duplicate);
}

// ---- once --------------------------------------------------------------------------------------------------------------------

#[tokio::test(start_paused = true)]
async fn once_runs_an_effect_once_and_remembers_it_in_the_marks() {
    let rig = Rig::listed(4);
    let gate = rig.gate("a", (1, 0)).await;
    assert_eq!(ran(&gate, "e").await.unwrap(), Once::Ran(7));
    assert_eq!(ran(&gate, "e").await.unwrap(), Once::Already);
    gate.crash();
    let gate = rig.gate("a", (1, 0)).await;
    assert_eq!(ran(&gate, "e").await.unwrap(), Once::Already, "an empty store learns it");
    assert_eq!(ran(&gate, "f").await.unwrap(), Once::Ran(7));
}

#[tokio::test(start_paused = true)]
async fn once_an_effect_that_failed_frees_its_name() {
    let rig = Rig::listed(5);
    let gate = rig.gate("a", (1, 0)).await;
    let failed = gate.once("e", || async { Err::<u32, Fault>(Fault::other("no")) }).await;
    assert!(matches!(failed, Err(OnceError::Effect(_))), "{failed:?}");
    assert_eq!(ran(&gate, "e").await.unwrap(), Once::Ran(7));
}

#[tokio::test(start_paused = true)]
async fn once_a_second_call_hears_that_the_first_runs() {
    let rig = Rig::listed(6);
    let gate = rig.gate("a", (1, 0)).await;
    let slow = gate.clone();
    let first = tokio::spawn(async move {
        let effect = || async {
            pass(1_000).await;
            Ok::<u32, Fault>(7)
        };
        slow.once("e", effect).await
    });
    pass(100).await;
    assert!(matches!(ran(&gate, "e").await, Err(OnceError::InFlight)));
    assert_eq!(first.await.unwrap().unwrap(), Once::Ran(7));
    assert_eq!(ran(&gate, "e").await.unwrap(), Once::Already);
}

#[tokio::test(start_paused = true)]
async fn once_a_crash_between_effect_and_record_is_unknown_until_someone_says() {
    let folder = tempfile::tempdir().unwrap();
    let rig = Rig::listed(7);
    for happened in [true, false] {
        let name = format!("e{happened}");
        let open = || Store::open(&folder.path().join("store"), rig.options()).unwrap();
        let gate = rig.try_gate("a", (1, 0), open()).await.unwrap();
        // The effect took place, and the process ends before that is recorded.
        rig.delay(60_000, 0);
        let unrecorded = timeout(std::time::Duration::from_secs(5), ran(&gate, &name)).await;
        assert!(unrecorded.is_err(), "{unrecorded:?}");
        assert!(
            matches!(ran(&gate, &name).await, Err(OnceError::Unknown)),
            "the claim is gone, the intent is not"
        );
        gate.crash();
        pass(10).await;
        let gate = rig.try_gate("a", (1, 0), open()).await.unwrap();
        assert!(matches!(ran(&gate, &name).await, Err(OnceError::Unknown)));
        gate.resolve_once(&name, happened).await.unwrap();
        let expected = if happened { Once::Already } else { Once::Ran(7) };
        assert_eq!(ran(&gate, &name).await.unwrap(), expected);
        gate.close().await;
        drop(gate);
    }
}

#[tokio::test(start_paused = true)]
async fn once_a_record_that_cannot_be_kept_leaves_the_effect_unknown_and_never_runs_it_again() {
    let rig = Rig::listed(8);
    let gate = rig.gate("a", (1, 0)).await;
    assert_eq!(outcome(&gate, &plain("warm", "v")).await, Outcome::Written);
    rig.script([DeliverFault::Final]);
    assert!(matches!(ran(&gate, "e").await, Err(OnceError::Unavailable(_))));
    pass(5_000).await;
    assert!(matches!(ran(&gate, "e").await, Err(OnceError::Unknown)));
    for fault in [DeliverFault::UnknownApplied, DeliverFault::UnknownLost] {
        rig.script([fault]);
        assert_eq!(ran(&gate, &format!("{fault:?}")).await.unwrap(), Once::Ran(7));
        assert_eq!(ran(&gate, &format!("{fault:?}")).await.unwrap(), Once::Already);
    }
}
