//! Batch orders against a search through all permutations.

use proptest::collection::vec;
use proptest::prelude::*;
use ubatch_guard::error::Error;
use ubatch_guard::order::{Order, Planner};

/// All permutations of n, and the swaps each needs: n less its number of cycles.
struct Permutations {
    /// (present position of the request at each position, new position of each request, swaps).
    all: Vec<(Vec<usize>, Vec<usize>, usize)>,
}

impl Permutations {
    fn new(n: usize) -> Self {
        let mut all = vec![vec![]];
        for _ in 0..n {
            all = all
                .into_iter()
                .flat_map(|start: Vec<usize>| {
                    let rest = (0..n).filter(|request| !start.contains(request)).collect::<Vec<_>>();
                    rest.into_iter().map(move |request| [&start[..], &[request]].concat())
                })
                .collect();
        }
        let with_places = |at: Vec<usize>| {
            let mut place = vec![0; n];
            for (position, &request) in at.iter().enumerate() {
                place[request] = position;
            }
            let swaps = n - cycles(&at);
            (at, place, swaps)
        };
        let mut all: Vec<_> = all.into_iter().map(with_places).collect();
        all.sort_by_key(|permutation| permutation.2);
        Self { all }
    }

    /// The requests that every order demotes, and the fewest swaps to an order that demotes no other; None where there
    /// is no order with writers before readers and phases that do not descend.
    fn best(&self, pairs: &[(usize, usize)], asked: Asked) -> Option<(Vec<usize>, usize)> {
        let valid = || self.all.iter().filter(|(at, place, _)| is_valid(at, place, pairs, asked.phases));
        let Some(short) = asked.short else {
            return valid().next().map(|(_, _, swaps)| (Vec::new(), *swaps));
        };
        let forced = valid().map(|(at, _, _)| demoted(at, short)).reduce(|all, own| all & own)?;
        let best = valid().find(|(at, _, _)| demoted(at, short) == forced).expect("no order demotes the fewest");
        Some(((0..short.len()).filter(|request| forced >> request & 1 == 1).collect(), best.2))
    }
}

/// What is asked of an order.
#[derive(Debug, Clone, Copy, Default)]
struct Asked<'a> {
    phases: Option<&'a [i8]>,
    short: Option<&'a [bool]>,
}

/// A bit for each request that has no long one in front of it now and one in the order.
fn demoted(at: &[usize], short: &[bool]) -> u32 {
    let behind_a_long_one = |order: &[usize]| {
        (1..order.len())
            .filter(|&place| order[..place].iter().any(|&before| !short[before]) && short[order[place]])
            .fold(0, |bits, place| bits | 1 << order[place])
    };
    behind_a_long_one(at) & !behind_a_long_one(&(0..at.len()).collect::<Vec<_>>())
}

fn cycles(permutation: &[usize]) -> usize {
    let mut seen = vec![false; permutation.len()];
    let mut cycles = 0;
    for start in 0..permutation.len() {
        cycles += usize::from(!seen[start]);
        let mut next = start;
        while !std::mem::replace(&mut seen[next], true) {
            next = permutation[next];
        }
    }
    cycles
}

fn is_valid(at: &[usize], place: &[usize], pairs: &[(usize, usize)], phases: Option<&[i8]>) -> bool {
    pairs.iter().all(|&(reader, writer)| place[writer] < place[reader])
        && phases.is_none_or(|phases| at.is_sorted_by_key(|&request| phases[request]))
}

fn plan(planner: &mut Planner, n: usize, pairs: &[(usize, usize)], asked: Asked) -> Option<Order> {
    planner.clear();
    for &(reader, writer) in pairs {
        planner.depend(reader, writer);
    }
    let order = planner.order(n, asked.phases, asked.short).unwrap()?;
    let mut at: Vec<_> = (0..n).collect();
    for &(a, b) in &order.swaps {
        assert_ne!(a, b);
        at.swap(a, b);
    }
    assert_eq!(at, order.permutation, "the swaps lead elsewhere");
    let mut place = vec![usize::MAX; n];
    for (position, &request) in at.iter().enumerate() {
        place[request] = position;
    }
    assert!(!place.contains(&usize::MAX), "not a permutation");
    assert!(is_valid(&at, &place, pairs, asked.phases), "{order:?} for {pairs:?} {asked:?}");
    assert_eq!(order.swaps.len(), n - cycles(&at), "swaps that undo each other");
    Some(order)
}

/// How the planner's swaps compare with the fewest.
#[derive(Default, Debug)]
struct Gaps {
    /// By gap: orders that need so many swaps more than the best.
    counts: Vec<usize>,
    /// Largest number of swaps, by fewest swaps possible.
    worst: Vec<usize>,
    impossible: usize,
}

impl Gaps {
    fn add(
        &mut self,
        planner: &mut Planner,
        permutations: &Permutations,
        n: usize,
        pairs: &[(usize, usize)],
        asked: Asked,
    ) {
        let order = plan(planner, n, pairs, asked);
        let best = permutations.best(pairs, asked);
        assert_eq!(order.is_some(), best.is_some(), "{pairs:?} {asked:?}");
        let (Some(order), Some((demoted, fewest))) = (order, best) else {
            self.impossible += 1;
            return;
        };
        assert_eq!(order.demoted, demoted, "{order:?} for {pairs:?} {asked:?}");
        let swaps = order.swaps.len();
        assert!(fewest > 0 || swaps == 0, "a right order is changed");
        let raise = |values: &mut Vec<usize>, index: usize| values.resize(values.len().max(index + 1), 0);
        raise(&mut self.counts, swaps - fewest);
        self.counts[swaps - fewest] += 1;
        raise(&mut self.worst, fewest);
        self.worst[fewest] = self.worst[fewest].max(swaps);
    }

    /// Print the gaps; and check that none is above `largest`, nor their sum above `sum`.
    fn check(&self, name: &str, largest: usize, sum: usize) {
        let total: usize = self.counts.iter().sum();
        println!(
            "{name}: {total} orders, {} without; by swaps above the fewest {:?}; most swaps by fewest {:?}",
            self.impossible, self.counts, self.worst
        );
        assert!(self.counts.len() <= largest + 1, "{name}: a gap above {largest}");
        let excess: usize = self.counts.iter().enumerate().map(|(gap, count)| gap * count).sum();
        assert!(excess <= sum, "{name}: {excess} swaps too many");
    }
}

/// The pairs (reader, writer) of different requests that the bits of `code` stand for.
fn pairs_of(n: usize, code: u32) -> Vec<(usize, usize)> {
    let all =
        (0..n).flat_map(|reader| (0..n).filter(move |&writer| writer != reader).map(move |writer| (reader, writer)));
    all.enumerate().filter(|(bit, _)| code >> bit & 1 == 1).map(|(_, pair)| pair).collect()
}

/// Every assignment of phases.
fn every_phases(n: usize) -> impl Iterator<Item = Vec<i8>> {
    let digit = |code: usize, request: usize| code / 3_usize.pow(u32::try_from(request).unwrap()) % 3;
    (0..3_usize.pow(u32::try_from(n).unwrap()))
        .map(move |code| (0..n).map(|request| i8::try_from(digit(code, request)).unwrap()).collect())
}

/// Every graph of up to 4 requests, free and with every assignment of phases; every graph of 5, free.
#[test]
fn every_small_graph() {
    let mut planner = Planner::default();
    for n in 0..=4_usize {
        let permutations = Permutations::new(n);
        let (mut free, mut sectioned) = (Gaps::default(), Gaps::default());
        for code in 0..1 << (n * n.saturating_sub(1)) {
            let pairs = pairs_of(n, code);
            free.add(&mut planner, &permutations, n, &pairs, Asked::default());
            for phases in every_phases(n) {
                let asked = Asked { phases: Some(&phases), short: None };
                sectioned.add(&mut planner, &permutations, n, &pairs, asked);
            }
        }
        free.check(&format!("{n} requests"), usize::from(n == 4), 8);
        sectioned.check(&format!("{n} requests with phases"), usize::from(n == 4), 208);
    }
    let permutations = Permutations::new(5);
    let mut free = Gaps::default();
    for code in 0..1 << 20 {
        free.add(&mut planner, &permutations, 5, &pairs_of(5, code), Asked::default());
    }
    free.check("5 requests", 2, 1192 + 2 * 32);
}

/// Every graph of up to 4 requests with every set of short ones, free; of up to 3 with every assignment of phases too.
#[test]
fn every_small_graph_with_short_requests() {
    let mut planner = Planner::default();
    for n in 0..=4_usize {
        let permutations = Permutations::new(n);
        let (mut free, mut sectioned) = (Gaps::default(), Gaps::default());
        for code in 0..1 << (n * n.saturating_sub(1)) {
            let pairs = pairs_of(n, code);
            for code in 0..1 << n {
                let short: Vec<_> = (0..n).map(|request| code >> request & 1 == 1).collect();
                let asked = Asked { phases: None, short: Some(&short) };
                free.add(&mut planner, &permutations, n, &pairs, asked);
                for phases in every_phases(if n < 4 { n } else { 0 }).filter(|phases| phases.len() == n) {
                    let asked = Asked { phases: Some(&phases), ..asked };
                    sectioned.add(&mut planner, &permutations, n, &pairs, asked);
                }
            }
        }
        free.check(&format!("{n} requests, some short"), usize::from(n == 4), 132);
        sectioned.check(&format!("{n} requests with phases, some short"), 0, 0);
    }
}

/// What steps look like: families of requests that share a prefix, which one of them writes and the others read.
#[test]
fn families() {
    let mut planner = Planner::default();
    let permutations = Permutations::new(6);
    let mut gaps = Gaps::default();
    // By request, its writer; itself for none.
    for code in 0..6_u32.pow(6) {
        let writer: Vec<_> = (0..6).map(|request| (code / 6_u32.pow(request) % 6) as usize).collect();
        if (0..6).all(|request| writer[writer[request]] == writer[request]) {
            let pairs: Vec<_> = (0..6).map(|request| (request, writer[request])).filter(|(r, w)| r != w).collect();
            gaps.add(&mut planner, &permutations, 6, &pairs, Asked::default());
        }
    }
    gaps.check("families of 6 requests", 1, 1);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(20_000) })]

    #[test]
    fn graphs_of_six(
        pairs in vec((0..6_usize, 0..6_usize), 0..10),
        phases in proptest::option::of(vec(0..3_i8, 6)),
        short in proptest::option::of(vec(any::<bool>(), 6)),
    ) {
        thread_local! {
            static SIX: Permutations = Permutations::new(6);
        }
        let mut pairs = pairs;
        pairs.retain(|(reader, writer)| reader != writer);
        let asked = Asked { phases: phases.as_deref(), short: short.as_deref() };
        SIX.with(|six| Gaps::default().add(&mut Planner::default(), six, 6, &pairs, asked));
    }

    /// Larger graphs, with an order that is known to exist.
    #[test]
    fn large_graphs(
        pairs in vec((0..60_usize, 0..60_usize), 0..150),
        known in Just((0..60_usize).collect::<Vec<_>>()).prop_shuffle(),
        ends in (0..=60_usize, 0..=60_usize),
        phased in any::<bool>(),
        short in vec(prop::bool::weighted(0.8), 60),
        shortened in any::<bool>(),
    ) {
        let mut place = vec![0; 60];
        for (position, &request) in known.iter().enumerate() {
            place[request] = position;
        }
        let pairs: Vec<_> = pairs.into_iter().filter(|&(reader, writer)| place[writer] < place[reader]).collect();
        let phases: Vec<i8> = place.iter().map(|&p| i8::from(p >= ends.0) + i8::from(p >= ends.1)).collect();
        let asked = Asked { phases: phased.then_some(&phases), short: shortened.then_some(&short) };
        let order = plan(&mut Planner::default(), 60, &pairs, asked);
        prop_assert!(order.is_some());
    }
}

#[test]
fn what_does_not_fit() {
    let mut planner = Planner::default();
    assert!(matches!(planner.order(2, Some(&[0]), None), Err(Error::Length { found: 1, expected: 2, .. })));
    assert!(matches!(planner.order(2, None, Some(&[true])), Err(Error::Length { found: 1, expected: 2, .. })));
    for phase in [-1, 3] {
        assert_eq!(planner.order(2, Some(&[0, phase]), None), Err(Error::Phase { request: 1, phase }));
    }
    assert_eq!(planner.order(2, Some(&[1, 0]), None).unwrap().unwrap().permutation, [1, 0]);
}
