//! Random steps: several groups, windows, chunks, null blocks, settled tokens, tables of either type and any strides.

use ndarray::{Array2, ArrayView2, s};
use proptest::collection::vec;
use proptest::prelude::*;
use ubatch_guard::bitset::BlockSet;
use ubatch_guard::error::Error;
use ubatch_guard::hazard::{Checker, Cuts, UnsafeCuts};
use ubatch_guard::order::Planner;
use ubatch_guard::step::{Batch, Group, Table, rows_reach};

use crate::oracle::{Oracle, Request, Step};

/// How large a random step is.
#[derive(Clone, Copy)]
pub struct Size {
    pub groups: usize,
    pub blocks: u32,
    pub requests: usize,
    pub computed: u32,
    pub scheduled: u32,
    /// One id in so many is drawn at random, outside the pool or not. 0: none is.
    pub garbage: u32,
}

pub const SMALL: Size = Size { groups: 3, blocks: 12, requests: 6, computed: 20, scheduled: 8, garbage: 0 };
/// Rows of more columns than are compared in one go, which share little.
pub const LONG: Size = Size { groups: 1, blocks: 3000, requests: 4, computed: 900, scheduled: 6, garbage: 0 };

pub fn group(blocks: u32) -> impl Strategy<Value = Group> {
    let locality = prop_oneof![
        3 => Just((None, None, false)),
        2 => (1..=12_u32, any::<bool>()).prop_map(|(window, prompt)| (Some(window), None, prompt)),
        1 => (1..=12_u32).prop_map(|chunk| (None, Some(chunk), false)),
    ];
    let null = prop_oneof![
        2 => Just(None),
        2 => Just(Some(0)),
        1 => Just(Some(-1)),
        1 => (0..i64::from(blocks)).prop_map(Some),
        1 => Just(Some(i64::from(i32::MAX))),
    ];
    let sizes = prop_oneof![Just(1_u32), Just(2), Just(3), Just(4), Just(16)];
    (sizes, 1..=blocks, locality, null).prop_map(|(tokens_per_column, num_blocks, locality, null_block)| Group {
        tokens_per_column,
        num_blocks,
        sliding_window: locality.0,
        attention_chunk_size: locality.1,
        prompt_in_view: locality.2,
        null_block,
    })
}

fn request(size: Size) -> impl Strategy<Value = Request> {
    let scheduled = prop_oneof![1 => Just(0), 3 => Just(1), 8 => 0..=size.scheduled];
    let settled = prop_oneof![2 => Just(0), 1 => 0..=size.computed + 4];
    let ahead = prop_oneof![3 => Just(0), 1 => 0..=size.scheduled];
    let prompt = 0..=size.computed;
    (0..=size.computed, scheduled, settled, ahead, prompt).prop_map(|(computed, scheduled, settled, ahead, prompt)| {
        Request { computed, scheduled, settled, ahead, prompt }
    })
}

fn id(group: &Group, size: Size) -> impl Strategy<Value = i64> + use<> {
    let pool = 0..i64::from(group.num_blocks);
    let null = group.null_block.unwrap_or(0);
    let bad = prop_oneof![
        -3..3_i64,
        i64::from(group.num_blocks) - 1..=i64::from(group.num_blocks) + 1,
        Just(i64::from(i32::MIN)),
        Just(i64::from(i32::MAX)),
        Just(i64::MIN),
        Just(i64::MAX),
        Just(1 << 32),
        any::<i64>(),
    ];
    let garbage = if size.garbage == 0 { 0.0 } else { 1.0 / f64::from(size.garbage) };
    (pool, prop::bool::weighted(0.1), bad, prop::bool::weighted(garbage)).prop_map(
        move |(block, is_null, bad, is_bad)| match (is_bad, is_null && null_fits(null)) {
            (true, _) => bad,
            (false, true) => null,
            (false, false) => block,
        },
    )
}

/// A null block of 0 stands for "none" above where the pool has a block 0 anyway.
fn null_fits(null: i64) -> bool {
    i32::try_from(null).is_ok()
}

/// Columns that a request's tokens need.
pub fn columns_needed(group: &Group, request: &Request) -> usize {
    let tokens = if request.scheduled == 0 { 0 } else { request.computed + request.scheduled };
    tokens.div_ceil(group.tokens_per_column) as usize
}

fn rows(group: &Group, requests: &[Request], size: Size) -> impl Strategy<Value = Vec<Vec<i64>>> + use<> {
    let needed: Vec<_> = requests.iter().map(|request| columns_needed(group, request)).collect();
    let own: Vec<_> = needed.iter().map(|&columns| vec(id(group, size), columns)).collect();
    // Some rows begin as another row does, as rows over a prefix cache do.
    let copies =
        vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), prop::bool::weighted(0.6)), needed.len());
    (own, copies).prop_map(|(mut rows, copies)| {
        for (row, (source, columns, copied)) in copies.into_iter().enumerate().skip(1) {
            if copied {
                let source = rows[source.index(row)].clone();
                let most = source.len().min(rows[row].len());
                let columns = columns.index(most + 1);
                rows[row][..columns].copy_from_slice(&source[..columns]);
            }
        }
        rows
    })
}

pub fn step(size: Size) -> impl Strategy<Value = Step> {
    let plan = (vec(group(size.blocks), 1..=size.groups), vec(request(size), 0..=size.requests));
    plan.prop_flat_map(move |(groups, requests)| {
        let tables: Vec<_> = groups.iter().map(|group| rows(group, &requests, size)).collect();
        (Just(groups), Just(requests), tables).prop_map(|(groups, requests, rows)| Step { groups, requests, rows })
    })
}

/// How a table lies in memory.
#[derive(Debug, Clone, Copy)]
enum Layout {
    Plain,
    /// Columns side by side.
    Transposed,
    /// Every second row and third column of a larger array.
    Stepped,
    /// From the last row and column to the first.
    Reversed,
    /// More rows and columns than the step needs.
    Padded,
}

#[derive(Debug, Clone, Copy)]
struct Form {
    layout: Layout,
    wide: bool,
}

fn form() -> impl Strategy<Value = Form> {
    use Layout::{Padded, Plain, Reversed, Stepped, Transposed};
    let layout = prop::sample::select(vec![Plain, Transposed, Stepped, Reversed, Padded]);
    (layout, any::<bool>()).prop_map(|(layout, wide)| Form { layout, wide })
}

/// An array with the rows of one group.
#[derive(Debug)]
enum Stored {
    I32(Array2<i32>),
    I64(Array2<i64>),
}

fn lay_out<T: Copy>(rows: &[Vec<i64>], layout: Layout, junk: T, convert: impl Fn(i64) -> T) -> Array2<T> {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    // Behind the end of a row lies what nobody may look at.
    let cell =
        |row: usize, column: usize| rows.get(row).and_then(|row| row.get(column)).map_or(junk, |&id| convert(id));
    match layout {
        Layout::Plain => Array2::from_shape_fn((rows.len(), columns), |(r, c)| cell(r, c)),
        Layout::Transposed => Array2::from_shape_fn((columns, rows.len()), |(c, r)| cell(r, c)),
        Layout::Stepped => Array2::from_shape_fn((rows.len() * 2, columns * 3), |(r, c)| {
            if r % 2 == 0 && c % 3 == 0 { cell(r / 2, c / 3) } else { junk }
        }),
        Layout::Reversed => {
            Array2::from_shape_fn((rows.len(), columns), |(r, c)| cell(rows.len() - 1 - r, columns - 1 - c))
        }
        Layout::Padded => Array2::from_shape_fn((rows.len() + 2, columns + 5), |(r, c)| cell(r, c)),
    }
}

fn seen<T>(stored: &Array2<T>, layout: Layout) -> ArrayView2<'_, T> {
    match layout {
        Layout::Plain | Layout::Padded => stored.view(),
        Layout::Transposed => stored.t(),
        Layout::Stepped => stored.slice(s![..;2, ..;3]),
        Layout::Reversed => stored.slice(s![..;-1, ..;-1]),
    }
}

impl Stored {
    fn new(rows: &[Vec<i64>], form: Form) -> Self {
        if form.wide {
            Stored::I64(lay_out(rows, form.layout, i64::MIN, |id| id))
        } else {
            let narrow = |id: i64| i32::try_from(id).unwrap_or(if id < 0 { i32::MIN } else { i32::MAX });
            Stored::I32(lay_out(rows, form.layout, i32::MIN, narrow))
        }
    }

    fn table(&self, form: Form) -> Table<'_> {
        match self {
            Stored::I32(stored) => Table::I32(seen(stored, form.layout)),
            Stored::I64(stored) => Table::I64(seen(stored, form.layout)),
        }
    }
}

/// A step's arrays.
#[derive(Debug)]
pub struct Arrays {
    stored: Vec<(Stored, Form)>,
}

impl Arrays {
    fn new(step: &Step, forms: &[Form]) -> Self {
        let forms = forms.iter().copied().cycle();
        Self { stored: step.rows.iter().zip(forms).map(|(rows, form)| (Stored::new(rows, form), form)).collect() }
    }

    /// As an engine has them.
    pub fn plain(step: &Step) -> Self {
        Self::new(step, &[Form { layout: Layout::Plain, wide: false }])
    }

    pub fn tables(&self) -> Vec<Table<'_>> {
        self.stored.iter().map(|(stored, form)| stored.table(*form)).collect()
    }
}

pub fn batch(requests: &[Request]) -> Batch {
    let mut batch = Batch::default();
    let computed = requests.iter().map(|request| i64::from(request.computed));
    batch.fill(computed, requests.iter().map(|request| i64::from(request.scheduled))).unwrap();
    batch.settle(requests.iter().map(|request| i64::from(request.settled))).unwrap();
    batch.prompts(requests.iter().map(|request| i64::from(request.prompt))).unwrap();
    batch.read_on(requests.iter().map(|request| i64::from(request.computed + request.ahead))).unwrap();
    batch
}

/// Requests in front that are settled as far as they read: the caller vouches for them, and nobody looks at
/// their rows to find unsafe cuts.
fn vouched_for(requests: &[(i64, i64)]) -> usize {
    requests.iter().take_while(|(read, settled)| *settled > 0 && settled >= read).count()
}

/// Block 0 in place of ids outside the pool, in the rows before `end`.
fn mend(step: &mut Step, end: usize) {
    for (group, rows) in step.groups.iter().zip(&mut step.rows) {
        let fits = |id: i64| (0..i64::from(group.num_blocks)).contains(&id) || group.null_block == Some(id);
        for id in rows[..end].iter_mut().flatten() {
            *id = if fits(*id) { *id } else { 0 };
        }
    }
}

fn cuts() -> impl Strategy<Value = Cuts> {
    let any_range = (0..60_u32, 0..60_u32).prop_map(|(first, last)| Cuts { first, last });
    prop_oneof![
        1 => Just(Cuts::ALL),
        1 => Just(Cuts { first: u32::MAX, last: u32::MAX }),
        1 => (0..60_u32).prop_map(|cut| Cuts { first: cut, last: cut }),
        // Also from a cut to one before it: no cut at all.
        3 => any_range,
    ]
}

/// The ranges are maximal and name real culprits; the cuts in them.
fn validated(step: &Step, oracle: &Oracle, cuts: Cuts, found: &[UnsafeCuts]) -> Vec<u32> {
    let mut offset_of = vec![0];
    for request in &step.requests {
        offset_of.push(offset_of.last().unwrap() + request.scheduled);
    }
    for pair in found.windows(2) {
        assert!(pair[0].last + 1 < pair[1].first, "{pair:?} touch or are not ascending");
    }
    for range in found {
        let hazard = range.hazard;
        assert!(cuts.first <= range.first && range.first <= range.last && range.last <= cuts.last);
        assert_eq!(range.first, cuts.first.max(offset_of[hazard.reader] + 1), "the first cut is not the culprit's");
        assert!(range.first <= hazard.last_write);
        assert_ne!(hazard.reader, hazard.writer);
        let token = &oracle.tokens[hazard.last_write as usize];
        assert_eq!(token.request, hazard.writer);
        let reads: Vec<_> = oracle.reads_of(hazard.reader).collect();
        let shared = token.writes.iter().filter(|slot| reads.contains(slot));
        assert!(
            shared.into_iter().any(|&slot| oracle.block_of(slot) == (hazard.group, hazard.block)),
            "{hazard:?} is made up"
        );
        assert_eq!(oracle.last_write_for(hazard.reader), Some(hazard.last_write as usize));
    }
    found.iter().flat_map(|range| range.first..=range.last).collect()
}

/// Everything the checker says about a step, against execution.
fn check(step: &Step, forms: &[Form], cuts: Cuts) {
    let oracle = Oracle::new(step).unwrap();
    let unsafe_cuts = oracle.unsafe_cuts();
    let arrays = Arrays::new(step, forms);
    let tables = arrays.tables();
    let batch = batch(&step.requests);
    rows_reach(&step.groups, &tables, &batch).unwrap();
    let mut checker = Checker::new(step.groups.clone()).unwrap();
    let mut found = Vec::new();
    // Twice, for what the first call leaves behind.
    for asked in [Cuts::ALL, cuts, cuts] {
        let expected: Vec<_> =
            unsafe_cuts.iter().copied().filter(|cut| (asked.first..=asked.last).contains(cut)).collect();
        checker.unsafe_cuts(&tables[..], &batch, asked, &mut found).unwrap();
        assert_eq!(validated(step, &oracle, asked, &found), expected);
        assert_eq!(checker.is_safe(&tables[..], &batch, asked).unwrap(), expected.is_empty());
    }
    let mut dependencies = Vec::new();
    checker.dependencies(&tables[..], &batch, |reader, writer| dependencies.push((reader, writer))).unwrap();
    dependencies.sort_unstable();
    dependencies.dedup();
    assert_eq!(dependencies, oracle.dependencies(step.requests.len()));

    let mut planner = Planner::default();
    for &(reader, writer) in &dependencies {
        planner.depend(reader, writer);
    }
    let order = planner.order(step.requests.len(), None, None).unwrap();
    if unsafe_cuts.is_empty() {
        assert_eq!(order.as_ref().map(|order| &order.swaps[..]), Some(&[][..]));
    }
    if let Some(order) = order {
        assert!(Oracle::new(&step.permuted(&order.permutation)).unwrap().unsafe_cuts().is_empty());
    }
}

fn config(cases: u32) -> ProptestConfig {
    // A failing step is printed whole; a file beside the sources would add nothing.
    ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases) }
}

proptest! {
    #![proptest_config(config(6000))]

    #[test]
    fn steps(step in step(SMALL), forms in vec(form(), 1..=3), cuts in cuts()) {
        check(&step, &forms, cuts);
    }

    /// A split is unsafe exactly when one of its cuts is.
    #[test]
    fn several_microbatches(step in step(SMALL), splits in vec(vec(0..50_u32, 2..=5), 4)) {
        let oracle = Oracle::new(&step).unwrap();
        let arrays = Arrays::plain(&step);
        let mut checker = Checker::new(step.groups.clone()).unwrap();
        let mut found = Vec::new();
        checker.unsafe_cuts(&arrays.tables()[..], &batch(&step.requests), Cuts::ALL, &mut found).unwrap();
        for mut split in splits {
            split.sort_unstable();
            let hit = split.iter().any(|cut| found.iter().any(|range| (range.first..=range.last).contains(cut)));
            prop_assert_eq!(oracle.violates(&split), hit);
        }
    }

    /// Ids from anywhere: an error exactly where a bad id is read or written, and never a panic.
    #[test]
    fn garbage_ids(step in step(Size { garbage: 30, ..SMALL }), wide in any::<bool>(), forms in vec(form(), 1..=3), cuts in cuts()) {
        let forms: Vec<_> = forms.into_iter().map(|form| Form { wide, ..form }).collect();
        let mut step = step;
        if !wide {
            // What the narrow arrays really hold.
            for id in step.rows.as_mut_slice().iter_mut().flatten().flatten() {
                *id = (*id).clamp(i64::from(i32::MIN), i64::from(i32::MAX));
            }
        }
        let arrays = Arrays::new(&step, &forms);
        let tables = arrays.tables();
        let batch = batch(&step.requests);
        let mut checker = Checker::new(step.groups.clone()).unwrap();
        let mut found = Vec::new();
        let answer = checker.unsafe_cuts(&tables[..], &batch, cuts, &mut found);
        let safe = checker.is_safe(&tables[..], &batch, cuts);
        let dependencies = checker.dependencies(&tables[..], &batch, |_, _| ());
        let all: Vec<_> = step.requests.iter().map(|r| (i64::from(r.read()), i64::from(r.settled))).collect();
        let mut looked_at = step.clone();
        mend(&mut looked_at, vouched_for(&all));
        for (bad, answer) in [(Oracle::new(&looked_at).is_err(), answer), (Oracle::new(&step).is_err(), dependencies)] {
            if !bad {
                prop_assert_eq!(answer, Ok(()));
                continue;
            }
            let Err(Error::BlockId { group, request, column, block, num_blocks }) = answer else {
                panic!("{answer:?}");
            };
            prop_assert_eq!(step.rows[group][request][column], block);
            prop_assert_eq!(step.groups[group].num_blocks, num_blocks);
            prop_assert!(!(0..i64::from(num_blocks)).contains(&block));
        }
        prop_assert!(safe != Ok(true) || Oracle::new(&looked_at).is_ok());
        // The checker is as good as new.
        let num_reqs = step.requests.len();
        mend(&mut step, num_reqs);
        let arrays = Arrays::new(&step, &forms);
        checker.unsafe_cuts(&arrays.tables()[..], &batch, Cuts::ALL, &mut found).unwrap();
        let oracle = Oracle::new(&step).unwrap();
        prop_assert_eq!(validated(&step, &oracle, Cuts::ALL, &found), oracle.unsafe_cuts());
    }

    /// Counts from anywhere: refused, or small enough for every sum.
    #[test]
    fn garbage_counts(counts in vec((count(), count(), count()), 0..5), missing in 0..4_usize) {
        let computed: Vec<_> = counts.iter().map(|counts| counts.0).collect();
        let scheduled: Vec<_> = counts.iter().map(|counts| counts.1).collect();
        let settled: Vec<_> = counts.iter().map(|counts| counts.2).collect();
        let computed = &computed[..computed.len() - usize::from(missing == 1 && !counts.is_empty())];
        let settled = &settled[..settled.len() - usize::from(missing == 2 && !counts.is_empty())];
        let limit = i64::from(i32::MAX);
        let fits = |values: &[i64]| values.iter().all(|value| (0..=limit).contains(value));
        let sums_fit = || {
            computed.iter().zip(&scheduled).all(|(computed, scheduled)| computed + scheduled <= limit)
                && scheduled.iter().sum::<i64>() <= limit
        };
        let expected = computed.len() == scheduled.len() && fits(computed) && fits(&scheduled) && sums_fit();
        let mut batch = Batch::default();
        let filled = batch.fill(computed.iter().copied(), scheduled.iter().copied());
        prop_assert_eq!(filled.is_ok(), expected, "{:?}", filled);
        if filled.is_ok() {
            prop_assert_eq!(i64::from(batch.num_tokens()), scheduled.iter().sum::<i64>());
            let settles = batch.settle(settled.iter().copied());
            prop_assert_eq!(settles.is_ok(), settled.len() == scheduled.len() && fits(settled));
            let mut reading = Batch::default();
            reading.fill(computed.iter().copied(), scheduled.iter().copied()).unwrap();
            let enough = settled.len() == scheduled.len() && computed.iter().zip(settled).all(|(c, r)| c <= r);
            prop_assert_eq!(reading.prompts(settled.iter().copied()).is_ok(), settles.is_ok());
            prop_assert_eq!(reading.read_on(settled.iter().copied()).is_ok(), enough && fits(settled));
        }
        // Whatever is in the batch now, rows that end too early are found, not read.
        let group = Group { tokens_per_column: 16, num_blocks: 4, sliding_window: Some(5), prompt_in_view: false, attention_chunk_size: None, null_block: None };
        let table = Array2::<i64>::zeros((batch.requests().len(), 3));
        let tables = [Table::I64(table.view())];
        let mut checker = Checker::new(vec![group.clone()]).unwrap();
        let reaches = rows_reach(std::slice::from_ref(&group), &tables, &batch);
        let answer = checker.unsafe_cuts(&tables[..], &batch, Cuts::ALL, &mut Vec::new());
        let needs_more = |first: usize| batch.requests()[first..].iter().any(|request| {
            request.scheduled > 0 && i64::from(request.computed) + i64::from(request.scheduled) > 48
        });
        prop_assert_eq!(reaches.is_err(), needs_more(0));
        let all: Vec<_> = batch.requests().iter().map(|r| (i64::from(r.computed), i64::from(r.settled))).collect();
        prop_assert_eq!(answer.is_err(), needs_more(vouched_for(&all)));
    }

    /// A row or a table that is missing, or a row too short by one column.
    #[test]
    fn short_rows(step in step(SMALL), victim in any::<prop::sample::Index>(), forms in vec(form(), 1..=3)) {
        let victim = victim.index(step.groups.len());
        let mut step = step;
        for request in &mut step.requests {
            request.settled = 0;
        }
        let batch = batch(&step.requests);
        let needed = step.requests.iter().map(|request| columns_needed(&step.groups[victim], request)).max().unwrap_or(0);
        if needed == 0 {
            return Ok(());
        }
        let mut short = step.clone();
        short.rows[victim].iter_mut().for_each(|row| row.truncate(needed - 1));
        let forms: Vec<_> = forms.iter().map(|form| match form.layout {
            Layout::Padded => Form { layout: Layout::Plain, ..*form },
            _ => *form,
        }).collect();
        let arrays = Arrays::new(&short, &forms);
        let tables = arrays.tables();
        let reach = rows_reach(&step.groups, &tables, &batch);
        let is_reported = matches!(reach, Err(Error::RowTooShort { group, needed: n, found, .. })
            if group == victim && n == needed && found == needed - 1);
        prop_assert!(is_reported, "{:?}", reach);
        let mut checker = Checker::new(step.groups.clone()).unwrap();
        let answer = checker.unsafe_cuts(&tables[..], &batch, Cuts::ALL, &mut Vec::new());
        prop_assert!(matches!(answer, Err(Error::RowTooShort { .. })), "{:?}", answer);

        let mut fewer = step.clone();
        fewer.rows[victim].pop();
        let arrays = Arrays::new(&fewer, &forms);
        let reach = rows_reach(&step.groups, &arrays.tables(), &batch);
        prop_assert!(matches!(reach, Err(Error::Length { .. })), "{:?}", reach);
        let reach = rows_reach(&step.groups, &arrays.tables()[1..], &batch);
        prop_assert!(matches!(reach, Err(Error::Length { .. })), "{:?}", reach);
    }

    /// The search in a row against a look at each id.
    #[test]
    fn search_in_rows(
        // In half of the rows no id is outside the pool, which would be found first.
        num_blocks in prop_oneof![1..400_u32, Just(400)],
        members in vec(0..400_u32, 0..6),
        mut ids in vec(0..400_i64, 0..300),
        bad in vec((any::<prop::sample::Index>(), any::<i64>()), 0..2),
        from in 0..310_usize,
    ) {
        let mut set = BlockSet::new(num_blocks).unwrap();
        for &member in members.iter().filter(|&&member| member < num_blocks) {
            set.insert(member);
        }
        for (place, id) in bad {
            if let Some(last) = ids.len().checked_sub(1) {
                ids[place.index(last + 1)] = id;
            }
        }
        let is_hit = |id: i64| match u32::try_from(id) {
            Ok(block) if block < num_blocks => members.contains(&block),
            _ => true,
        };
        let expected = (from..ids.len()).find(|&place| is_hit(ids[place]));
        prop_assert_eq!(set.find(&ids, from), expected);
        if let Ok(narrow) = ids.iter().map(|&id| i32::try_from(id)).collect::<Result<Vec<_>, _>>() {
            prop_assert_eq!(set.find(&narrow, from), expected);
        }
    }

    #[test]
    fn groups_that_cannot_be(
        tokens_per_column in 0..3_u32,
        num_blocks in prop_oneof![Just(0), Just(1), Just(1 << 31), Just(u32::MAX)],
        sliding_window in proptest::option::of(0..2_u32),
        attention_chunk_size in proptest::option::of(0..2_u32),
        prompt_in_view in any::<bool>(),
        null_block in proptest::option::of(prop_oneof![Just(0), Just(1_i64 << 31), Just(-1 - (1_i64 << 31)), Just(-1)]),
    ) {
        let group = Group { tokens_per_column, num_blocks, sliding_window, prompt_in_view, attention_chunk_size, null_block };
        let can_be = tokens_per_column > 0
            && num_blocks == 1
            && sliding_window != Some(0)
            && attention_chunk_size != Some(0)
            && !(sliding_window.is_some() && attention_chunk_size.is_some())
            && (sliding_window.is_some() || !prompt_in_view)
            && null_block.is_none_or(|null| i32::try_from(null).is_ok());
        let made = Checker::new(vec![group]);
        prop_assert_eq!(made.is_ok(), can_be);
        if let Err(error) = made {
            let is_named = matches!(error, Error::Group { group: 0, .. });
            prop_assert!(is_named);
        }
    }
}

proptest! {
    #![proptest_config(config(400))]

    #[test]
    fn long_rows(step in step(LONG), forms in vec(form(), 1..=1), cuts in cuts()) {
        check(&step, &forms, cuts);
    }
}

fn count() -> impl Strategy<Value = i64> {
    prop_oneof![
        8 => 0..100_i64,
        1 => -2..2_i64,
        1 => Just(i64::from(i32::MAX)),
        1 => Just(i64::from(i32::MAX) + 1),
        1 => Just(i64::from(i32::MAX) / 2),
        1 => Just(i64::MAX),
        1 => Just(i64::MIN),
        1 => any::<i64>(),
    ]
}
