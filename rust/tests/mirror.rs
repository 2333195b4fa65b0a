//! The mirror against a checker without memory, over tables made anew from a model for each step.

use std::collections::BTreeMap;

use ndarray::Array2;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use ubatch_guard::error::Error;
use ubatch_guard::hazard::{Checker, Cuts};
use ubatch_guard::mirror::{Mirror, NO_ROW};
use ubatch_guard::order::Planner;
use ubatch_guard::step::{Group, Table};

use crate::oracle::{Request, Step};
use crate::properties::{Arrays, batch, group};

/// Where a new block id comes from.
#[derive(Debug, Clone)]
enum Id {
    /// A block that no row holds, as long as there is one.
    Fresh(Index),
    /// The block at a place in some row.
    Held(Index, Index),
    Any(Index),
    Null,
}

#[derive(Debug, Clone)]
enum Change {
    /// A new request; where there are too many, one of those grows instead.
    Add(Index),
    Append(Index),
    Replace(Index),
    Free(Index),
}

/// A change, with ids for each group it may need, and the step to ask about after it.
#[derive(Debug, Clone)]
struct Turn {
    change: Change,
    /// Begin a new row as another does: whose, and how far.
    prefix: Option<(Index, Index)>,
    ids: Vec<Vec<Id>>,
    /// Order of the batch, who is left out, and how each request's row is used.
    batch: Vec<(u32, bool, Index, Index, Index)>,
    /// Requests of the batch that have no row here: where they stand, computed and scheduled tokens.
    strangers: Vec<(Index, u32, u32)>,
    cuts: (u32, u32),
}

fn ids(most: usize) -> impl Strategy<Value = Vec<Id>> {
    let id = prop_oneof![
        12 => any::<Index>().prop_map(Id::Fresh),
        2 => (any::<Index>(), any::<Index>()).prop_map(|(row, place)| Id::Held(row, place)),
        1 => any::<Index>().prop_map(Id::Any),
        1 => Just(Id::Null),
    ];
    vec(id, 0..=most)
}

fn turn() -> impl Strategy<Value = Turn> {
    let change = prop_oneof![
        3 => any::<Index>().prop_map(Change::Add),
        6 => any::<Index>().prop_map(Change::Append),
        1 => any::<Index>().prop_map(Change::Replace),
        2 => any::<Index>().prop_map(Change::Free),
    ];
    let member = (any::<u32>(), prop::bool::weighted(0.2), any::<Index>(), any::<Index>(), any::<Index>());
    (
        change,
        proptest::option::weighted(0.6, (any::<Index>(), any::<Index>())),
        vec(ids(4), 2),
        vec(member, 8),
        vec((any::<Index>(), 0..20_u32, 0..6_u32), 0..3),
        (0..40_u32, 0..40_u32),
    )
        .prop_map(|(change, prefix, ids, batch, strangers, cuts)| Turn {
            change,
            prefix,
            ids,
            batch,
            strangers,
            cuts,
        })
}

/// The mirror, and what it should hold.
struct Model {
    groups: Vec<Group>,
    mirror: Mirror,
    /// By slot, the rows by group.
    rows: BTreeMap<usize, Vec<Vec<i64>>>,
}

/// Requests that are live at once at most.
const MOST: usize = 8;

impl Model {
    fn new(groups: Vec<Group>) -> Self {
        Self { mirror: Mirror::new(groups.clone()).unwrap(), groups, rows: BTreeMap::new() }
    }

    fn slot(&self, index: Index) -> Option<usize> {
        if self.rows.is_empty() { None } else { Some(*self.rows.keys().nth(index.index(self.rows.len())).unwrap()) }
    }

    fn new_ids(&self, group: usize, ids: &[Id]) -> Vec<i64> {
        let rules = &self.groups[group];
        let pool = rules.num_blocks as usize;
        let null = rules.null_block;
        let block = |index: usize| i64::try_from(index).unwrap();
        let held: Vec<_> = self.rows.values().filter(|rows| !rows[group].is_empty()).collect();
        let mut new = Vec::new();
        for id in ids {
            new.push(match id {
                Id::Fresh(index) => {
                    let used = |id: &i64| new.contains(id) || held.iter().any(|rows| rows[group].contains(id));
                    let free: Vec<_> = (0..pool).map(block).filter(|id| !used(id) && null != Some(*id)).collect();
                    if free.is_empty() { block(index.index(pool)) } else { free[index.index(free.len())] }
                }
                Id::Held(row, place) if !held.is_empty() => {
                    let row = &held[row.index(held.len())][group];
                    row[place.index(row.len())]
                }
                Id::Held(index, _) | Id::Any(index) => block(index.index(pool)),
                Id::Null => null.unwrap_or(0),
            });
        }
        new
    }

    fn stage(&mut self, rows: &[Vec<i64>]) {
        for (group, ids) in rows.iter().enumerate() {
            self.mirror.stage(0, group, ids.iter().copied()).unwrap();
        }
    }

    fn change(&mut self, turn: &Turn) {
        let change = match &turn.change {
            Change::Add(index) if self.rows.len() == MOST => Change::Append(*index),
            change => change.clone(),
        };
        let slot = match &change {
            Change::Add(_) => None,
            Change::Append(index) | Change::Replace(index) | Change::Free(index) => self.slot(*index),
        };
        let mut new: Vec<_> = (0..self.groups.len()).map(|group| self.new_ids(group, &turn.ids[group])).collect();
        let is_new = matches!(change, Change::Add(_) | Change::Replace(_));
        if let Some((index, columns)) = &turn.prefix
            && is_new
            && let Some(source) = self.slot(*index)
        {
            for (new, source) in new.iter_mut().zip(&self.rows[&source]) {
                new.splice(..0, source[..columns.index(source.len() + 1)].iter().copied());
            }
        }
        match (change, slot) {
            (Change::Free(_), Some(slot)) => {
                self.mirror.free(slot);
                self.rows.remove(&slot);
            }
            (Change::Append(_), Some(slot)) => {
                self.stage(&new);
                self.mirror.append(slot).unwrap();
                for (row, new) in self.rows.get_mut(&slot).unwrap().iter_mut().zip(new) {
                    row.extend(new);
                }
            }
            (Change::Replace(_), Some(slot)) => {
                self.stage(&new);
                self.mirror.replace(slot).unwrap();
                self.rows.insert(slot, new);
            }
            _ => {
                self.stage(&new);
                let slot = self.mirror.add().unwrap();
                assert_eq!(self.rows.insert(slot, new), None, "a slot was given twice");
            }
        }
    }

    /// A step over some of the live requests.
    fn step(&self, turn: &Turn) -> (Vec<usize>, Step) {
        let mut members: Vec<_> = self.rows.iter().zip(&turn.batch).filter(|(_, member)| !member.1).collect();
        members.sort_by_key(|(_, member)| member.0);
        let slots: Vec<_> = members.iter().map(|((slot, _), _)| **slot).collect();
        let requests = members.iter().map(|((_, rows), (_, _, back, scheduled, settled))| {
            let reach = |(row, group): (&Vec<i64>, &Group)| row.len() * group.tokens_per_column as usize;
            let reach = rows.iter().zip(&self.groups).map(reach).min().unwrap();
            // Most steps write the latest blocks.
            let end = reach - back.index(reach.min(8) + 1);
            let scheduled = scheduled.index(end.min(9) + 1);
            let settled = if settled.index(3) == 0 { settled.index(end + 1) } else { 0 };
            let [computed, scheduled, settled] =
                [end - scheduled, scheduled, settled].map(|tokens| u32::try_from(tokens).unwrap());
            let ahead = if back.index(4) == 0 { scheduled / 2 } else { 0 };
            let prompt = computed / 2;
            Request { computed, scheduled, settled, ahead, prompt }
        });
        let rows =
            (0..self.groups.len()).map(|group| slots.iter().map(|slot| self.rows[slot][group].clone()).collect());
        (slots.clone(), Step { groups: self.groups.clone(), requests: requests.collect(), rows: rows.collect() })
    }

    /// The same step with the strangers in it, each with blocks of its own that the pool of the mirror does not have.
    fn with_strangers(numbers: &[i32], step: &Step, turn: &Turn) -> (Vec<i32>, Step) {
        let (mut numbers, mut step) = (numbers.to_vec(), step.clone());
        for &(place, computed, scheduled) in &turn.strangers {
            let place = place.index(numbers.len() + 1);
            numbers.insert(place, NO_ROW);
            step.requests.insert(place, Request { computed, scheduled, ..Request::default() });
            for (group, rows) in step.groups.iter_mut().zip(&mut step.rows) {
                let columns = (computed + scheduled).div_ceil(group.tokens_per_column);
                rows.insert(place, (group.num_blocks..group.num_blocks + columns).map(i64::from).collect());
                group.num_blocks += columns + 1;
            }
        }
        (numbers, step)
    }

    /// Compare every answer.
    fn compare(&mut self, turn: &Turn) {
        let (slots, step) = self.step(turn);
        let numbers: Vec<_> = slots.iter().map(|&slot| i32::try_from(slot).unwrap()).collect();
        let (all, with_strangers) = Self::with_strangers(&numbers, &step, turn);
        self.compare_questions(&numbers, &step, turn);
        self.compare_questions(&all, &with_strangers, turn);
        self.compare_rows(&slots, &numbers, &step, turn);
    }

    fn compare_questions(&mut self, numbers: &[i32], step: &Step, turn: &Turn) {
        let arrays = Arrays::plain(step);
        let tables = arrays.tables();
        let batch = || batch(&step.requests);
        let mut checker = Checker::new(step.groups.clone()).unwrap();
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for cuts in [Cuts::ALL, Cuts { first: turn.cuts.0, last: turn.cuts.1 }] {
            let safe = checker.is_safe(&tables[..], &batch(), cuts).unwrap();
            assert_eq!(self.mirror.is_safe(numbers, &mut batch(), cuts), Ok(safe));
            checker.unsafe_cuts(&tables[..], &batch(), cuts, &mut theirs).unwrap();
            self.mirror.unsafe_cuts(numbers, &mut batch(), cuts, &mut ours).unwrap();
            assert_eq!(ours, theirs);
        }
        let mut planner = Planner::default();
        checker.dependencies(&tables[..], &batch(), |reader, writer| planner.depend(reader, writer)).unwrap();
        let order = planner.order(numbers.len(), None, Some(&batch().short(2))).unwrap();
        let ordered = self.mirror.order(numbers, &mut batch(), None, Some(2), &mut planner).unwrap();
        assert_eq!(ordered, order);
    }

    fn compare_rows(&mut self, slots: &[usize], numbers: &[i32], step: &Step, turn: &Turn) {
        let arrays = Arrays::plain(step);
        let tables = arrays.tables();
        for (group, rows) in step.rows.iter().enumerate() {
            let lengths = || rows.iter().map(|row| i64::try_from(row.len()).unwrap());
            let difference = |mirror: &mut Mirror, lengths: Vec<i64>, table: &Table<'_>| {
                mirror.first_difference(numbers, group, table, lengths.into_iter()).unwrap()
            };
            assert_eq!(difference(&mut self.mirror, lengths().collect(), &tables[group]), None);
            for (request, &slot) in slots.iter().enumerate() {
                assert!(self.mirror.row(slot, group).iter().map(|&id| i64::from(id)).eq(rows[request].iter().copied()));
                let Some(last) = rows[request].len().checked_sub(1) else { continue };
                let column = turn.batch[request].2.index(last + 1);
                let mut shorter: Vec<_> = lengths().collect();
                shorter[request] = i64::try_from(column).unwrap();
                assert_eq!(difference(&mut self.mirror, shorter, &tables[group]), Some((request, column)));
                let columns = rows.iter().map(Vec::len).max().unwrap();
                let mut changed = Array2::from_shape_fn((rows.len(), columns), |(r, c)| *rows[r].get(c).unwrap_or(&-9));
                changed[(request, column)] ^= 1;
                let table = Table::I64(changed.view());
                assert_eq!(difference(&mut self.mirror, lengths().collect(), &table), Some((request, column)));
            }
        }
    }
}

fn groups() -> impl Strategy<Value = Vec<Group>> {
    vec(group(40), 1..=2)
}

fn run(groups: Vec<Group>, turns: &[Turn]) {
    let mut model = Model::new(groups);
    for turn in turns {
        model.change(turn);
        model.compare(turn);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(1000) })]

    #[test]
    fn changes(groups in groups(), turns in vec(turn(), 1..60)) {
        run(groups, &turns);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(20) })]

    #[test]
    fn many_changes(groups in groups(), turns in vec(turn(), 1000)) {
        run(groups, &turns);
    }
}

fn full(num_blocks: u32) -> Group {
    Group {
        tokens_per_column: 16,
        num_blocks,
        sliding_window: None,
        attention_chunk_size: None,
        prompt_in_view: false,
        null_block: Some(0),
    }
}

/// At most 16 bytes a block and 8 bytes an entry of a row, after the largest step there can be.
#[test]
fn memory() {
    const BLOCKS: u32 = 100_000;
    const REQUESTS: u32 = 100;
    let mut mirror = Mirror::new(vec![full(BLOCKS)]).unwrap();
    let mut planner = Planner::default();
    let columns = BLOCKS / REQUESTS;
    let mut slots = Vec::new();
    let mut entries = 0;
    for request in 0..REQUESTS {
        // A prefix for all, then blocks of its own; as many rows grow block by block as come whole.
        let ids: Vec<_> =
            (1..=10).chain((10..columns).map(|column| request * columns + column)).map(i64::from).collect();
        let first = if request % 2 == 0 { ids.len() } else { 10 };
        mirror.stage(0, 0, ids[..first].iter().copied()).unwrap();
        slots.push(mirror.add().unwrap());
        for &id in &ids[first..] {
            mirror.stage(0, 0, std::iter::once(id)).unwrap();
            mirror.append(slots[request as usize]).unwrap();
        }
        entries += ids.len();
    }
    let numbers: Vec<_> = slots.iter().map(|&slot| i32::try_from(slot).unwrap()).collect();
    // All read the prefix that the last one writes.
    let requests: Vec<_> = (0..REQUESTS)
        .map(|request| {
            let computed = if request + 1 == REQUESTS { 0 } else { 160 };
            Request { computed, scheduled: columns * 16 - computed, ..Request::default() }
        })
        .collect();
    let mut batch = batch(&requests);
    let mut found = Vec::new();
    mirror.unsafe_cuts(&numbers, &mut batch, Cuts::ALL, &mut found).unwrap();
    assert_eq!(found.len(), 1);
    assert!(mirror.order(&numbers, &mut batch, None, None, &mut planner).unwrap().is_some());
    let bound = 16 * BLOCKS as usize + 8 * entries + 128 * slots.len();
    println!("{} bytes; 16 a block, 8 an entry and 128 a row are {bound}", mirror.nbytes());
    assert!(mirror.nbytes() <= bound);
    let held = mirror.nbytes();
    for slot in slots {
        mirror.free(slot);
    }
    assert!(mirror.nbytes() + 4 * entries <= held, "freed rows are kept");
    assert!(mirror.nbytes() <= 16 * BLOCKS as usize + 128 * REQUESTS as usize);
}

/// One block in every column of two long rows: what would be asked about each pair of columns takes for ever.
#[test]
fn a_block_repeated_in_a_row() {
    const COLUMNS: u32 = 1 << 19;
    let group = Group { tokens_per_column: 1, null_block: None, ..full(2) };
    let mut mirror = Mirror::new(vec![group]).unwrap();
    let mut slots = Vec::new();
    for _ in 0..2 {
        mirror.stage(0, 0, (0..COLUMNS).map(|_| 1)).unwrap();
        slots.push(i32::try_from(mirror.add().unwrap()).unwrap());
    }
    let reader = Request { computed: COLUMNS - 1, scheduled: 1, ..Request::default() };
    let writer = Request { scheduled: COLUMNS, ..Request::default() };
    let mut found = Vec::new();
    let mut planner = Planner::default();
    for (requests, permutation) in [([reader, writer], [1, 0]), ([writer, reader], [0, 1])] {
        mirror.unsafe_cuts(&slots, &mut batch(&requests), Cuts::ALL, &mut found).unwrap();
        let ranges: Vec<_> = found.iter().map(|range| (range.first, range.last)).collect();
        // The reader writes block 1 too, and the writer reads nothing.
        assert_eq!(ranges, if permutation == [1, 0] { vec![(1, COLUMNS)] } else { vec![] });
        let order = mirror.order(&slots, &mut batch(&requests), None, None, &mut planner).unwrap().unwrap();
        assert_eq!(order.permutation, permutation);
    }
}

#[test]
fn rows_taken_back() {
    let mut mirror = Mirror::new(vec![full(10), full(10)]).unwrap();
    mirror.stage(0, 0, [1, 2].into_iter()).unwrap();
    mirror.stage(0, 1, [3].into_iter()).unwrap();
    let slot = mirror.add().unwrap();
    mirror.stage(0, 0, [4].into_iter()).unwrap();
    mirror.stage(0, 1, [5, 6].into_iter()).unwrap();
    mirror.append(slot).unwrap();
    mirror.truncate(slot, 1, 1);
    mirror.truncate(slot, 0, 2);
    assert_eq!(mirror.row(slot, 0), [1, 2]);
    assert_eq!(mirror.row(slot, 1), [3]);
}

#[test]
fn bad_input() {
    let mut mirror = Mirror::new(vec![full(10), Group { null_block: Some(-1), ..full(10) }]).unwrap();
    for bad in [-1, 10, i64::from(u32::MAX) + 2, i64::MIN, i64::MAX] {
        let error = Error::BlockId { group: 0, request: 7, column: 1, block: bad, num_blocks: 10 };
        assert_eq!(mirror.stage(7, 0, [3, bad].into_iter()), Err(error));
    }
    assert!(mirror.stage(0, 1, [-2].into_iter()).is_err());
    mirror.stage(0, 0, [3].into_iter()).unwrap();
    mirror.stage(0, 1, [-1].into_iter()).unwrap();
    let slot = mirror.add().unwrap();
    assert_eq!(mirror.row(slot, 0), [3]);
    assert_eq!(mirror.row(slot, 1), [-1]);

    let one = |computed, scheduled| batch(&[Request { computed, scheduled, ..Request::default() }]);
    let mut two = batch(&[Request::default(), Request::default()]);
    assert_eq!(mirror.is_safe(&[0], &mut one(0, 16), Cuts::ALL), Ok(true));
    for slot in [1, -2, i32::MIN, i32::MAX] {
        let error = Error::UnknownSlot { request: 0, slot: i64::from(slot) };
        assert_eq!(mirror.is_safe(&[slot], &mut one(0, 1), Cuts::ALL), Err(error));
    }
    assert_eq!(mirror.is_safe(&[0, 0], &mut two, Cuts::ALL), Err(Error::DuplicateSlot { slot: 0 }));
    assert!(matches!(mirror.is_safe(&[0], &mut two, Cuts::ALL), Err(Error::Length { .. })));
    let error = Error::RowTooShort { group: 0, request: 0, found: 1, needed: 2 };
    assert_eq!(mirror.is_safe(&[0], &mut one(10, 7), Cuts::ALL), Err(error.clone()));
    assert_eq!(mirror.unsafe_cuts(&[0], &mut one(10, 7), Cuts::ALL, &mut Vec::new()), Err(error.clone()));
    assert_eq!(mirror.order(&[0], &mut one(10, 7), None, None, &mut Planner::default()), Err(error));
    let table = Array2::<i64>::zeros((1, 1));
    let difference = mirror.first_difference(&[NO_ROW], 0, &Table::I64(table.view()), [1].into_iter());
    assert_eq!(difference, Err(Error::UnknownSlot { request: 0, slot: -1 }));
    mirror.free(slot);
    assert_eq!(mirror.is_safe(&[0], &mut one(0, 1), Cuts::ALL), Err(Error::UnknownSlot { request: 0, slot: 0 }));

    let mut unknown = full(10);
    unknown.tokens_per_column = 0;
    assert!(matches!(Mirror::new(vec![full(10), unknown]), Err(Error::Group { group: 1, .. })));
}
