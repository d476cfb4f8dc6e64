//! Tries every future of a small world, breadth first, so that the first fault found has the shortest trace.

use std::{
    collections::HashMap,
    fmt,
    hash::{Hash, Hasher},
    rc::Rc,
    time::{Duration, Instant},
};

use xxhash_rust::xxh3::Xxh3;

/// An invariant that does not hold, and how that shows.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Broken {
    pub(super) invariant: &'static str,
    pub(super) what: String,
}

/// What may happen next.
pub(super) struct Next<M: Model + ?Sized> {
    pub(super) action: M::Action,
    pub(super) state: M::State,
    /// It is no fault of the world: it will happen at last if nothing else does.
    pub(super) expected: bool,
}

/// A small world.
pub(super) trait Model {
    type State;
    type Action: fmt::Display;

    fn initial(&self) -> Self::State;
    /// Whatever may happen in this state.
    fn next(&self, state: &Self::State) -> Vec<Next<Self>>;
    /// Feeds all that tells this state from others.
    fn digest(&self, state: &Self::State, into: &mut Xxh3);
    fn broken(&self, state: &Self::State) -> Option<Broken>;
    /// Nothing is left to be done here. Some such state must lie ahead of every state, with no more faults.
    fn is_done(&self, state: &Self::State) -> bool;
    /// The invariant that says so.
    const AT_LAST: &'static str = "one_outcome";
}

/// What was seen.
pub(super) struct Seen {
    pub(super) states: usize,
    pub(super) transitions: usize,
    pub(super) depth: usize,
    pub(super) took: Duration,
    pub(super) found: Option<Trace>,
}

/// The shortest way to a fault.
pub(super) struct Trace {
    pub(super) broken: Broken,
    pub(super) steps: Vec<String>,
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Seen { states, transitions, depth, took, found } = self;
        write!(f, "{states} states, {transitions} transitions, depth {depth}, {:.1} s", took.as_secs_f64())?;
        match found {
            Some(trace) => write!(f, "\n{trace}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` does not hold: {}", self.broken.invariant, self.broken.what)?;
        for (at, step) in self.steps.iter().enumerate() {
            write!(f, "\n{:4}. {step}", at + 1)?;
        }
        Ok(())
    }
}

/// A state that was reached: by which action, from which one.
struct Reached {
    from: u32,
    action: String,
    depth: u32,
    done: bool,
}

/// Tries everything, and stops at the first fault. `most` states: more are a fault of the model. With `deepest` only what so many steps
/// can bring about; then nothing is said of how it all ends.
pub(super) fn search<M: Model>(model: &M, most: usize, deepest: Option<u32>) -> Seen {
    let started = Instant::now();
    let mut reached: Vec<Reached> = Vec::new();
    let mut known: HashMap<u128, u32> = HashMap::new();
    // Who comes before, if nothing goes wrong.
    let mut before: Vec<(u32, u32)> = Vec::new();
    let mut level: Vec<(u32, Rc<M::State>)> = Vec::new();
    let (mut transitions, mut depth) = (0, 0);
    let key = |state: &M::State| {
        let mut hasher = Xxh3::new();
        model.digest(state, &mut hasher);
        hasher.digest128()
    };
    let seen = |states: usize, transitions, depth, found| Seen {
        states,
        transitions,
        depth,
        took: started.elapsed(),
        found,
    };
    let first = model.initial();
    known.insert(key(&first), 0);
    reached.push(Reached { from: 0, action: String::new(), depth: 0, done: model.is_done(&first) });
    if let Some(broken) = model.broken(&first) {
        return seen(1, 0, 0, Some(Trace { broken, steps: Vec::new() }));
    }
    level.push((0, Rc::new(first)));
    while !level.is_empty() {
        if deepest.is_some_and(|deepest| depth >= deepest) {
            return seen(reached.len(), transitions, depth as usize, None);
        }
        let mut deeper = Vec::new();
        for (from, state) in level {
            for Next { action, state, expected } in model.next(&state) {
                transitions += 1;
                let id = reached.len() as u32;
                let at = *known.entry(key(&state)).or_insert(id);
                if expected {
                    before.push((at, from));
                }
                if at != id {
                    continue;
                }
                depth = reached[from as usize].depth + 1;
                let done = model.is_done(&state);
                reached.push(Reached { from, action: action.to_string(), depth, done });
                if let Some(broken) = model.broken(&state) {
                    let steps = steps_to(&reached, id);
                    let trace = Trace { broken, steps };
                    return seen(reached.len(), transitions, depth as usize, Some(trace));
                }
                assert!(reached.len() <= most, "more than {most} states at depth {depth}: bound the model");
                deeper.push((id, Rc::new(state)));
            }
        }
        level = deeper;
    }
    let stuck = first_stuck(&reached, before);
    let found = stuck.map(|id| Trace {
        broken: Broken {
            invariant: M::AT_LAST,
            what: "from here nothing comes to its end, though nothing more goes wrong".into(),
        },
        steps: steps_to(&reached, id),
    });
    seen(reached.len(), transitions, depth as usize, found)
}

fn steps_to(reached: &[Reached], id: u32) -> Vec<String> {
    let back = std::iter::successors(Some(id), |&id| Some(reached[id as usize].from));
    let mut steps: Vec<String> =
        back.take_while(|&id| id != 0).map(|id| reached[id as usize].action.clone()).collect();
    steps.reverse();
    steps
}

/// The first state from which no state is reached where nothing is left to be done: one where nothing happens any more, if there is one.
fn first_stuck(reached: &[Reached], mut before: Vec<(u32, u32)>) -> Option<u32> {
    before.sort_unstable();
    let mut goes_on = vec![false; reached.len()];
    before.iter().filter(|(to, from)| to != from).for_each(|&(_, from)| goes_on[from as usize] = true);
    let mut ends = vec![false; reached.len()];
    let mut open: Vec<u32> = (0..reached.len() as u32).filter(|&id| reached[id as usize].done).collect();
    open.iter().for_each(|&id| ends[id as usize] = true);
    while let Some(id) = open.pop() {
        let first = before.partition_point(|&(to, _)| to < id);
        for &(_, from) in before[first..].iter().take_while(|&&(to, _)| to == id) {
            if !std::mem::replace(&mut ends[from as usize], true) {
                open.push(from);
            }
        }
    }
    // Breadth first: the first one has the shortest trace.
    let stuck = |id: &usize| !ends[*id];
    let all = 0..reached.len();
    all.clone().filter(stuck).find(|id| !goes_on[*id]).or_else(|| all.clone().find(stuck)).map(|id| id as u32)
}

/// Feeds something that can be hashed.
pub(super) fn feed(into: &mut Xxh3, what: &impl Hash) {
    struct Into<'a>(&'a mut Xxh3);
    impl Hasher for Into<'_> {
        fn write(&mut self, bytes: &[u8]) {
            self.0.update(bytes);
        }
        fn finish(&self) -> u64 {
            0
        }
    }
    what.hash(&mut Into(into));
}
