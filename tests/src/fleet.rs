//! Several gateways of one route, and what befalls them: kills, freezes, joins, leaves, brokers that die.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use rand::{Rng, rngs::StdRng};

use crate::{eventually, gateway::Gateway, servers::Kafka};

/// The group's session is over after 6 s: who is frozen for longer has lost its partitions, and does not know.
const FREEZE: Duration = Duration::from_secs(8);
/// How long an instance is away after a kill.
const AWAY: Duration = Duration::from_millis(1500);

/// What befalls a fleet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// `kill -9`, and back after a while.
    Kill,
    /// The same, and the store is lost with it.
    KillAndLoseStore,
    /// SIGSTOP for longer than the session, then SIGCONT.
    Freeze,
    /// One more instance joins.
    Join,
    /// An instance leaves as an operator has it.
    Leave,
    /// A broker dies, and comes back after a while.
    Broker,
}

impl Fault {
    /// So many, each kind in turn; with `brokers` also those.
    pub fn in_turn(count: usize, brokers: bool) -> Vec<Self> {
        use Fault::{Broker, Freeze, Join, Kill, KillAndLoseStore, Leave};
        let turn: &[Fault] = if brokers {
            &[Kill, Broker, Freeze, Broker, Join, Broker, KillAndLoseStore, Broker, Leave]
        } else {
            &[Freeze, Kill, Join, KillAndLoseStore, Freeze, Leave]
        };
        turn.iter().copied().cycle().take(count).collect()
    }
}

/// What has to be made good again, and when.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Due {
    Start(usize),
    Thaw(usize),
    Broker,
}

#[derive(PartialEq, Eq, Clone, Copy, Debug)]
enum Is {
    Running,
    Frozen,
    Away,
}

/// Gateways that share a route.
pub struct Fleet<'a> {
    kafka: &'a Kafka,
    members: Vec<(Gateway, Is)>,
    due: Vec<(Instant, Due)>,
    brokers_down: bool,
    next_broker: usize,
    /// What was done, and how often.
    pub done: BTreeMap<String, usize>,
}

impl<'a> Fleet<'a> {
    /// The first three of `members` run and are ready.
    pub async fn new(kafka: &'a Kafka, members: Vec<Gateway>) -> Self {
        let members = members.into_iter().map(|member| (member, Is::Away)).collect();
        let mut fleet =
            Self { kafka, members, due: vec![], brokers_down: false, next_broker: 0, done: BTreeMap::new() };
        for member in 0..3 {
            fleet.start(member);
        }
        for (member, _) in &mut fleet.members[..3] {
            member.ready(Duration::from_secs(60)).await;
        }
        fleet
    }

    fn start(&mut self, member: usize) {
        self.members[member].0.spawn();
        self.members[member].1 = Is::Running;
    }

    /// One of those that run, if so many stay.
    fn pick(&self, random: &mut StdRng) -> Option<usize> {
        let running: Vec<usize> =
            (0..self.members.len()).filter(|at| self.members[*at].1 == Is::Running).collect();
        (running.len() > 1).then(|| running[random.random_range(0..running.len())])
    }

    /// Does it, if it can be done now.
    pub async fn strike(&mut self, fault: Fault, random: &mut StdRng) {
        let now = Instant::now();
        match fault {
            Fault::Kill | Fault::KillAndLoseStore => {
                let Some(member) = self.pick(random) else { return };
                self.members[member].0.kill();
                if fault == Fault::KillAndLoseStore {
                    self.members[member].0.delete_store();
                }
                self.members[member].1 = Is::Away;
                self.due.push((now + AWAY, Due::Start(member)));
            }
            Fault::Freeze => {
                let Some(member) = self.pick(random) else { return };
                self.members[member].0.freeze();
                self.members[member].1 = Is::Frozen;
                self.due.push((now + FREEZE, Due::Thaw(member)));
            }
            Fault::Join => {
                let promised = |at: usize| self.due.iter().any(|(_, due)| *due == Due::Start(at));
                let away =
                    (0..self.members.len()).find(|at| self.members[*at].1 == Is::Away && !promised(*at));
                let Some(member) = away else { return };
                self.start(member);
            }
            Fault::Leave => {
                let Some(member) = self.pick(random) else { return };
                let ended = self.members[member].0.terminate_within(Duration::from_secs(240)).await;
                assert!(ended.success(), "{}", self.members[member].0.log_tail(20));
                self.members[member].1 = Is::Away;
                if (0..self.members.len()).filter(|at| self.members[*at].1 != Is::Away).count() < 3 {
                    self.due.push((now + AWAY, Due::Start(member)));
                }
            }
            Fault::Broker => {
                if self.brokers_down {
                    return;
                }
                self.kafka.kill_broker(self.next_broker);
                self.next_broker = (self.next_broker + 1) % 3;
                self.brokers_down = true;
                self.due.push((now + AWAY, Due::Broker));
            }
        }
        *self.done.entry(format!("{fault:?}")).or_default() += 1;
    }

    /// Lets time pass, and makes good what is due meanwhile.
    pub async fn pass(&mut self, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until {
            self.make_good();
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Until everything is made good again.
    pub async fn recover(&mut self) {
        while !self.due.is_empty() {
            self.pass(Duration::from_millis(50)).await;
        }
    }

    fn make_good(&mut self) {
        let now = Instant::now();
        let (due, later) = self.due.drain(..).partition(|(at, _)| *at <= now);
        self.due = later;
        let due: Vec<(Instant, Due)> = due;
        for (_, due) in due {
            match due {
                Due::Start(member) => self.start(member),
                Due::Thaw(member) => {
                    self.members[member].0.thaw();
                    self.members[member].1 = Is::Running;
                }
                Due::Broker => {
                    self.kafka.run();
                    self.brokers_down = false;
                }
            }
        }
    }

    /// Waits until the group (of the topic's name) has committed all of the topic.
    pub async fn offsets_follow(&self, topic: &str, partitions: i32) {
        eventually("committed offsets at the end", Duration::from_secs(60), async || {
            let (ends, committed) =
                (self.kafka.ends(topic, partitions), self.kafka.committed(topic, partitions, topic));
            if ends == committed { Ok(()) } else { Err(format!("{committed:?} of {ends:?}")) }
        })
        .await;
    }

    /// The faults did what they are for: partitions moved, and who froze found that out. Not each time: a member may have had no
    /// partition then, or be killed before it has its answer.
    pub async fn assert_struck(&mut self, name: &str, faults: usize) {
        let logs: Vec<String> = self.members.iter().map(|(member, _)| member.log()).collect();
        let lines = |words: &[&str]| -> usize {
            let has = |line: &&str| words.iter().all(|word| line.contains(word));
            logs.iter().map(|log| log.lines().filter(has).count()).sum()
        };
        let counted = [
            ("assigned", lines(&["partitions are assigned"])),
            ("lost", lines(&["partitions are taken back", "lost=true"])),
            ("fenced", lines(&["fenced"])),
            ("facts learnt", lines(&["learnt facts from the sink's marks"])),
            ("not confirmed", lines(&["does not confirm this member"])),
        ];
        println!("{name}: {counted:?}");
        // With few faults it may be so of all of them.
        if faults >= 12 {
            assert!(counted[0].1 > faults / 2, "{counted:?}");
            assert!(counted[1].1 + counted[2].1 + counted[4].1 > 0, "{counted:?}");
            assert!(counted[3].1 > 0, "{counted:?}");
        }
        let duplicates = {
            let mut sum = 0.0;
            for (member, is) in &self.members {
                if *is == Is::Running {
                    let found = member.metric("oncegate_records_total", &["outcome=\"duplicate\""]).await;
                    sum += found.unwrap_or(0.0);
                }
            }
            sum
        };
        assert!(duplicates > 0.0);
        for (member, is) in &mut self.members {
            if *is == Is::Running {
                assert!(member.exited().is_none(), "{}", member.log_tail(20));
            }
        }
    }
}
