//! Orders of any graph: there is one where there is a topological one, it is valid, and it demotes nobody without need.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ubatch_guard::order::Planner;

type Input = (u8, Vec<(u8, u8)>, Option<Vec<u8>>, Option<Vec<bool>>);

fuzz_target!(|input: Input| {
    let (n, pairs, phases, short) = input;
    let n = usize::from(n % 24);
    let within = |request: u8| usize::from(request) % n.max(1);
    let pairs: Vec<_> = pairs
        .into_iter()
        .map(|(reader, writer)| (within(reader), within(writer)))
        .filter(|(reader, writer)| reader != writer && n > 0)
        .collect();
    let phases: Option<Vec<i8>> = phases.map(|phases| {
        #[allow(clippy::cast_possible_wrap)]
        (0..n).map(|request| (phases.get(request).copied().unwrap_or(0) % 3) as i8).collect()
    });
    let short: Option<Vec<bool>> =
        short.map(|short| (0..n).map(|request| short.get(request).copied().unwrap_or(true)).collect());
    let phase = |request: usize| phases.as_ref().map_or(0, |phases| phases[request]);

    let mut planner = Planner::default();
    for &(reader, writer) in &pairs {
        planner.depend(reader, writer);
    }
    let order = planner.order(n, phases.as_deref(), short.as_deref()).unwrap();
    // What each request needs, itself and through others.
    let mut needs = vec![vec![false; n]; n];
    for &(reader, writer) in &pairs {
        needs[reader][writer] = true;
    }
    for through in 0..n {
        for reader in 0..n {
            if needs[reader][through] {
                for writer in 0..n {
                    needs[reader][writer] |= needs[through][writer];
                }
            }
        }
    }
    let possible = (0..n).all(|request| !needs[request][request]) && pairs.iter().all(|&(r, w)| phase(w) <= phase(r));
    assert_eq!(order.is_some(), possible);
    let Some(order) = order else { return };
    let mut at: Vec<_> = (0..n).collect();
    for &(a, b) in &order.swaps {
        at.swap(a, b);
    }
    assert_eq!(at, order.permutation);
    let mut place = vec![n; n];
    for (position, &request) in at.iter().enumerate() {
        place[request] = position;
    }
    assert!(pairs.iter().all(|&(reader, writer)| place[writer] < place[reader]));
    assert!(at.is_sorted_by_key(|&request| phase(request)));
    let was_right = pairs.iter().all(|(reader, writer)| writer < reader) && (0..n).is_sorted_by_key(phase);
    assert!(!was_right || order.swaps.is_empty());
    let Some(short) = short else { return assert!(order.demoted.is_empty()) };
    let behind_a_long_one = |order: &[usize], request: usize| {
        order.iter().take_while(|&&other| other != request).any(|&other| !short[other])
    };
    let now: Vec<_> = (0..n).collect();
    for request in 0..n {
        let led = short[request] && !behind_a_long_one(&now, request);
        let demoted = led && behind_a_long_one(&at, request);
        assert_eq!(order.demoted.contains(&request), demoted);
        let must = (0..n).any(|other| !short[other] && (needs[request][other] || phase(other) < phase(request)));
        assert_eq!(demoted, led && must);
    }
});
