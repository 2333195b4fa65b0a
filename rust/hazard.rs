//! Unsafe cuts of a step: who reads what a later token of the same step still has to write.
//!
//! The batch is swept from its end. Standing at a request, the blocks that *later* requests write are in a set,
//! and only a reader that finds one of its own blocks there can be cut away from its writer. So a batch with writers in
//! front of their readers costs no look-up at all, and what a request writes itself is never in its way.

use std::ops::{ControlFlow, Range};

use crate::bitset::{BlockId, BlockSet};
use crate::error::{Error, Result};
use crate::memory::zeroed;
use crate::step::{Batch, Group, Request, Row, Tables, columns};

/// A maximal range of unsafe cuts, and the culprits that make its first cut unsafe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnsafeCuts {
    /// First unsafe cut, in tokens.
    pub first: u32,
    /// Last unsafe cut, in tokens.
    pub last: u32,
    /// Who reads, who writes, and where.
    pub hazard: Hazard,
}

/// A read of a KV slot that another request of the step writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hazard {
    /// Batch position of the reader.
    pub reader: usize,
    /// Batch position of the writer.
    pub writer: usize,
    /// Index of the KV cache group.
    pub group: usize,
    /// The block.
    pub block: u32,
    /// Step offset of the token that writes last among those the reader reads.
    pub last_write: u32,
}

/// The cuts asked about, both included. Cut K puts the offsets below K in the earlier microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cuts {
    /// First cut.
    pub first: u32,
    /// Last cut.
    pub last: u32,
}

impl Cuts {
    /// Every cut.
    pub const ALL: Cuts = Cuts { first: 0, last: u32::MAX };

    /// Whether some cut lies in both this range and `first ..= last`.
    #[inline]
    fn meet(self, first: u32, last: u32) -> bool {
        self.first.max(first) <= self.last.min(last)
    }
}

/// A block that a request writes in this step.
#[derive(Debug, Clone, Copy)]
struct Write {
    block: u32,
    request: u32,
    column: u32,
    /// Index + 1 of the write to the same block before this one; 0: none.
    previous: u32,
    /// Of the latest write to a block: position + 1 of the reader that was shown all there are; 0: nobody yet.
    shown_to: u32,
}

/// The blocks of one group that requests of this step write.
#[derive(Debug)]
struct Written {
    blocks: BlockSet,
    writes: Vec<Write>,
    /// Per block, index + 1 of its latest write; means something only for members of `blocks`. It is filled when a
    /// reader first hits the set, for a look at a random place per written block is what a safe step should not pay.
    latest: Vec<u32>,
    indexed: u32,
    /// When the longest-used of the blocks came into use (mirror only).
    since: u32,
}

impl Written {
    fn new(num_blocks: u32) -> Result<Self> {
        let blocks = BlockSet::new(num_blocks)?;
        Ok(Self { blocks, writes: Vec::new(), latest: Vec::new(), indexed: 0, since: u32::MAX })
    }

    fn clear(&mut self) {
        self.blocks.clear(self.writes.iter().map(|write| write.block));
        self.writes.clear();
        self.indexed = 0;
        self.since = u32::MAX;
    }

    #[inline]
    fn insert(&mut self, block: u32, request: usize, column: u32, since: u32) {
        // 1 stands for "not the first": the index is filled later.
        let previous = u32::from(!self.blocks.insert(block));
        #[expect(clippy::cast_possible_truncation, reason = "a batch has fewer than 2^31 requests")]
        self.writes.push(Write { block, request: request as u32, column, previous, shown_to: 0 });
        self.since = self.since.min(since);
    }

    /// Make room for the index before the first search.
    fn prepare(&mut self, num_blocks: u32) -> Result<()> {
        if self.latest.is_empty() && !self.blocks.is_empty() {
            self.latest = zeroed(num_blocks as usize)?;
        }
        Ok(())
    }

    /// Link the writes that came since the last search to those before them.
    fn index(&mut self, group: &Group, requests: &[Request]) {
        // By number and no `skip`, which would walk past all that is indexed at every hit.
        while let Some(&write) = self.writes.get(self.indexed as usize) {
            let latest = &mut self.latest[write.block as usize];
            let previous = if write.previous == 0 { 0 } else { *latest };
            self.indexed += 1;
            *latest = self.indexed;
            // A request that writes every slot of a block again: what it wrote there before is nobody's last write.
            let again = previous
                .checked_sub(1)
                .map(|index| self.writes[index as usize])
                .filter(|before| before.request == write.request && is_whole(group, &slots_of(group, requests, write)));
            self.writes[self.indexed as usize - 1].previous = again.map_or(previous, |before| before.previous);
        }
    }

    /// The writes to a member of `blocks`, for a reader that reads `slots` of it; none where it was shown them all before.
    fn to(
        &mut self,
        block: u32,
        group: &Group,
        requests: &[Request],
        reader: usize,
        slots: &Range<u32>,
    ) -> impl Iterator<Item = Write> + '_ {
        self.index(group, requests);
        let mut index = self.latest[block as usize];
        // A row may hold a block in many columns. All but the first and the last read every slot: once is enough.
        #[expect(clippy::cast_possible_truncation, reason = "a batch has fewer than 2^31 requests")]
        let reader = reader as u32 + 1;
        let latest = &mut self.writes[index as usize - 1];
        if latest.shown_to == reader {
            index = 0;
        } else if is_whole(group, slots) {
            latest.shown_to = reader;
        }
        std::iter::from_fn(move || {
            let write = *self.writes.get(index.checked_sub(1)? as usize)?;
            index = write.previous;
            Some(write)
        })
    }
}

/// The check of a step, with scratch that is kept from call to call.
#[derive(Debug)]
pub struct Checker {
    groups: Vec<Group>,
    written: Vec<Written>,
}

impl Checker {
    /// A checker for an engine with these KV cache groups.
    ///
    /// # Errors
    /// [`Error::Group`] or [`Error::Memory`].
    pub fn new(groups: Vec<Group>) -> Result<Self> {
        for (index, group) in groups.iter().enumerate() {
            group.validate(index)?;
        }
        let written = groups.iter().map(|group| Written::new(group.num_blocks)).collect::<Result<_>>()?;
        Ok(Self { groups, written })
    }

    /// The KV cache groups.
    #[must_use]
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Bytes of heap memory held.
    #[must_use]
    pub fn nbytes(&self) -> usize {
        self.written
            .iter()
            .map(|group| {
                group.blocks.nbytes()
                    + group.latest.capacity() * size_of::<u32>()
                    + group.writes.capacity() * size_of::<Write>()
            })
            .sum()
    }

    /// Whether none of the cuts is unsafe.
    ///
    /// # Errors
    /// A row too short or a block id outside the pool, where the check comes upon it before an unsafe cut.
    pub fn is_safe(&mut self, tables: &(impl Tables + ?Sized), batch: &Batch, cuts: Cuts) -> Result<bool> {
        let mut safe = true;
        self.sweep(tables, batch, cuts, true, |_, _| safe = false)?;
        Ok(safe)
    }

    /// The unsafe cuts among `cuts`, ascending and disjoint, none touching the next.
    ///
    /// # Errors
    /// A row too short, or a block id outside the pool.
    pub fn unsafe_cuts(
        &mut self,
        tables: &(impl Tables + ?Sized),
        batch: &Batch,
        cuts: Cuts,
        found: &mut Vec<UnsafeCuts>,
    ) -> Result<()> {
        found.clear();
        // Readers come with descending offsets, so every range starts at or before those found so far.
        self.sweep(tables, batch, cuts, false, |offset, hazard| {
            let mut range =
                UnsafeCuts { first: cuts.first.max(offset + 1), last: cuts.last.min(hazard.last_write), hazard };
            while let Some(next) = found.pop_if(|next| next.first <= range.last + 1) {
                range.last = range.last.max(next.last);
            }
            found.push(range);
        })?;
        found.reverse();
        Ok(())
    }

    /// Sweep the batch from its end and report, for each reader with an unsafe cut among `cuts`, its offset and its
    /// furthest hazard.
    fn sweep<T: Tables + ?Sized>(
        &mut self,
        tables: &T,
        batch: &Batch,
        cuts: Cuts,
        stop_at_first: bool,
        mut report: impl FnMut(u32, Hazard),
    ) -> Result<()> {
        self.clear();
        let requests = batch.requests();
        // Nobody in front of the first reader can be cut away from a writer. The caller vouches for the requests it
        // calls settled: not even their ids are checked, or batches of decodes would cost what this saves.
        let first = requests.iter().position(|request| !request.is_settled()).unwrap_or(requests.len());
        for (position, request) in requests.iter().enumerate().skip(first).rev() {
            if request.scheduled == 0 {
                continue;
            }
            let mut furthest: Option<Hazard> = None;
            for (index, (group, written)) in self.groups.iter().zip(&mut self.written).enumerate() {
                let hit = |written: &mut Written, read: &Range<u32>, block: u32| {
                    // Everything in the set is written by requests behind this one.
                    if let Some((last_write, writer)) = furthest_write(group, written, requests, position, read, block)
                        && cuts.meet(request.offset + 1, last_write)
                        && furthest.is_none_or(|known| known.last_write < last_write)
                    {
                        furthest = Some(Hazard { reader: position, writer, group: index, block, last_write });
                        return if stop_at_first { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
                    }
                    ControlFlow::Continue(())
                };
                if scan_reads(tables, index, group, written, position, request, hit)?.is_break() {
                    break;
                }
            }
            if let Some(hazard) = furthest {
                report(request.offset, hazard);
                if stop_at_first {
                    break;
                }
            }
            for (index, (group, written)) in self.groups.iter().zip(&mut self.written).enumerate() {
                insert_writes(tables, index, group, written, position, request, cuts.first)?;
            }
        }
        Ok(())
    }

    /// Report each pair (reader, writer) of different requests in which the reader reads a slot that the writer
    /// writes in this step, whatever their order in the batch. A pair can come more than once.
    ///
    /// # Errors
    /// A row too short, or a block id outside the pool.
    pub fn dependencies<T: Tables + ?Sized>(
        &mut self,
        tables: &T,
        batch: &Batch,
        mut report: impl FnMut(usize, usize),
    ) -> Result<()> {
        self.clear();
        let requests = batch.requests();
        for (index, (group, written)) in self.groups.iter().zip(&mut self.written).enumerate() {
            for (position, request) in requests.iter().enumerate() {
                insert_writes(tables, index, group, written, position, request, 0)?;
            }
            for (position, request) in requests.iter().enumerate() {
                let flow = scan_reads(tables, index, group, written, position, request, |written, read, block| {
                    for write in written.to(block, group, requests, position, read) {
                        let writer = write.request as usize;
                        if writer != position && last_shared_slot(group, requests, read, write).is_some() {
                            report(position, writer);
                        }
                    }
                    ControlFlow::Continue(())
                })?;
                debug_assert!(flow.is_continue());
            }
        }
        Ok(())
    }

    fn clear(&mut self) {
        for written in &mut self.written {
            written.clear();
        }
    }
}

/// Put the blocks that a request writes at the offset `from` or later into the set.
#[inline]
fn insert_writes<T: Tables + ?Sized>(
    tables: &T,
    index: usize,
    group: &Group,
    written: &mut Written,
    position: usize,
    request: &Request,
    from: u32,
) -> Result<()> {
    if request.scheduled == 0 {
        return Ok(());
    }
    let touched = columns(group, &request.writes());
    let first_late = if request.offset >= from {
        touched.start
    } else if request.offset + request.scheduled <= from {
        touched.end
    } else {
        group.column(request.computed + (from - request.offset))
    };
    let looked_at = if T::TRUSTED { first_late..touched.end } else { touched };
    for column in looked_at {
        let Some(id) = tables.id(index, position, column as usize) else {
            return Err(too_short(tables, index, position, column));
        };
        let Some(block) = group.block(id) else {
            not_null(index, group, position, column, id)?;
            continue;
        };
        if column >= first_late
            && let Some(since) = tables.shared_since(index, block)
        {
            written.insert(block, position, column, since);
        }
    }
    Ok(())
}

#[cold]
fn too_short<T: Tables + ?Sized>(tables: &T, group: usize, request: usize, last_column: u32) -> Error {
    Error::RowTooShort { group, request, found: tables.row(group, request).len(), needed: last_column as usize + 1 }
}

/// Call `hit` for each column of a request's reads whose block is in the set, with the slots it reads of that.
#[inline]
fn scan_reads<T: Tables + ?Sized>(
    tables: &T,
    index: usize,
    group: &Group,
    written: &mut Written,
    position: usize,
    request: &Request,
    mut hit: impl FnMut(&mut Written, &Range<u32>, u32) -> ControlFlow<()>,
) -> Result<ControlFlow<()>> {
    if T::TRUSTED && written.blocks.is_empty() {
        return Ok(ControlFlow::Continue(()));
    }
    for positions in request.reads(group) {
        let scan = Scan { index, group, position, positions: &positions };
        if scan.row(tables, written, &mut hit)?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// A row to be scanned, where it stands and which positions are read.
#[derive(Clone, Copy)]
struct Scan<'a> {
    index: usize,
    group: &'a Group,
    position: usize,
    positions: &'a Range<u32>,
}

impl Scan<'_> {
    #[inline]
    fn row<T: Tables + ?Sized>(
        self,
        tables: &T,
        written: &mut Written,
        hit: impl FnMut(&mut Written, &Range<u32>, u32) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>> {
        let Scan { index, group, position, .. } = self;
        let mut read = columns(group, self.positions);
        if T::TRUSTED && !read.is_empty() {
            read.start = read.start.max(tables.first_column_since(index, position, written.since));
        }
        if read.is_empty() {
            return Ok(ControlFlow::Continue(()));
        }
        written.prepare(group.num_blocks)?;
        let row = tables.row(index, position);
        if row.len() < read.end as usize {
            return Err(too_short(tables, index, position, read.end - 1));
        }
        let touched = read.start as usize..read.end as usize;
        match row {
            Row::I32(ids) => match ids.to_slice() {
                Some(ids) => self.slice(&ids[touched], read.start, written, hit),
                None => self.strided(ids.iter().copied(), &read, written, hit),
            },
            Row::I64(ids) => match ids.to_slice() {
                Some(ids) => self.slice(&ids[touched], read.start, written, hit),
                None => self.strided(ids.iter().copied(), &read, written, hit),
            },
        }
    }

    fn slice<I: BlockId>(
        self,
        ids: &[I],
        first_column: u32,
        written: &mut Written,
        mut hit: impl FnMut(&mut Written, &Range<u32>, u32) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>> {
        let mut from = 0;
        while let Some(place) = written.blocks.find(ids, from) {
            #[expect(clippy::cast_possible_truncation, reason = "columns are positions divided: 31 bits")]
            let column = first_column + place as u32;
            if self.look(column, ids[place].widen(), written, &mut hit)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
            from = place + 1;
        }
        Ok(ControlFlow::Continue(()))
    }

    fn strided<I: BlockId>(
        self,
        ids: impl Iterator<Item = I>,
        read: &Range<u32>,
        written: &mut Written,
        mut hit: impl FnMut(&mut Written, &Range<u32>, u32) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>> {
        for (column, id) in read.clone().zip(ids.skip(read.start as usize)) {
            if self.look(column, id.widen(), written, &mut hit)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    #[inline]
    fn look(
        self,
        column: u32,
        id: i64,
        written: &mut Written,
        hit: &mut impl FnMut(&mut Written, &Range<u32>, u32) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>> {
        match self.group.block(id) {
            Some(block) if written.blocks.contains(block) => {
                Ok(hit(written, &slots(self.group, column, self.positions), block))
            }
            Some(_) => Ok(ControlFlow::Continue(())),
            None => not_null(self.index, self.group, self.position, column, id).map(ControlFlow::Continue),
        }
    }
}

/// What is no block with data must be the null block.
#[cold]
fn not_null(index: usize, group: &Group, request: usize, column: u32, id: i64) -> Result<()> {
    if group.null_block == Some(id) {
        return Ok(());
    }
    let num_blocks = group.num_blocks;
    Err(Error::BlockId { group: index, request, column: column as usize, block: id, num_blocks })
}

/// Of the writes to a block of which a reader reads these slots, the offset and request of the one that comes last among
/// them.
fn furthest_write(
    group: &Group,
    written: &mut Written,
    requests: &[Request],
    reader: usize,
    read: &Range<u32>,
    block: u32,
) -> Option<(u32, usize)> {
    written
        .to(block, group, requests, reader, read)
        .filter_map(|write| {
            let last = last_shared_slot(group, requests, read, write)?;
            Some((last, write.request as usize))
        })
        .max_by_key(|&(last, _)| last)
}

/// Offset of the last token of a write that goes to one of the slots `read`.
#[inline]
fn last_shared_slot(group: &Group, requests: &[Request], read: &Range<u32>, write: Write) -> Option<u32> {
    let writer = &requests[write.request as usize];
    let written = slots_of(group, requests, write);
    let end = read.end.min(written.end);
    if read.start.max(written.start) >= end {
        return None;
    }
    Some(writer.offset_of(write.column * group.tokens_per_column + end - 1))
}

/// The slots that a write goes to.
#[inline]
fn slots_of(group: &Group, requests: &[Request], write: Write) -> Range<u32> {
    slots(group, write.column, &requests[write.request as usize].writes())
}

/// Whether these are all slots of a block.
#[inline]
fn is_whole(group: &Group, slots: &Range<u32>) -> bool {
    slots.start == 0 && slots.end == group.tokens_per_column
}

/// The slots of a column's block that a range of positions covers.
#[inline]
fn slots(group: &Group, column: u32, positions: &Range<u32>) -> Range<u32> {
    let base = column * group.tokens_per_column;
    positions.start.saturating_sub(base)..positions.end.saturating_sub(base).min(group.tokens_per_column)
}

#[cfg(test)]
mod tests {
    use super::{Group, Request, Written};

    /// What makes a row that repeats a block linear: nobody is shown a write twice, nor one that a later one hides.
    #[test]
    fn writes_are_shown_once() {
        let group = Group {
            tokens_per_column: 2,
            num_blocks: 4,
            sliding_window: None,
            prompt_in_view: false,
            attention_chunk_size: None,
            null_block: None,
        };
        // Positions 1 to 8 in five columns: the first and the last in part.
        let writer = Request { computed: 1, scheduled: 8, offset: 0, settled: 0, prompt: 0, read: 1 };
        let requests = [writer, Request { offset: 8, ..writer }];
        let mut written = Written::new(group.num_blocks).unwrap();
        for column in 0..5 {
            written.insert(1, 0, column, 0);
        }
        written.prepare(group.num_blocks).unwrap();
        let mut shown = |reader, slots| {
            let found = written.to(1, &group, &requests, reader, &slots);
            found.map(|write| (write.request, write.column)).collect::<Vec<_>>()
        };
        assert_eq!(shown(2, 0..1), [(0, 4), (0, 3)]);
        assert_eq!(shown(2, 0..2), [(0, 4), (0, 3)], "the reader had seen a part");
        assert_eq!(shown(2, 0..2), []);
        assert_eq!(shown(2, 1..2), []);
        assert_eq!(shown(3, 0..2), [(0, 4), (0, 3)]);
        // Another request hides nothing of the first.
        for column in 0..3 {
            written.insert(1, 1, column, 0);
        }
        let mut shown = |reader| {
            let found = written.to(1, &group, &requests, reader, &(0..2));
            found.map(|write| (write.request, write.column)).collect::<Vec<_>>()
        };
        assert_eq!(shown(3), [(1, 2), (0, 4), (0, 3)]);
        assert_eq!(shown(3), []);
    }
}
