//! Changes of a mirror against tables that are made anew from a model for each question to the check without memory.
#![no_main]

#[allow(dead_code)]
#[path = "../../rust/tests/oracle.rs"]
mod oracle;
mod raw;

use std::collections::BTreeMap;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use ndarray::Array2;
use ubatch_guard::error::Error;
use ubatch_guard::hazard::{Checker, Cuts};
use ubatch_guard::mirror::{Mirror, NO_ROW};
use ubatch_guard::order::Planner;
use ubatch_guard::step::{Group, Table};

use oracle::Request;
use raw::{RawGroup, RawRequest, batch, id};

#[derive(Arbitrary, Debug)]
enum Change {
    /// New ids by group, behind so many leading blocks of another request.
    Add {
        rows: Vec<Vec<u8>>,
        source: u8,
        prefix: u8,
    },
    Append {
        request: u8,
        rows: Vec<Vec<u8>>,
        take_back: bool,
    },
    Replace {
        request: u8,
        rows: Vec<Vec<u8>>,
    },
    Free {
        request: u8,
    },
    BadId {
        group: u8,
        id: i64,
    },
    /// Members of the batch and their counts.
    Ask {
        members: Vec<(u8, RawRequest)>,
        cuts: (u8, u8),
        short_query: Option<i8>,
    },
}

type Rows = Vec<Vec<i64>>;

/// Live requests at most, and columns of a row.
const MOST: usize = 8;
const COLUMNS: usize = 24;

struct Model {
    groups: Vec<Group>,
    mirror: Mirror,
    rows: BTreeMap<usize, Rows>,
}

impl Model {
    fn slot(&self, request: u8) -> Option<usize> {
        self.rows.keys().nth(usize::from(request) % self.rows.len().max(1)).copied()
    }

    fn ids(&self, rows: &[Vec<u8>]) -> Rows {
        let bytes = |group: usize| rows.get(group).into_iter().flatten().take(6);
        self.groups.iter().enumerate().map(|(g, group)| bytes(g).map(|&byte| id(group, byte)).collect()).collect()
    }

    fn stage(&mut self, rows: &Rows) {
        for (group, ids) in rows.iter().enumerate() {
            self.mirror.stage(0, group, ids.iter().copied()).unwrap();
        }
    }

    fn change(&mut self, change: Change) {
        match change {
            Change::Add { rows, source, prefix } if self.rows.len() < MOST => {
                let mut new = self.ids(&rows);
                if let Some(source) = self.slot(source) {
                    for (new, held) in new.iter_mut().zip(&self.rows[&source]) {
                        new.splice(..0, held.iter().copied().take(usize::from(prefix % 16)));
                    }
                }
                self.stage(&new);
                let slot = self.mirror.add().unwrap();
                assert!(self.rows.insert(slot, new).is_none(), "a slot was given twice");
            }
            Change::Append { request, rows, take_back } => {
                let Some(slot) = self.slot(request) else { return };
                let new = self.ids(&rows);
                self.stage(&new);
                let held = self.rows.get_mut(&slot).unwrap();
                let lengths: Vec<_> = held.iter().map(Vec::len).collect();
                self.mirror.append(slot).unwrap();
                if take_back || lengths.iter().any(|&len| len > COLUMNS) {
                    for (group, &len) in lengths.iter().enumerate() {
                        self.mirror.truncate(slot, group, len);
                    }
                } else {
                    held.iter_mut().zip(new).for_each(|(held, new)| held.extend(new));
                }
            }
            Change::Replace { request, rows } => {
                let Some(slot) = self.slot(request) else { return };
                let new = self.ids(&rows);
                self.stage(&new);
                self.mirror.replace(slot).unwrap();
                self.rows.insert(slot, new);
            }
            Change::Free { request } => {
                let Some(slot) = self.slot(request) else { return };
                self.mirror.free(slot);
                self.rows.remove(&slot);
            }
            Change::BadId { group, id } => {
                let group = usize::from(group) % self.groups.len();
                let rules = &self.groups[group];
                let fits = (0..i64::from(rules.num_blocks)).contains(&id) || rules.null_block == Some(id);
                assert_eq!(self.mirror.stage(0, group, [id].into_iter()).is_ok(), fits);
            }
            Change::Ask { members, cuts, short_query } => self.ask(&members, cuts, short_query),
            Change::Add { .. } => {}
        }
    }

    fn ask(&mut self, members: &[(u8, RawRequest)], cuts: (u8, u8), short_query: Option<i8>) {
        let mut groups = self.groups.clone();
        let (mut slots, mut requests, mut rows) = (Vec::new(), Vec::new(), Vec::<Rows>::new());
        for (member, raw) in members.iter().take(MOST) {
            let mut request = Request { settled: 0, ..raw.request() };
            match self.slot(*member) {
                Some(slot) if *member < 240 => {
                    let held = self.rows[&slot].clone();
                    let room =
                        held.iter().zip(&groups).map(|(row, group)| row.len() * group.tokens_per_column as usize);
                    let room = u32::try_from(room.min().unwrap()).unwrap();
                    request.computed = request.computed.min(room);
                    request.scheduled = request.scheduled.min(room - request.computed);
                    slots.push(i32::try_from(slot).unwrap());
                    rows.push(held);
                }
                // One without a row: the tables say that it has blocks of its own.
                _ => {
                    slots.push(NO_ROW);
                    let own = groups.iter_mut().map(|group| {
                        let columns = (request.computed + request.scheduled).div_ceil(group.tokens_per_column);
                        let first = group.num_blocks + 1;
                        group.num_blocks = first + columns;
                        (first..first + columns).map(i64::from).collect()
                    });
                    rows.push(own.collect());
                }
            }
            requests.push(request);
        }
        let mut known: Vec<_> = slots.iter().filter(|&&slot| slot != NO_ROW).collect();
        known.sort_unstable();
        let cuts = Cuts { first: u32::from(cuts.0), last: u32::from(cuts.1) };
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        if known.windows(2).any(|pair| pair[0] == pair[1]) {
            let answer = self.mirror.is_safe(&slots, &mut batch(&requests), cuts);
            return assert!(matches!(answer, Err(Error::DuplicateSlot { .. })));
        }
        let tables: Vec<Array2<i64>> = (0..groups.len())
            .map(|group| {
                let columns = rows.iter().map(|rows| rows[group].len()).max().unwrap_or(0);
                let id = |(r, c): (usize, usize)| rows[r][group].get(c).copied().unwrap_or(i64::MIN);
                Array2::from_shape_fn((rows.len(), columns), id)
            })
            .collect();
        let tables: Vec<_> = tables.iter().map(|table| Table::I64(table.view())).collect();
        let mut checker = Checker::new(groups).unwrap();
        for cuts in [Cuts::ALL, cuts] {
            checker.unsafe_cuts(&tables[..], &batch(&requests), cuts, &mut theirs).unwrap();
            self.mirror.unsafe_cuts(&slots, &mut batch(&requests), cuts, &mut ours).unwrap();
            assert_eq!(ours, theirs);
            assert_eq!(self.mirror.is_safe(&slots, &mut batch(&requests), cuts), Ok(theirs.is_empty()));
        }
        let short_query = short_query.map(i64::from);
        let (mut planner, mut again) = (Planner::default(), Planner::default());
        let ours = self.mirror.order(&slots, &mut batch(&requests), None, short_query, &mut planner).unwrap();
        let depend = |reader, writer| again.depend(reader, writer);
        checker.dependencies(&tables[..], &batch(&requests), depend).unwrap();
        let short = short_query.map(|most| batch(&requests).short(most));
        assert_eq!(ours, again.order(slots.len(), None, short.as_deref()).unwrap());
    }

    fn compare_rows(&self) {
        for (&slot, rows) in &self.rows {
            for (group, row) in rows.iter().enumerate() {
                assert!(self.mirror.row(slot, group).iter().map(|&id| i64::from(id)).eq(row.iter().copied()));
            }
        }
    }
}

fuzz_target!(|input: (Vec<RawGroup>, Vec<Change>)| {
    let (groups, changes) = input;
    let groups: Vec<_> = groups.iter().take(2).map(RawGroup::group).collect();
    if groups.is_empty() {
        return;
    }
    let mirror = Mirror::new(groups.clone()).unwrap();
    let mut model = Model { groups, mirror, rows: BTreeMap::new() };
    for change in changes.into_iter().take(200) {
        model.change(change);
        model.compare_rows();
    }
});
