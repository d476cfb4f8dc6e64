//! What the lines of a marks topic add up to. Pure.
//!
//! Every process folds the same decided lines in the same order, and so sees the same owners: of several claims that raise one epoch
//! the first in the log holds, and what is written under an older epoch or by another writer counts for nothing.

use std::collections::{BTreeMap, VecDeque};

use super::line::{Keys, Kind, Line, State, route_row};
use crate::sink::{RouteRow, ShardId};

/// One shard as its lines tell.
#[derive(Clone, Debug)]
pub(super) struct Shard {
    pub(super) state: State,
    /// The partition that holds its lines.
    pub(super) home: i32,
    /// When its owner was last heard, by the broker's clock, ms.
    pub(super) seen_ms: i64,
    /// Marks that hold keys not below the floor, by sequence.
    pub(super) marks: VecDeque<MarkAt>,
    /// What was first seen of it was a claim that raised this epoch, and what came before may be gone: perhaps it did not hold.
    doubtful: Option<i64>,
    /// A mark whose last part has not come: its sequence, and where it begins.
    begun: Option<(i64, i64)>,
}

/// Where a mark is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct MarkAt {
    pub(super) sequence: i64,
    /// Of its first part.
    pub(super) offset: i64,
    pub(super) max_ms: i64,
}

/// What became of a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Folded {
    /// It counts.
    Taken,
    /// Somebody else owns the shard.
    Void,
    /// A batch of somebody who does not own the shard is in: the fence did not hold.
    Stray,
}

/// All shards of a route.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    shards: BTreeMap<ShardId, Shard>,
    /// The route's identity, and whether it was repeated since.
    route: Option<(RouteRow, bool)>,
    /// Partitions whose first lines are gone, each with the first offset that is left.
    cut: BTreeMap<i32, i64>,
}

impl Ledger {
    pub(super) fn shard(&self, shard: &str) -> Option<&Shard> {
        self.shards.get(shard)
    }

    pub(super) fn shards(&self) -> impl Iterator<Item = (&ShardId, &Shard)> {
        self.shards.iter()
    }

    /// The topic's retention has taken what was before `low`. It keeps a mark for longer than window and lateness, so only marks of a
    /// shard whose event time stands still, or crawls, can be among them: what they held is below its floor from now on (P11).
    pub(super) fn cut(&mut self, partition: i32, low: i64) {
        if self.cut.insert(partition, low) == Some(low) {
            return;
        }
        for shard in self.shards.values_mut().filter(|shard| shard.home == partition) {
            while let Some(mark) = shard.marks.front().filter(|mark| mark.offset < low) {
                shard.state.floor_ms = shard.state.floor_ms.max(mark.max_ms.saturating_add(1));
                shard.marks.pop_front();
            }
        }
    }

    /// Whether lines of `partition` are gone.
    pub(super) fn is_cut(&self, partition: i32) -> bool {
        self.cut.contains_key(&partition)
    }

    pub(super) fn route(&self) -> Option<&RouteRow> {
        self.route.as_ref().map(|(row, _)| row)
    }

    /// Takes the next line of `partition` in; `value` is the record's.
    pub(super) fn fold(
        &mut self,
        partition: i32,
        offset: i64,
        time_ms: i64,
        line: &Line,
        value: &[u8],
    ) -> Folded {
        match line.kind {
            Kind::Clock => return Folded::Taken,
            Kind::Route | Kind::RouteAgain => return self.fold_route(line.kind == Kind::RouteAgain, value),
            Kind::Mark | Kind::Part | Kind::Claim { .. } | Kind::Beat | Kind::Forget | Kind::Renew => {}
        }
        let Some(shard) = self.shards.get_mut(&line.shard) else {
            let mut shard = Shard::first(partition, offset, time_ms, line);
            if self.cut.contains_key(&partition) && line.state.sequence > 1 {
                // Earlier marks are gone: their keys were not above the watermark by more than the route's `max_ahead`.
                shard.state.floor_ms = shard.state.floor_ms.max(line.state.watermark_ms);
            }
            self.shards.insert(line.shard.clone(), shard);
            return Folded::Taken;
        };
        shard.fold(partition, offset, time_ms, line)
    }

    /// The first proposal holds; once it was repeated, only it was.
    fn fold_route(&mut self, again: bool, value: &[u8]) -> Folded {
        let Some(row) = route_row(value) else { return Folded::Void };
        match &self.route {
            Some((_, true)) => Folded::Void,
            Some((_, false)) if !again => Folded::Void,
            _ => {
                self.route = Some((row, again));
                Folded::Taken
            }
        }
    }
}

impl Shard {
    /// Of the first line that is seen of it: earlier ones may be gone.
    fn first(home: i32, offset: i64, time_ms: i64, line: &Line) -> Self {
        let doubtful = if let Kind::Claim { after } = line.kind { Some(after) } else { None };
        let mut shard = Self {
            state: line.state.clone(),
            home,
            seen_ms: time_ms,
            marks: VecDeque::new(),
            doubtful,
            begun: None,
        };
        match line.kind {
            // The step that its parts belong to is not done yet.
            Kind::Part => shard.part(offset, line),
            Kind::Mark => shard.keep(offset, line),
            _ => {}
        }
        if line.kind == Kind::Part {
            shard.state.sequence -= 1;
        }
        shard
    }

    /// Nothing is left of it but where it was read to.
    pub(super) fn lapsed(home: i32, position: i64) -> Self {
        let state = State { position: Some(position), ..State::unowned() };
        Self { state, home, seen_ms: 0, marks: VecDeque::new(), doubtful: None, begun: None }
    }

    fn fold(&mut self, home: i32, offset: i64, time_ms: i64, line: &Line) -> Folded {
        let State { epoch, ref writer, .. } = line.state;
        if let Kind::Claim { after } = line.kind {
            if epoch <= after {
                return Folded::Void;
            }
            if after != self.state.epoch {
                // It raises an epoch that the one in doubt has not had: that one did not hold.
                if self.doubtful.is_none_or(|doubted| after <= doubted) {
                    return Folded::Void;
                }
                *self = Self::first(home, offset, time_ms, line);
                return Folded::Taken;
            }
            // Batches of the earlier owner that it did not know of cannot be: it had read up to here.
            let State { sequence, position, watermark_ms, floor_ms, partitions, .. } = self.state;
            let source = self.state.source.take();
            // Not as the claim says it: an earlier build says nothing.
            let mut lineage = std::mem::take(&mut self.state.lineage);
            lineage.taken(sequence, epoch);
            let claimed = line.state.clone();
            self.state =
                State { sequence, position, watermark_ms, floor_ms, partitions, source, lineage, ..claimed };
            (self.home, self.seen_ms, self.doubtful, self.begun) = (home, time_ms, None, None);
            return Folded::Taken;
        }
        let ours = epoch == self.state.epoch && *writer == self.state.writer;
        if !ours {
            if self.doubtful.is_none_or(|doubted| epoch <= doubted) {
                return if line.kind == Kind::Mark { Folded::Stray } else { Folded::Void };
            }
            // What was first seen was a claim that did not hold.
            *self = Self::first(home, offset, time_ms, line);
            return Folded::Taken;
        }
        (self.seen_ms, self.doubtful) = (time_ms, None);
        match line.kind {
            Kind::Part => self.part(offset, line),
            Kind::Mark => {
                if line.state.sequence != self.state.sequence + 1 {
                    return Folded::Stray;
                }
                let floor_ms = self.state.floor_ms.max(line.state.floor_ms);
                let position = line.state.position.or(self.state.position);
                let partitions = line.state.partitions.or(self.state.partitions);
                let source = self.state.source.take().or_else(|| line.state.source.clone());
                let lineage = std::mem::take(&mut self.state.lineage);
                self.state = State { floor_ms, position, partitions, source, lineage, ..line.state.clone() };
                self.keep(offset, line);
            }
            Kind::Beat => {
                self.state.partitions = line.state.partitions.or(self.state.partitions);
                // Written beside another line it may not know of a newer one: only a renewal says so.
                if self.state.source.is_none() {
                    self.state.source.clone_from(&line.state.source);
                }
                if line.state.floor_ms > self.state.floor_ms {
                    self.state.floor_ms = line.state.floor_ms;
                    let floor_ms = line.state.floor_ms;
                    self.marks.retain(|mark| mark.max_ms >= floor_ms);
                }
            }
            Kind::Forget => {
                (self.state.watermark_ms, self.state.floor_ms) = (i64::MIN, i64::MIN);
                self.marks.clear();
            }
            Kind::Renew => {
                if self.state.source != line.state.source {
                    self.state.source.clone_from(&line.state.source);
                    self.state.position = None;
                }
            }
            Kind::Claim { .. } | Kind::Route | Kind::RouteAgain | Kind::Clock => {}
        }
        Folded::Taken
    }

    fn part(&mut self, offset: i64, line: &Line) {
        if line.part == 0 {
            self.begun = Some((line.state.sequence, offset));
        }
    }

    fn keep(&mut self, offset: i64, line: &Line) {
        let begun = self.begun.take();
        let Keys { count, max_ms, .. } = line.keys;
        if count == 0 || max_ms < self.state.floor_ms {
            return;
        }
        let sequence = line.state.sequence;
        let offset = match begun {
            Some((begun, first)) if line.part > 0 && begun == sequence => first,
            _ if line.part > 0 => return,
            _ => offset,
        };
        self.marks.push_back(MarkAt { sequence, offset, max_ms });
    }

    /// How many marks go when the floor rises to `floor_ms`.
    pub(super) fn below(&self, floor_ms: i64) -> usize {
        self.marks.iter().filter(|mark| mark.max_ms < floor_ms).count()
    }

    /// The first mark above `sequence`.
    pub(super) fn above(&self, sequence: i64) -> Option<&MarkAt> {
        self.marks.get(self.marks.partition_point(|mark| mark.sequence <= sequence))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Log {
        ledger: Ledger,
        offset: i64,
    }

    impl Log {
        fn new() -> Self {
            Self { ledger: Ledger::default(), offset: 0 }
        }

        fn write(&mut self, kind: Kind, epoch: i64, writer: &str, change: impl FnOnce(&mut Line)) -> Folded {
            self.offset += 1;
            let state =
                State { epoch, writer: writer.to_owned(), owner: writer.to_owned(), ..State::unowned() };
            let mut line = Line::new(kind, &"s".into(), state);
            change(&mut line);
            self.ledger.fold(0, self.offset, self.offset * 10, &line, &[])
        }

        fn claim(&mut self, epoch: i64, writer: &str) -> Folded {
            self.write(Kind::Claim { after: epoch - 1 }, epoch, writer, |_| {})
        }

        fn mark(&mut self, epoch: i64, writer: &str, sequence: i64, max_ms: i64) -> Folded {
            self.write(Kind::Mark, epoch, writer, |line| {
                line.state.sequence = sequence;
                line.state.position = Some(sequence * 100);
                line.keys = Keys { count: 1, min_ms: 0, max_ms };
            })
        }

        fn state(&self) -> &State {
            &self.ledger.shard("s").unwrap().state
        }

        fn marks(&self) -> Vec<i64> {
            self.ledger.shard("s").unwrap().marks.iter().map(|mark| mark.sequence).collect()
        }
    }

    #[test]
    fn p3_of_two_claims_that_raise_one_epoch_the_first_holds() {
        let mut log = Log::new();
        assert_eq!(log.claim(1, "a"), Folded::Taken);
        assert_eq!(log.claim(2, "b"), Folded::Taken);
        assert_eq!(log.claim(2, "c"), Folded::Void, "it has not seen b's");
        assert_eq!((log.state().epoch, log.state().writer.as_str()), (2, "b"));
        assert_eq!(log.claim(3, "c"), Folded::Taken);
        assert_eq!(log.write(Kind::Claim { after: 3 }, 3, "d", |_| {}), Folded::Void, "it raises nothing");
    }

    #[test]
    fn p4_a_step_moves_by_one_under_the_owners_epoch() {
        let mut log = Log::new();
        log.claim(1, "a");
        assert_eq!(log.mark(1, "a", 1, 10), Folded::Taken);
        assert_eq!(log.mark(1, "a", 3, 10), Folded::Stray);
        assert_eq!(log.mark(1, "a", 1, 10), Folded::Stray);
        log.claim(2, "b");
        assert_eq!(
            (log.state().sequence, log.state().position),
            (1, Some(100)),
            "the claim keeps what was done"
        );
        assert_eq!(log.mark(1, "a", 2, 10), Folded::Stray);
        assert_eq!(log.mark(2, "a", 2, 10), Folded::Stray);
        assert_eq!(log.mark(2, "b", 2, 10), Folded::Taken);
        assert_eq!(log.marks(), [1, 2]);
    }

    #[test]
    fn p11_a_floor_takes_marks_with_it_and_never_falls() {
        let mut log = Log::new();
        log.claim(1, "a");
        for n in 1..=4 {
            log.mark(1, "a", n, n * 10);
        }
        assert_eq!(log.ledger.shard("s").unwrap().below(30), 2);
        let floor = |log: &mut Log, epoch, floor| {
            log.write(Kind::Beat, epoch, "a", |line| line.state.floor_ms = floor)
        };
        floor(&mut log, 1, 30);
        floor(&mut log, 1, 20);
        assert_eq!((log.state().floor_ms, log.marks()), (30, vec![3, 4]));
        log.claim(2, "b");
        assert_eq!(floor(&mut log, 1, 40), Folded::Void, "the owner is another");
        assert_eq!(log.state().floor_ms, 30);
        log.write(Kind::Forget, 2, "b", |_| {});
        assert_eq!((log.state().floor_ms, log.state().sequence, log.marks()), (i64::MIN, 4, vec![]));
    }

    #[test]
    fn a_beat_shows_life_and_keeps_the_step() {
        let mut log = Log::new();
        log.claim(1, "a");
        log.mark(1, "a", 1, 10);
        // Written beside a batch, so that it does not know of the step.
        log.write(Kind::Beat, 1, "a", |line| line.state.partitions = Some(6));
        assert_eq!(
            (log.state().sequence, log.state().position, log.state().partitions),
            (1, Some(100), Some(6))
        );
        assert_eq!(log.ledger.shard("s").unwrap().seen_ms, 30);
        log.mark(1, "a", 2, 10);
        assert_eq!(log.state().partitions, Some(6));
    }

    #[test]
    fn p3_a_source_stays_until_it_is_renewed_which_forgets_the_position() {
        let mut log = Log::new();
        let said = |log: &mut Log, kind, epoch, source: &str| {
            log.write(kind, epoch, "a", |line| line.state.source = Some(source.to_owned()))
        };
        log.claim(1, "a");
        log.mark(1, "a", 1, 10);
        assert_eq!(log.state().source, None);
        said(&mut log, Kind::Beat, 1, "old");
        said(&mut log, Kind::Beat, 1, "new");
        log.mark(1, "a", 2, 10);
        assert_eq!((log.state().source.as_deref(), log.state().position), (Some("old"), Some(200)));
        said(&mut log, Kind::Renew, 1, "new");
        let state = log.state();
        assert_eq!((state.source.as_deref(), state.position, state.sequence), (Some("new"), None, 2));
        log.mark(1, "a", 3, 10);
        said(&mut log, Kind::Renew, 1, "new");
        assert_eq!(log.state().position, Some(300), "the same source renews nothing");
        // A claim keeps it, also one of an earlier build, which says nothing of it.
        log.claim(2, "b");
        assert_eq!((log.state().source.as_deref(), log.state().position), (Some("new"), Some(300)));
        assert_eq!(said(&mut log, Kind::Renew, 1, "late"), Folded::Void, "the owner is another");
        assert_eq!(log.state().source.as_deref(), Some("new"));
        assert_eq!(log.marks(), [1, 2, 3], "what came through the old one is still known");
    }

    /// The topic's retention took everything up to a claim that had lost its race; what its owner wrote since must not be void.
    #[test]
    fn a_log_that_begins_with_a_void_claim_is_read_right() {
        let mut log = Log::new();
        log.claim(5, "loser");
        assert_eq!(log.write(Kind::Beat, 5, "winner", |line| line.state.sequence = 9), Folded::Taken);
        assert_eq!((log.state().writer.as_str(), log.state().sequence), ("winner", 9));
        assert_eq!(log.write(Kind::Beat, 5, "loser", |_| {}), Folded::Void);
        assert_eq!(log.mark(5, "winner", 10, 10), Folded::Taken);
    }

    /// Retention took the winner's claim and left the loser's, which raised the same epoch by more: the winner's batches counted as
    /// strays, and the next owner's claim as void. Whoever began there read records again that were in.
    #[test]
    fn p3_a_log_that_begins_with_a_void_claim_of_a_higher_epoch_is_read_right() {
        for (winner, loser) in [(105, 900), (900, 105)] {
            let begun = || {
                let mut log = Log::new();
                log.write(Kind::Claim { after: 100 }, loser, "loser", |_| {});
                log
            };
            let mut log = begun();
            assert_eq!(log.mark(100, "before", 8, 10), Folded::Stray, "of an owner before both");
            assert_eq!(log.mark(winner, "winner", 9, 10), Folded::Taken);
            assert_eq!(log.mark(winner, "winner", 10, 10), Folded::Taken);
            assert_eq!((log.state().epoch, log.state().sequence, log.marks()), (winner, 10, vec![9, 10]));
            assert_eq!(log.write(Kind::Beat, loser, "loser", |_| {}), Folded::Void);
            // The winner wrote nothing, and has a next owner.
            let mut log = begun();
            assert_eq!(log.write(Kind::Claim { after: 100 }, 7_000, "late", |_| {}), Folded::Void);
            assert_eq!(log.write(Kind::Claim { after: winner }, 1_000, "next", |_| {}), Folded::Taken);
            assert_eq!((log.state().epoch, log.state().writer.as_str()), (1_000, "next"));
            assert_eq!(log.mark(1_000, "next", 1, 10), Folded::Taken);
            // The one that was seen held after all.
            let mut log = begun();
            assert_eq!(log.write(Kind::Claim { after: loser }, 1_000, "next", |_| {}), Folded::Taken);
            assert_eq!(log.state().writer, "next");
        }
    }

    #[test]
    fn p6_who_wrote_is_kept_through_lines_that_do_not_say_it() {
        let mut log = Log::new();
        log.claim(1, "a");
        log.mark(1, "a", 1, 10);
        log.write(Kind::Claim { after: 1 }, 30, "an earlier build", |_| {});
        log.mark(30, "an earlier build", 2, 10);
        log.write(Kind::Claim { after: 30 }, 70, "b", |_| {});
        assert!(log.state().lineage.has(2, 30), "{:?}", log.state().lineage);
    }

    #[test]
    fn a_log_that_begins_with_a_mark_stands_where_it_says() {
        let mut log = Log::new();
        assert_eq!(log.mark(4, "a", 20, 10), Folded::Taken);
        assert_eq!(log.mark(4, "a", 21, 10), Folded::Taken);
        assert_eq!((log.state().epoch, log.marks()), (4, vec![20, 21]));
    }

    /// Event time crawled, so that marks were as old as the topic's retention and not below the floor yet.
    #[test]
    fn p11_marks_that_retention_took_are_below_the_floor() {
        let mut log = Log::new();
        log.claim(1, "a");
        for n in 1..=3 {
            log.mark(1, "a", n, n * 10);
        }
        log.ledger.cut(0, 4);
        assert_eq!((log.marks(), log.state().floor_ms), (vec![3], 21));
        // Of a process that never saw them.
        let mut log = Log::new();
        log.ledger.cut(0, 4);
        log.write(Kind::Beat, 1, "a", |line| (line.state.sequence, line.state.watermark_ms) = (3, 35));
        assert_eq!(log.state().floor_ms, 35);
    }

    #[test]
    fn a_mark_in_parts_begins_with_its_first() {
        let mut log = Log::new();
        log.claim(1, "a");
        for part in 0..2 {
            log.write(Kind::Part, 1, "a", |line| (line.state.sequence, line.part) = (1, part));
        }
        assert_eq!(log.state().sequence, 0, "its last part is not here");
        log.write(Kind::Mark, 1, "a", |line| {
            (line.state.sequence, line.part) = (1, 2);
            line.keys = Keys { count: 5, min_ms: 0, max_ms: 10 };
        });
        let mark = *log.ledger.shard("s").unwrap().above(0).unwrap();
        assert_eq!(mark, MarkAt { sequence: 1, offset: 2, max_ms: 10 });
        assert_eq!(log.ledger.shard("s").unwrap().above(1), None);
    }

    #[test]
    fn p1_the_first_proposal_names_the_route() {
        let row = |byte: u8| RouteRow {
            route_id: vec![byte; 16],
            key_spec_id: 1,
            algorithm: 1,
            secret: vec![byte; 192],
        };
        let mut ledger = Ledger::default();
        let mut fold = |kind, byte| {
            let line = Line::new(kind, &"".into(), State::unowned());
            ledger.fold(0, 0, 0, &line, &super::super::line::route_bytes(&row(byte)));
            ledger.route().cloned().unwrap()
        };
        assert_eq!(fold(Kind::Route, 1), row(1));
        assert_eq!(fold(Kind::Route, 2), row(1));
        assert_eq!(fold(Kind::RouteAgain, 3), row(3), "the log begins after the winner's proposal");
        assert_eq!(fold(Kind::RouteAgain, 4), row(3));
    }
}
