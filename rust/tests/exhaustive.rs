//! Every small step, every cut and every pair of cuts, against execution.
//!
//! Blocks have 2 slots and the pool has 4 blocks. Block ids are interchangeable, so tables that differ only in their
//! names are visited once: the first new id in a table is the lowest unused one. The names that the code under test
//! sees then go through all 24 renamings from step to step, since an implementation may well depend on them.
//!
//! A case is a step with one cut (2 microbatches) or with two cuts (3 microbatches).

use ndarray::ArrayView2;
use ubatch_guard::hazard::{Checker, Cuts, UnsafeCuts};
use ubatch_guard::step::{Batch, Group, Table};

use crate::oracle::{Oracle, Request, Step};

const BLOCKS: usize = 4;
const SLOTS: u32 = 2;
const REQUESTS: usize = 4;
const COLUMNS: usize = 4;
/// Tokens of the largest step.
const TOKENS: usize = REQUESTS * COLUMNS * SLOTS as usize;

/// Which block tables are visited.
#[derive(Clone, Copy, PartialEq)]
enum Shape {
    /// Any id in any column.
    Any,
    /// A block stands in the same column wherever it stands. So do all blocks of a prefix cache, where a block is
    /// found by the tokens up to its end; and this holds much more.
    SameColumn,
}

/// Up to 4 requests and their rows; ids are canonical.
#[derive(Clone, Copy)]
struct Small {
    num_reqs: usize,
    requests: [Request; REQUESTS],
    rows: [[u8; COLUMNS]; REQUESTS],
    /// Ids in use.
    used: usize,
    /// Column of each id in use.
    column_of: [usize; BLOCKS],
}

/// Visit each step with 1 to `max_reqs` requests of up to `max_columns` columns: every table, and every pair of
/// computed and scheduled tokens that ends in the last column.
struct Scope {
    shape: Shape,
    max_reqs: usize,
    max_columns: usize,
    /// Also requests without scheduled tokens, and every settled count.
    idle_and_settled: bool,
    /// Every number of tokens read ahead.
    ahead: bool,
    /// Every number of computed tokens that are the prompt.
    prompt: bool,
}

impl Scope {
    fn visit(&self, visit: &mut impl FnMut(&Small)) {
        let empty = Small {
            num_reqs: 0,
            requests: [Request::default(); REQUESTS],
            rows: [[0; COLUMNS]; REQUESTS],
            used: 0,
            column_of: [0; BLOCKS],
        };
        self.add_request(&empty, visit);
    }

    fn add_request(&self, step: &Small, visit: &mut impl FnMut(&Small)) {
        if step.num_reqs == self.max_reqs {
            return;
        }
        for columns in 1..=self.max_columns {
            self.add_columns(step, 0, columns, &mut |with_row| {
                let mut next = *with_row;
                next.num_reqs += 1;
                let last = u32::try_from(columns).unwrap() * SLOTS;
                for end in last - SLOTS + 1..=last {
                    for computed in 0..end + u32::from(self.idle_and_settled) {
                        let scheduled = end - computed;
                        for settled in 0..=if self.idle_and_settled { computed } else { 0 } {
                            for ahead in 0..=if self.ahead { scheduled } else { 0 } {
                                for prompt in 0..=if self.prompt { computed } else { 0 } {
                                    let request = Request { computed, scheduled, settled, ahead, prompt };
                                    next.requests[step.num_reqs] = request;
                                    visit(&next);
                                    self.add_request(&next, visit);
                                }
                            }
                        }
                    }
                }
            });
        }
    }

    fn add_columns(&self, step: &Small, column: usize, columns: usize, done: &mut dyn FnMut(&Small)) {
        if column == columns {
            return done(step);
        }
        for id in 0..BLOCKS.min(step.used + 1) {
            let mut next = *step;
            next.rows[step.num_reqs][column] = u8::try_from(id).unwrap();
            if id == step.used {
                next.used += 1;
                next.column_of[id] = column;
            } else if self.shape == Shape::SameColumn && step.column_of[id] != column {
                continue;
            }
            self.add_columns(&next, column + 1, columns, done);
        }
    }
}

/// A step executed with a bit per KV slot; bit K of an answer is for cut K.
#[derive(PartialEq, Debug)]
struct Executed {
    num_tokens: usize,
    /// Unsafe cuts of 2 microbatches.
    two: u64,
    /// By first cut: unsafe second cuts of 3 microbatches, from the first cut on.
    three: [u64; TOKENS + 1],
}

fn execute(group: &Group, step: &Small) -> Executed {
    let mut owner = [0; TOKENS];
    let mut reads = [0_u8; TOKENS];
    let mut writes = [0_u8; TOKENS];
    let mut num_tokens = 0;
    for (request, counts) in step.requests[..step.num_reqs].iter().enumerate() {
        let slot = |position: u32| {
            let block = step.rows[request][(position / SLOTS) as usize];
            let null = group.null_block == Some(i64::from(block));
            if null { 0 } else { 1 << (u32::from(block) * SLOTS + position % SLOTS) }
        };
        for position in counts.computed..counts.computed + counts.scheduled {
            owner[num_tokens] = request;
            if position >= counts.read() {
                writes[num_tokens] = slot(position);
            }
            for read in counts.settled..counts.read() {
                let seen = read > position
                    || (group.prompt_in_view && read < counts.prompt)
                    || group.sliding_window.is_none_or(|window| position < read + window)
                        && group.attention_chunk_size.is_none_or(|chunk| position / chunk == read / chunk);
                if seen {
                    reads[num_tokens] |= slot(read);
                }
            }
            num_tokens += 1;
        }
    }
    // By offset and request: slots that others still write at this offset or later.
    let mut to_come = [[0_u8; REQUESTS]; TOKENS + 1];
    for offset in (0..num_tokens).rev() {
        to_come[offset] = to_come[offset + 1];
        for (request, others) in to_come[offset].iter_mut().enumerate() {
            if owner[offset] != request {
                *others |= writes[offset];
            }
        }
    }
    // By end: whether a microbatch of the tokens start..end reads something that is still to come.
    let ends_early = |start: usize| {
        let mut needs = [0_u8; REQUESTS];
        let mut early = 0_u64;
        for end in start + 1..=num_tokens {
            needs[owner[end - 1]] |= reads[end - 1];
            let hit = needs.iter().zip(&to_come[end]).any(|(needs, to_come)| needs & to_come != 0);
            early |= u64::from(hit) << end;
        }
        early
    };
    let two = ends_early(0);
    let mut three = [0; TOKENS + 1];
    for (first, seconds) in three.iter_mut().enumerate().take(num_tokens + 1) {
        *seconds = if two >> first & 1 == 1 { from_to(first, num_tokens) } else { ends_early(first) };
    }
    Executed { num_tokens, two, three }
}

/// Bits first ..= last.
fn from_to(first: usize, last: usize) -> u64 {
    (u64::MAX << first) & (u64::MAX >> (63 - last))
}

/// What unsafe cuts mean for 2 and 3 microbatches: a split is unsafe where one of its cuts is.
fn predicted(num_tokens: usize, cuts: u64) -> Executed {
    let mut three = [0; TOKENS + 1];
    for (first, seconds) in three.iter_mut().enumerate().take(num_tokens + 1) {
        let all = from_to(first, num_tokens);
        *seconds = if cuts >> first & 1 == 1 { all } else { cuts & all };
    }
    Executed { num_tokens, two: cuts, three }
}

fn bits(found: &[UnsafeCuts]) -> u64 {
    found.iter().map(|range| from_to(range.first as usize, range.last as usize)).sum()
}

/// All orders of the 4 ids.
fn renamings() -> Vec<[u8; BLOCKS]> {
    let mut all = Vec::new();
    for code in 0..256_u32 {
        let names = [0, 2, 4, 6].map(|shift| u8::try_from(code >> shift & 3).unwrap());
        if names.iter().map(|name| 1 << name).sum::<u32>() == 15 {
            all.push(names);
        }
    }
    all
}

/// A group that attends to everything.
fn full() -> Group {
    Group {
        tokens_per_column: SLOTS,
        num_blocks: u32::try_from(BLOCKS).unwrap(),
        sliding_window: None,
        attention_chunk_size: None,
        prompt_in_view: false,
        null_block: None,
    }
}

/// The code under test, set up for small steps.
struct Subject {
    checker: Checker,
    batch: Batch,
    renamings: Vec<[u8; BLOCKS]>,
    table: [i32; REQUESTS * COLUMNS],
    found: Vec<UnsafeCuts>,
}

impl Subject {
    fn new(group: &Group) -> Self {
        Self {
            checker: Checker::new(vec![group.clone()]).unwrap(),
            batch: Batch::default(),
            // A null block has its name.
            renamings: if group.null_block.is_none() { renamings() } else { vec![[0, 1, 2, 3]] },
            table: [0; REQUESTS * COLUMNS],
            found: Vec::new(),
        }
    }

    fn load(&mut self, step: &Small, turn: usize) {
        let names = self.renamings[turn % self.renamings.len()];
        for (cell, id) in self.table.iter_mut().zip(step.rows.as_flattened()) {
            *cell = i32::from(names[*id as usize]);
        }
        let requests = &step.requests[..step.num_reqs];
        let computed = requests.iter().map(|request| i64::from(request.computed));
        self.batch.fill(computed, requests.iter().map(|request| i64::from(request.scheduled))).unwrap();
        self.batch.settle(requests.iter().map(|request| i64::from(request.settled))).unwrap();
        self.batch.prompts(requests.iter().map(|request| i64::from(request.prompt))).unwrap();
        self.batch.read_on(requests.iter().map(|request| i64::from(request.computed + request.ahead))).unwrap();
    }

    fn unsafe_cuts(&mut self, cuts: Cuts) -> u64 {
        let table = ArrayView2::from_shape((REQUESTS, COLUMNS), &self.table).unwrap();
        self.checker.unsafe_cuts(&[Table::I32(table)][..], &self.batch, cuts, &mut self.found).unwrap();
        bits(&self.found)
    }

    fn is_safe(&mut self, cuts: Cuts) -> bool {
        let table = ArrayView2::from_shape((REQUESTS, COLUMNS), &self.table).unwrap();
        self.checker.is_safe(&[Table::I32(table)][..], &self.batch, cuts).unwrap()
    }
}

/// What a scope held.
#[derive(Default)]
struct Tally {
    steps: usize,
    two: usize,
    three: usize,
    unsafe_steps: usize,
    differences: usize,
}

/// Compare a rule with execution over a scope.
fn compare(scope: &Scope, group: &Group, mut rule: impl FnMut(&Small, usize) -> u64) -> Tally {
    let mut tally = Tally::default();
    scope.visit(&mut |step| {
        let truth = execute(group, step);
        let cuts = truth.num_tokens + 1;
        tally.differences += usize::from(predicted(truth.num_tokens, rule(step, tally.steps)) != truth);
        tally.steps += 1;
        tally.two += cuts;
        tally.three += cuts * (cuts + 1) / 2;
        tally.unsafe_steps += usize::from(truth.two != 0);
    });
    tally
}

/// All unsafe cuts of every step in the scope; and, as one range a step is what time allows, the answers about a range
/// of cuts that changes from step to step.
fn check(name: &str, scope: &Scope, group: &Group, expected_cases: usize) {
    let mut subject = Subject::new(group);
    let tally = compare(scope, group, |step, turn| {
        subject.load(step, turn);
        let all = subject.unsafe_cuts(Cuts::ALL);
        let num_tokens = subject.batch.num_tokens();
        let first = u32::try_from(turn / 24).unwrap() % (num_tokens + 1);
        let last = first + u32::try_from(turn / 1000).unwrap() % (num_tokens + 1 - first);
        let asked = from_to(first as usize, last as usize);
        let cuts = Cuts { first, last };
        assert_eq!(subject.unsafe_cuts(cuts), all & asked);
        assert_eq!(subject.is_safe(cuts), all & asked == 0);
        all
    });
    let cases = tally.two + tally.three;
    println!(
        "{name}: {} steps ({} of them unsafe), {cases} cases ({} with 2 microbatches, {} with 3)",
        tally.steps, tally.unsafe_steps, tally.two, tally.three
    );
    assert_eq!(tally.differences, 0);
    assert_eq!(cases, expected_cases, "the scope is not what it was");
}

fn any_table(max_reqs: usize, max_columns: usize) -> Scope {
    Scope { shape: Shape::Any, max_reqs, max_columns, idle_and_settled: false, ahead: false, prompt: false }
}

#[test]
fn any_table_2_requests_4_columns() {
    check("any table, 2 requests, 4 columns", &any_table(2, 4), &full(), 56_137_650);
}

#[test]
fn large_any_table_3_requests_3_columns() {
    check("any table, 3 requests, 3 columns", &any_table(3, 3), &full(), 1_749_404_220);
}

#[test]
fn large_any_table_4_requests_2_columns() {
    check("any table, 4 requests, 2 columns", &any_table(4, 2), &full(), 660_198_369);
}

#[test]
fn large_same_column_4_requests_4_columns() {
    let scope = Scope { shape: Shape::SameColumn, ..any_table(4, 4) };
    check("blocks in their column, 4 requests, 4 columns", &scope, &full(), 499_447_735);
}

#[test]
fn idle_and_settled_3_requests_2_columns() {
    let scope = Scope { idle_and_settled: true, ..any_table(3, 2) };
    check("idle and settled, 3 requests, 2 columns", &scope, &full(), 71_469_434);
}

#[test]
fn large_reads_ahead_3_requests_2_columns() {
    let scope = Scope { ahead: true, ..any_table(3, 2) };
    check("reads ahead, 3 requests, 2 columns", &scope, &full(), 147_831_601);
}

#[test]
fn large_reads_ahead_idle_and_settled_2_requests_3_columns() {
    let scope = Scope { ahead: true, idle_and_settled: true, ..any_table(2, 3) };
    check("reads ahead, idle and settled, 2 requests, 3 columns", &scope, &full(), 149_031_453);
}

#[test]
fn reads_ahead_with_windows_and_chunks_idle_and_settled() {
    let scope = Scope { ahead: true, idle_and_settled: true, ..any_table(2, 2) };
    check("reads ahead, idle and settled, 2 requests, 2 columns", &scope, &full(), 975_895);
    for size in 1..=6 {
        let window = Group { sliding_window: Some(size), ..full() };
        check(&format!("reads ahead, window {size}, 2 requests, 2 columns"), &scope, &window, 975_895);
        let chunk = Group { attention_chunk_size: Some(size), ..full() };
        check(&format!("reads ahead, chunk {size}, 2 requests, 2 columns"), &scope, &chunk, 975_895);
    }
}

/// A window and the prompt, which may end in the window or leave a gap below it.
#[test]
fn prompts_in_view() {
    for size in 1..=4 {
        let group = Group { sliding_window: Some(size), prompt_in_view: true, ..full() };
        let scope = Scope { prompt: true, ..any_table(2, 3) };
        check(&format!("window {size} and prompt, 2 requests, 3 columns"), &scope, &group, 8_711_001);
        let scope = Scope { prompt: true, ahead: true, idle_and_settled: true, ..any_table(2, 2) };
        check(
            &format!("window {size} and prompt, idle, settled, ahead, 2 requests, 2 columns"),
            &scope,
            &group,
            5_270_619,
        );
    }
}

#[test]
fn windows_chunks_and_nulls() {
    for size in 1..=4 {
        let window = Group { sliding_window: Some(size), ..full() };
        check(&format!("window {size}, 3 requests, 2 columns"), &any_table(3, 2), &window, 3_736_329);
        let chunk = Group { attention_chunk_size: Some(size), ..full() };
        check(&format!("chunk {size}, 3 requests, 2 columns"), &any_table(3, 2), &chunk, 3_736_329);
    }
    // Tables up to renaming, with each id in turn as the null block: all tables with a null block up to renaming.
    for null in 0..4 {
        let group = Group { null_block: Some(null), ..full() };
        check(&format!("null block {null}, 3 requests, 2 columns"), &any_table(3, 2), &group, 3_736_329);
    }
}

/// The bits above and the slow oracle say the same, on steps with idle requests and settled tokens, under every rule.
#[test]
fn both_oracles_agree() {
    let groups = [
        full(),
        Group { sliding_window: Some(3), ..full() },
        Group { sliding_window: Some(2), prompt_in_view: true, ..full() },
        Group { attention_chunk_size: Some(3), ..full() },
        Group { null_block: Some(1), ..full() },
    ];
    for group in groups {
        Scope { idle_and_settled: true, ahead: true, prompt: true, ..any_table(2, 2) }.visit(&mut |small| {
            let rows = small.rows.map(|row| row.map(i64::from).to_vec());
            let step = Step {
                groups: vec![group.clone()],
                requests: small.requests[..small.num_reqs].to_vec(),
                rows: vec![rows[..small.num_reqs].to_vec()],
            };
            let oracle = Oracle::new(&step).unwrap();
            let executed = execute(&group, small);
            let num_tokens = u32::try_from(executed.num_tokens).unwrap();
            assert_eq!(step.num_tokens(), num_tokens);
            for first in 0..=num_tokens {
                assert_eq!(executed.two >> first & 1 == 1, oracle.violates(&[first]));
                for second in first..=num_tokens {
                    let violates = executed.three[first as usize] >> second & 1 == 1;
                    assert_eq!(violates, oracle.violates(&[first, second]));
                }
            }
        });
    }
}

/// Rules for the unsafe cuts, by pairs of positions; all but one are wrong.
#[derive(Clone, Copy)]
enum Rule {
    Right,
    /// A read of a block is a read of all its slots.
    WholeBlocks,
    /// The cut at the last write is left out.
    EndExcluded,
    /// The cut in front of the reader is taken in.
    StartIncluded,
    /// A step with a shared block that is written has no safe cut inside it.
    AnyOrder,
    /// Only blocks in the same column count.
    SameColumn,
    /// A request is in its own way.
    OwnWrites,
}

fn apply(rule: Rule, step: &Small) -> u64 {
    let requests = &step.requests[..step.num_reqs];
    let offset = |request: usize| requests[..request].iter().map(|other| other.scheduled).sum::<u32>();
    let num_tokens = offset(step.num_reqs) as usize;
    let mut cuts = 0;
    for (reader, read) in (0..step.num_reqs).flat_map(|r| (0..requests[r].computed).map(move |p| (r, p))) {
        for (writer, counts) in requests.iter().enumerate() {
            for write in counts.computed..counts.computed + counts.scheduled {
                let columns = [read / SLOTS, write / SLOTS];
                let blocks = [(reader, columns[0]), (writer, columns[1])].map(|(r, c)| step.rows[r][c as usize]);
                let counts_for_rule = blocks[0] == blocks[1]
                    && (matches!(rule, Rule::WholeBlocks) || read % SLOTS == write % SLOTS)
                    && (!matches!(rule, Rule::SameColumn) || columns[0] == columns[1])
                    && (matches!(rule, Rule::OwnWrites) || reader != writer);
                if !counts_for_rule {
                    continue;
                }
                let first = offset(reader) as usize + usize::from(!matches!(rule, Rule::StartIncluded));
                let end = (offset(writer) + write - counts.computed + 1) as usize;
                let end = end - usize::from(matches!(rule, Rule::EndExcluded));
                if matches!(rule, Rule::AnyOrder) && num_tokens > 1 {
                    cuts |= from_to(1, num_tokens - 1);
                } else if first < end {
                    cuts |= from_to(first, end - 1);
                }
            }
        }
    }
    cuts
}

/// The comparison finds wrong rules, and finds nothing wrong with the right one.
#[test]
fn wrong_rules_differ() {
    let scope = any_table(2, 2);
    let differences = |rule| compare(&scope, &full(), |step, _| apply(rule, step)).differences;
    assert_eq!(differences(Rule::Right), 0);
    for wrong in
        [Rule::WholeBlocks, Rule::EndExcluded, Rule::StartIncluded, Rule::AnyOrder, Rule::SameColumn, Rule::OwnWrites]
    {
        assert!(differences(wrong) > 0);
    }
}
