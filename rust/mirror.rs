//! Block tables of the live requests on the host, and for each block how many rows hold it.
//!
//! A block that stands in one row only cannot be read by anyone but its writer. So a step costs one look per block that
//! it *writes*, however long the contexts are, and rows are read only when a written block is shared.
//!
//! When that happens, most rows still need no reading: time runs in changes of the mirror, a block knows when it came into use,
//! and a row knows when it last grew. What did not grow since a block came into use does not hold it. A
//! request that is decoding grows once in `tokens_per_column` steps, so long contexts stay unread.

use crate::error::{Error, Result};
use crate::hazard::{Checker, Cuts, UnsafeCuts};
use crate::memory::{reserve, zeroed};
use crate::order::{Order, Planner};
use crate::step::{Batch, Group, Row, Table, Tables, columns, same_length};

/// How a block is used: the row entries that hold it, and the time at which their number last rose from 0. A tuple, for
/// [`zeroed`].
type Use = (u32, u32);

/// The row of a request in one group.
#[derive(Debug, Default)]
struct History {
    ids: Vec<i32>,
    /// Time of the latest growth.
    grown: u32,
    /// Length and time of the latest growth before that one.
    grown_before: u32,
    len_before: u32,
}

/// The rows, and the use of the blocks in them.
#[derive(Debug)]
struct Rows {
    /// By group, then by slot.
    histories: Vec<Vec<History>>,
    /// By group, then by block.
    uses: Vec<Vec<Use>>,
    /// By slot: the number of the batch in which its request was last seen, or `VACANT`.
    seen: Vec<u32>,
    vacant: Vec<usize>,
    time: u32,
}

/// The mirror: rows that are kept up by changes, and the questions about steps over them.
#[derive(Debug)]
pub struct Mirror {
    rows: Rows,
    checker: Checker,
    /// New ids by group, checked and waiting to be added.
    staged: Vec<Vec<i32>>,
    /// Number of the latest batch, to find a slot that comes twice.
    batch: u32,
}

/// Marks a slot without a request.
const VACANT: u32 = u32::MAX;

/// The slot, in a batch, of a request that has no row here: it takes room in the step, and no block that it holds is in a
/// row of the mirror.
pub const NO_ROW: i32 = -1;

/// The rows of a step, in batch order.
struct BatchRows<'a> {
    rows: &'a Rows,
    slots: &'a [i32],
}

impl BatchRows<'_> {
    #[inline]
    fn history(&self, group: usize, request: usize) -> &History {
        &self.rows.histories[group][self.slots[request].cast_unsigned() as usize]
    }

    /// Whether a block that is written at the offset `from` or later stands in two rows: what nearly every step is
    /// done with.
    fn any_shared_write(&self, groups: &[Group], batch: &Batch, from: u32) -> Result<bool> {
        let requests = batch.requests();
        let first = requests.partition_point(|request| request.offset + request.scheduled <= from);
        for (index, (group, (rows, uses))) in
            groups.iter().zip(self.rows.histories.iter().zip(&self.rows.uses)).enumerate()
        {
            let mut shared = false;
            for (position, request) in requests.iter().enumerate().skip(first) {
                let Some(History { ids, .. }) = rows.get(self.slots[position].cast_unsigned() as usize) else {
                    continue;
                };
                let written = columns(group, &request.writes());
                let Some(ids) = ids.get(written.start as usize..written.end as usize) else {
                    let needed = written.end as usize;
                    return Err(Error::RowTooShort { group: index, request: position, found: ids.len(), needed });
                };
                for &id in ids {
                    // The null block has no entries, or no place in the pool.
                    shared |= uses.get(id.cast_unsigned() as usize).is_some_and(|&(entries, _)| entries > 1);
                }
            }
            if shared {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl Tables for BatchRows<'_> {
    const TRUSTED: bool = true;

    #[inline]
    fn row(&self, group: usize, request: usize) -> Row<'_> {
        Row::I32(self.history(group, request).ids.as_slice().into())
    }

    #[inline]
    fn id(&self, group: usize, request: usize, column: usize) -> Option<i64> {
        self.history(group, request).ids.get(column).map(|&id| i64::from(id))
    }

    #[inline]
    fn shared_since(&self, group: usize, block: u32) -> Option<u32> {
        let (entries, since) = self.rows.uses[group][block as usize];
        (entries > 1).then_some(since)
    }

    #[inline]
    fn first_column_since(&self, group: usize, request: usize, since: u32) -> u32 {
        let history = self.history(group, request);
        if history.grown < since {
            u32::MAX
        } else if history.grown_before < since {
            history.len_before
        } else {
            0
        }
    }
}

impl Mirror {
    /// A mirror without rows for an engine with these KV cache groups.
    ///
    /// # Errors
    /// [`Error::Group`] or [`Error::Memory`].
    pub fn new(groups: Vec<Group>) -> Result<Self> {
        let checker = Checker::new(groups)?;
        let groups = checker.groups();
        let rows = Rows {
            histories: groups.iter().map(|_| Vec::new()).collect(),
            uses: groups.iter().map(|group| zeroed(group.num_blocks as usize)).collect::<Result<_>>()?,
            seen: Vec::new(),
            vacant: Vec::new(),
            time: 0,
        };
        let staged = groups.iter().map(|_| Vec::new()).collect();
        Ok(Self { rows, checker, staged, batch: 0 })
    }

    /// The KV cache groups.
    #[must_use]
    pub fn groups(&self) -> &[Group] {
        self.checker.groups()
    }

    /// Bytes of heap memory held.
    #[must_use]
    pub fn nbytes(&self) -> usize {
        let rows = self.rows.histories.iter().flatten();
        rows.map(|row| size_of::<History>() + row.ids.capacity() * size_of::<i32>()).sum::<usize>()
            + self.rows.uses.iter().map(|uses| uses.capacity() * size_of::<Use>()).sum::<usize>()
            + self.checker.nbytes()
    }

    /// Check new block ids of one group and keep them for the next [`Mirror::add`], [`Mirror::append`] or
    /// [`Mirror::replace`]. Each group is staged anew for each change.
    ///
    /// # Errors
    /// [`Error::BlockId`], with the `request` as given; [`Error::Memory`].
    pub fn stage(&mut self, request: usize, group: usize, ids: impl Iterator<Item = i64>) -> Result<()> {
        let rules = &self.checker.groups()[group];
        let staged = &mut self.staged[group];
        staged.clear();
        reserve(staged, ids.size_hint().0)?;
        for (column, block) in ids.enumerate() {
            match i32::try_from(block) {
                Ok(id) if id.cast_unsigned() < rules.num_blocks || rules.null_block == Some(block) => {
                    if staged.len() == staged.capacity() {
                        reserve(staged, 1)?;
                    }
                    staged.push(id);
                }
                _ => {
                    let num_blocks = rules.num_blocks;
                    return Err(Error::BlockId { group, request, column, block, num_blocks });
                }
            }
        }
        Ok(())
    }

    /// A new request with the staged rows; its slot.
    ///
    /// # Errors
    /// [`Error::Memory`]; nothing has changed then. So it is with the two changes below.
    pub fn add(&mut self) -> Result<usize> {
        let slot = match self.rows.vacant.pop() {
            Some(slot) => slot,
            None => self.rows.grow()?,
        };
        self.append(slot).inspect_err(|_| self.rows.vacant.push(slot))?;
        self.rows.seen[slot] = 0;
        Ok(slot)
    }

    /// Add the staged blocks to the ends of the rows of the request in a slot.
    ///
    /// # Errors
    /// As [`Mirror::add`].
    pub fn append(&mut self, slot: usize) -> Result<()> {
        for (rows, staged) in self.rows.histories.iter_mut().zip(&self.staged) {
            reserve(&mut rows[slot].ids, staged.len())?;
        }
        let time = self.rows.tick();
        let groups = self.checker.groups().iter().zip(&mut self.rows.histories).zip(&mut self.rows.uses);
        for (((group, rows), uses), staged) in groups.zip(&mut self.staged) {
            if staged.is_empty() {
                continue;
            }
            for &id in &*staged {
                if let Some((entries, since)) = counted(uses, group, id) {
                    if *entries == 0 {
                        *since = time;
                    }
                    *entries += 1;
                }
            }
            let history = &mut rows[slot];
            #[expect(
                clippy::cast_possible_truncation,
                reason = "columns have 31 bits; a longer row scans from its start"
            )]
            let len = history.ids.len() as u32;
            (history.len_before, history.grown_before) = (len, history.grown);
            history.grown = time;
            history.ids.append(staged);
        }
        Ok(())
    }

    /// Give the request in a slot the staged rows instead of those it has.
    ///
    /// # Errors
    /// As [`Mirror::add`].
    pub fn replace(&mut self, slot: usize) -> Result<()> {
        for (rows, staged) in self.rows.histories.iter_mut().zip(&self.staged) {
            reserve(&mut rows[slot].ids, staged.len())?;
        }
        for group in 0..self.groups().len() {
            self.truncate(slot, group, 0);
        }
        self.append(slot)
    }

    /// Shorten a row: what an [`Mirror::append`] added goes.
    pub fn truncate(&mut self, slot: usize, group: usize, len: usize) {
        let (rules, uses) = (&self.checker.groups()[group], &mut self.rows.uses[group]);
        for id in self.rows.histories[group][slot].ids.drain(len..) {
            if let Some((entries, _)) = counted(uses, rules, id) {
                *entries -= 1;
            }
        }
    }

    /// The request in a slot goes, and the slot is vacant.
    pub fn free(&mut self, slot: usize) {
        for group in 0..self.groups().len() {
            self.truncate(slot, group, 0);
            self.rows.histories[group][slot] = History::default();
        }
        self.rows.seen[slot] = VACANT;
        self.rows.vacant.push(slot);
    }

    /// The row of the request in a slot.
    #[must_use]
    pub fn row(&self, slot: usize, group: usize) -> &[i32] {
        &self.rows.histories[group][slot].ids
    }

    /// As [`Checker::is_safe`]; this and the questions below leave the requests with [`NO_ROW`] out of the batch.
    ///
    /// # Errors
    /// A slot that is vacant or comes twice, or a row that ends before its request's tokens.
    pub fn is_safe(&mut self, slots: &[i32], batch: &mut Batch, cuts: Cuts) -> Result<bool> {
        self.see(slots, batch)?;
        let rows = BatchRows { rows: &self.rows, slots };
        if !rows.any_shared_write(self.checker.groups(), batch, cuts.first)? {
            return Ok(true);
        }
        self.checker.is_safe(&rows, batch, cuts)
    }

    /// As [`Checker::unsafe_cuts`].
    ///
    /// # Errors
    /// As [`Mirror::is_safe`].
    pub fn unsafe_cuts(
        &mut self,
        slots: &[i32],
        batch: &mut Batch,
        cuts: Cuts,
        found: &mut Vec<UnsafeCuts>,
    ) -> Result<()> {
        self.see(slots, batch)?;
        self.checker.unsafe_cuts(&BatchRows { rows: &self.rows, slots }, batch, cuts, found)
    }

    /// A batch order without unsafe cuts, as [`Planner::order`] finds it. Queries of at most `short_query` tokens are short.
    ///
    /// # Errors
    /// As [`Mirror::is_safe`]; phases that do not fit.
    pub fn order(
        &mut self,
        slots: &[i32],
        batch: &mut Batch,
        phases: Option<&[i8]>,
        short_query: Option<i64>,
        planner: &mut Planner,
    ) -> Result<Option<Order>> {
        self.see(slots, batch)?;
        planner.clear();
        let rows = BatchRows { rows: &self.rows, slots };
        self.checker.dependencies(&rows, batch, |reader, writer| planner.depend(reader, writer))?;
        let short = short_query.map(|most| batch.short(most));
        planner.order(slots.len(), phases, short.as_deref())
    }

    /// Where an engine's own block table differs: the first batch position and column, or the shorter length where one row
    /// continues the other.
    ///
    /// # Errors
    /// A slot that is vacant or comes twice; lengths that disagree; a length beyond the table's columns.
    pub fn first_difference(
        &mut self,
        slots: &[i32],
        group: usize,
        table: &Table<'_>,
        lengths: impl ExactSizeIterator<Item = i64>,
    ) -> Result<Option<(usize, usize)>> {
        self.live(slots, |request| Err(Error::UnknownSlot { request, slot: i64::from(NO_ROW) }))?;
        same_length("num_blocks_per_row", lengths.len(), slots.len())?;
        if table.num_rows() < slots.len() {
            return Err(Error::Length { what: "block_table", found: table.num_rows(), expected: slots.len() });
        }
        let rows = BatchRows { rows: &self.rows, slots };
        for (request, length) in lengths.enumerate() {
            let ours = &rows.history(group, request).ids;
            let theirs = std::slice::from_ref(table);
            let length = usize::try_from(length).unwrap_or(0);
            if table.num_columns() < length {
                return Err(Error::RowTooShort { group, request, found: table.num_columns(), needed: length });
            }
            let common = length.min(ours.len());
            let differs = (0..common).find(|&column| theirs.id(0, request, column) != Some(i64::from(ours[column])));
            if let Some(column) = differs.or_else(|| (length != ours.len()).then_some(common)) {
                return Ok(Some((request, column)));
            }
        }
        Ok(None)
    }

    /// Check the slots of a batch.
    fn see(&mut self, slots: &[i32], batch: &mut Batch) -> Result<()> {
        same_length("slots", slots.len(), batch.requests().len())?;
        self.live(slots, |request| {
            batch.leave_out(request);
            Ok(())
        })
    }

    fn live(&mut self, slots: &[i32], mut without_row: impl FnMut(usize) -> Result<()>) -> Result<()> {
        self.batch += 1;
        if self.batch == VACANT {
            for seen in self.rows.seen.iter_mut().filter(|seen| **seen != VACANT) {
                *seen = 0;
            }
            self.batch = 1;
        }
        for (request, &slot) in slots.iter().enumerate() {
            match self.rows.seen.get_mut(slot.cast_unsigned() as usize) {
                Some(seen) if *seen < self.batch => *seen = self.batch,
                Some(&mut seen) if seen != VACANT => return Err(Error::DuplicateSlot { slot: i64::from(slot) }),
                None if slot == NO_ROW => without_row(request)?,
                _ => return Err(Error::UnknownSlot { request, slot: i64::from(slot) }),
            }
        }
        Ok(())
    }
}

impl Rows {
    /// The next moment.
    fn tick(&mut self) -> u32 {
        if self.time == u32::MAX {
            // Begin again, with everything that is there as old as can be: no row is then taken to be older than a block.
            for (_, since) in self.uses.iter_mut().flatten() {
                *since = 0;
            }
            for row in self.histories.iter_mut().flatten() {
                (row.grown, row.grown_before, row.len_before) = (0, 0, 0);
            }
            self.time = 0;
        }
        self.time += 1;
        self.time
    }

    /// One more slot, vacant.
    fn grow(&mut self) -> Result<usize> {
        let slot = self.seen.len();
        // Every slot may be vacant at once.
        reserve(&mut self.vacant, slot + 1)?;
        reserve(&mut self.seen, 1)?;
        for rows in &mut self.histories {
            reserve(rows, 1)?;
        }
        self.seen.push(VACANT);
        for rows in &mut self.histories {
            rows.push(History::default());
        }
        Ok(slot)
    }
}

/// The use of a block that counts: not the null block.
#[inline]
fn counted<'a>(uses: &'a mut [Use], group: &Group, id: i32) -> Option<&'a mut Use> {
    if group.null_block == Some(i64::from(id)) { None } else { uses.get_mut(id.cast_unsigned() as usize) }
}

#[cfg(test)]
mod tests {
    use ndarray::Array2;

    use super::{Checker, Cuts, Group, Mirror, Table, VACANT};
    use crate::error::Error;
    use crate::hazard::UnsafeCuts;
    use crate::step::Batch;

    const COLUMNS: usize = 6;

    fn group() -> Group {
        Group {
            tokens_per_column: 2,
            num_blocks: 12,
            sliding_window: None,
            attention_chunk_size: None,
            prompt_in_view: false,
            null_block: None,
        }
    }

    /// The unsafe cuts by the mirror and without it, in a step in which each request writes its last block.
    fn both(mirror: &mut Mirror, slots: &[i32]) -> [Vec<UnsafeCuts>; 2] {
        let row = |request: usize| mirror.row(slots[request].cast_unsigned() as usize, 0);
        let mut table = Array2::from_elem((slots.len(), COLUMNS), -1);
        let mut computed = Vec::new();
        for request in 0..slots.len() {
            computed.push(i64::try_from(row(request).len()).unwrap() * 2 - 2);
            for (column, &id) in row(request).iter().enumerate() {
                table[(request, column)] = id;
            }
        }
        let mut batch = Batch::default();
        batch.fill(computed.into_iter(), slots.iter().map(|_| 2)).unwrap();
        let [mut ours, mut theirs] = [Vec::new(), Vec::new()];
        let mut checker = Checker::new(vec![group()]).unwrap();
        checker.unsafe_cuts(&[Table::I32(table.view())][..], &batch, Cuts::ALL, &mut theirs).unwrap();
        mirror.unsafe_cuts(slots, &mut batch, Cuts::ALL, &mut ours).unwrap();
        assert_eq!(mirror.is_safe(slots, &mut batch, Cuts::ALL), Ok(theirs.is_empty()));
        [ours, theirs]
    }

    #[test]
    fn time_begins_again() {
        let (mut unsafe_steps, mut state) = (0, 1_u64);
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for _ in 0..300 {
            let mut mirror = Mirror::new(vec![group()]).unwrap();
            mirror.rows.time = u32::MAX - u32::try_from(random(12)).unwrap();
            let mut slots = Vec::new();
            for _ in 0..24 {
                let id = i64::try_from(random(12)).unwrap();
                mirror.stage(0, 0, [id].into_iter()).unwrap();
                if slots.len() < 4 {
                    slots.push(i32::try_from(mirror.add().unwrap()).unwrap());
                } else {
                    let slot = slots[usize::try_from(random(4)).unwrap()].cast_unsigned() as usize;
                    if mirror.row(slot, 0).len() == COLUMNS { mirror.replace(slot) } else { mirror.append(slot) }
                        .unwrap();
                }
                let [ours, theirs] = both(&mut mirror, &slots);
                assert_eq!(ours, theirs);
                unsafe_steps += usize::from(!ours.is_empty());
            }
            assert!(mirror.rows.time <= 24, "time did not begin again");
        }
        assert!(unsafe_steps > 1000);
    }

    #[test]
    fn batches_are_counted_anew() {
        let mut mirror = Mirror::new(vec![group()]).unwrap();
        let [first, gone] = [mirror.add(), mirror.add()].map(|slot| i32::try_from(slot.unwrap()).unwrap());
        mirror.free(gone.cast_unsigned() as usize);
        mirror.batch = VACANT - 3;
        let mut batch = Batch::default();
        batch.fill([0].into_iter(), [0].into_iter()).unwrap();
        let mut twice = Batch::default();
        twice.fill([0, 0].into_iter(), [0, 0].into_iter()).unwrap();
        for _ in 0..6 {
            assert_eq!(mirror.is_safe(&[first], &mut batch, Cuts::ALL), Ok(true));
            assert_eq!(
                mirror.is_safe(&[gone], &mut batch, Cuts::ALL),
                Err(Error::UnknownSlot { request: 0, slot: i64::from(gone) })
            );
            assert_eq!(
                mirror.is_safe(&[first, first], &mut twice, Cuts::ALL),
                Err(Error::DuplicateSlot { slot: i64::from(first) })
            );
        }
    }
}
