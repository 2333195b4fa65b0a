//! The check without memory: small steps against execution slot by slot; numbers from anywhere, which are refused or
//! answered.
#![no_main]

#[allow(dead_code)]
#[path = "../../rust/tests/oracle.rs"]
mod oracle;
mod raw;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use ndarray::{Array2, ArrayView2, Axis, ShapeBuilder};
use ubatch_guard::hazard::{Checker, Cuts};
use ubatch_guard::step::{Batch, Group, Table, rows_reach};

use oracle::{Oracle, Step};
use raw::{RawGroup, RawRequest, batch, id};

#[derive(Arbitrary, Debug)]
enum Input {
    Small { groups: Vec<RawGroup>, requests: Vec<RawRequest>, ids: Vec<u8>, cuts: (u8, u8) },
    Wild { group: WildGroup, requests: Vec<(i64, i64, i64, i64)>, ids: Vec<i64>, cuts: (u32, u32), layout: u8 },
}

#[derive(Arbitrary, Debug)]
struct WildGroup {
    tokens_per_column: u32,
    num_blocks: u16,
    sliding_window: Option<u32>,
    attention_chunk_size: Option<u32>,
    prompt_in_view: bool,
    null_block: Option<i64>,
}

fn small(groups: &[RawGroup], requests: &[RawRequest], ids: &[u8], cuts: (u8, u8)) {
    let groups: Vec<_> = groups.iter().take(3).map(RawGroup::group).collect();
    let requests: Vec<_> = requests.iter().take(6).map(RawRequest::request).collect();
    let mut bytes = ids.iter().copied().chain([0]).cycle();
    let rows: Vec<Vec<Vec<i64>>> = groups
        .iter()
        .map(|group| {
            let columns = |r: &oracle::Request| (r.computed + r.scheduled).div_ceil(group.tokens_per_column);
            let mut row = |r| (0..columns(r)).map(|_| id(group, bytes.next().unwrap())).collect();
            requests.iter().map(&mut row).collect()
        })
        .collect();
    let tables: Vec<Array2<i64>> = rows
        .iter()
        .map(|rows| {
            let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
            Array2::from_shape_fn((rows.len(), columns), |(r, c)| rows[r].get(c).copied().unwrap_or(i64::MIN))
        })
        .collect();
    let tables: Vec<_> = tables.iter().map(|table| Table::I64(table.view())).collect();
    let batch = batch(&requests);
    rows_reach(&groups, &tables, &batch).unwrap();
    let mut checker = Checker::new(groups.clone()).unwrap();
    let oracle = Oracle::new(&Step { groups, requests: requests.clone(), rows }).unwrap();
    let unsafe_cuts = oracle.unsafe_cuts();
    let mut found = Vec::new();
    for asked in [Cuts::ALL, Cuts { first: u32::from(cuts.0), last: u32::from(cuts.1) }] {
        checker.unsafe_cuts(&tables[..], &batch, asked, &mut found).unwrap();
        let ours: Vec<_> = found.iter().flat_map(|range| range.first..=range.last).collect();
        let expected: Vec<_> =
            unsafe_cuts.iter().copied().filter(|cut| (asked.first..=asked.last).contains(cut)).collect();
        assert_eq!(ours, expected);
        assert_eq!(checker.is_safe(&tables[..], &batch, asked), Ok(expected.is_empty()));
    }
    let mut pairs = Vec::new();
    checker.dependencies(&tables[..], &batch, |reader, writer| pairs.push((reader, writer))).unwrap();
    pairs.sort_unstable();
    pairs.dedup();
    assert_eq!(pairs, oracle.dependencies(requests.len()));
}

fn wild(raw: &WildGroup, requests: &[(i64, i64, i64, i64)], ids: &[i64], cuts: (u32, u32), layout: u8) {
    let group = Group {
        tokens_per_column: raw.tokens_per_column,
        num_blocks: u32::from(raw.num_blocks),
        sliding_window: raw.sliding_window,
        prompt_in_view: raw.prompt_in_view,
        attention_chunk_size: raw.attention_chunk_size,
        null_block: raw.null_block,
    };
    let Ok(mut checker) = Checker::new(vec![group.clone()]) else { return };
    let mut batch = Batch::default();
    let filled = batch.fill(requests.iter().map(|r| r.0), requests.iter().map(|r| r.1));
    if filled.is_err() || requests.is_empty() {
        return;
    }
    // Whether these are taken or not, the batch stays one.
    let _ = batch.settle(requests.iter().map(|r| r.2));
    let _ = batch.read_on(requests.iter().map(|r| r.3));
    let columns = ids.len() / requests.len();
    let shape = (requests.len(), columns);
    let ids = &ids[..requests.len() * columns];
    #[allow(clippy::cast_possible_truncation)]
    let narrow: Vec<_> = ids.iter().map(|&id| id as i32).collect();
    let mut backwards = ArrayView2::from_shape(shape, ids).unwrap();
    backwards.invert_axis(Axis(1));
    let table = match layout % 4 {
        0 => Table::I64(ArrayView2::from_shape(shape, ids).unwrap()),
        1 => Table::I64(ArrayView2::from_shape(shape.f(), ids).unwrap()),
        2 => Table::I64(backwards),
        _ => Table::I32(ArrayView2::from_shape(shape, &narrow).unwrap()),
    };
    let cuts = Cuts { first: cuts.0, last: cuts.1 };
    let mut found = Vec::new();
    let reaches = rows_reach(&[group], &[table], &batch);
    let answer = checker.unsafe_cuts(&[table][..], &batch, cuts, &mut found);
    let safe = checker.is_safe(&[table][..], &batch, cuts);
    if let (Ok(()), Ok(())) = (reaches, answer) {
        assert_eq!(safe, Ok(found.is_empty()));
        assert!(found.iter().all(|r| cuts.first <= r.first && r.first <= r.last && r.last <= cuts.last));
        assert!(found.windows(2).all(|pair| pair[0].last + 1 < pair[1].first));
    }
    let _ = checker.dependencies(&[table][..], &batch, |_, _| ());
}

fuzz_target!(|input: Input| {
    match input {
        Input::Small { groups, requests, ids, cuts } => small(&groups, &requests, &ids, cuts),
        Input::Wild { group, requests, ids, cuts, layout } => wild(&group, &requests, &ids, cuts, layout),
    }
});
