//! A step as the algorithms see it: groups, requests in batch order, rows of block ids.

use std::ops::Range;

use ndarray::{ArrayView1, ArrayView2};

use crate::error::{Error, Result};
use crate::memory::reserve;

/// One KV cache group: how positions map to block-table columns, and which of them a query reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Tokens that one block-table column spans.
    pub tokens_per_column: u32,
    /// Blocks in the pool; ids are below it.
    pub num_blocks: u32,
    /// A query at p attends to `p - window + 1 ..= p`.
    pub sliding_window: Option<u32>,
    /// Beside a window, a query attends to the prompt of its request as well.
    pub prompt_in_view: bool,
    /// A query at p attends from the start of its chunk.
    pub attention_chunk_size: Option<u32>,
    /// The block that holds no data.
    pub null_block: Option<i64>,
}

impl Group {
    /// Check that such a group can be.
    ///
    /// # Errors
    /// [`Error::Group`] for zero sizes, a pool beyond 31 bits, or two kinds of locality at once.
    pub fn validate(&self, group: usize) -> Result<()> {
        let refuse = |what: String| Err(Error::Group { group, what });
        if self.tokens_per_column == 0 {
            return refuse("tokens_per_column is 0".into());
        }
        if self.num_blocks == 0 || self.num_blocks > i32::MAX.unsigned_abs() {
            return refuse(format!("num_blocks is {}; it lies in 1 to {}", self.num_blocks, i32::MAX));
        }
        if self.sliding_window == Some(0) {
            return refuse("sliding_window is 0; a query attends at least to itself".into());
        }
        if self.attention_chunk_size == Some(0) {
            return refuse("attention_chunk_size is 0".into());
        }
        if self.sliding_window.is_some() && self.attention_chunk_size.is_some() {
            return refuse("sliding_window and attention_chunk_size are both set".into());
        }
        if self.prompt_in_view && self.sliding_window.is_none() {
            return refuse("prompt_in_view is set without a sliding_window".into());
        }
        if self.null_block.is_some_and(|null| i32::try_from(null).is_err()) {
            return refuse(format!("null_block is {:?}; block ids have 31 bits", self.null_block));
        }
        Ok(())
    }

    /// Column of a token position.
    #[inline]
    #[must_use]
    pub fn column(&self, position: u32) -> u32 {
        // A shift is several times cheaper than a division, and block sizes are powers of two.
        if self.tokens_per_column.is_power_of_two() {
            position >> self.tokens_per_column.trailing_zeros()
        } else {
            position / self.tokens_per_column
        }
    }

    /// The block with this id, if it is one that holds data.
    #[inline]
    #[must_use]
    pub fn block(&self, id: i64) -> Option<u32> {
        match u32::try_from(id) {
            Ok(block) if block < self.num_blocks && self.null_block != Some(id) => Some(block),
            _ => None,
        }
    }

    /// First position that the first query of a request at `computed` attends to.
    #[inline]
    #[must_use]
    pub fn first_read(&self, computed: u32) -> u32 {
        match (self.sliding_window, self.attention_chunk_size) {
            (Some(window), _) => (computed + 1).saturating_sub(window),
            (None, Some(chunk)) => computed - computed % chunk,
            (None, None) => 0,
        }
    }
}

/// One request of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Tokens taken to be in the cache.
    pub computed: u32,
    /// Tokens this step runs.
    pub scheduled: u32,
    /// Offset of its first token in the step.
    pub offset: u32,
    /// Leading positions that an earlier step wrote.
    pub settled: u32,
    /// Leading positions that are its prompt.
    pub prompt: u32,
    /// Where its reads of others' making end and its writes begin: `computed`, or beyond, within its tokens.
    pub read: u32,
}

impl Request {
    /// Positions of others' making that its queries read in `group`: of the prompt below the window, and from there on.
    #[inline]
    #[must_use]
    pub fn reads(&self, group: &Group) -> [Range<u32>; 2] {
        if self.scheduled == 0 {
            return [0..0, 0..0];
        }
        let first = group.first_read(self.computed);
        let prompt = if group.prompt_in_view { self.settled..self.prompt.min(first) } else { 0..0 };
        [prompt, first.max(self.settled)..self.read]
    }

    /// Whether it is known to read nothing that this step writes: it ran before, and what it has is written.
    #[inline]
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.settled > 0 && self.settled >= self.read
    }

    /// The position behind its last token.
    #[inline]
    #[must_use]
    pub fn end(&self) -> u32 {
        self.computed + self.scheduled
    }

    /// Positions it writes.
    #[inline]
    #[must_use]
    pub fn writes(&self) -> Range<u32> {
        self.read..self.end()
    }

    /// Step offset of the token at a position.
    #[inline]
    #[must_use]
    pub fn offset_of(&self, position: u32) -> u32 {
        self.offset + (position - self.computed)
    }
}

/// Columns that a range of positions touches.
#[inline]
#[must_use]
pub fn columns(group: &Group, positions: &Range<u32>) -> Range<u32> {
    if positions.is_empty() {
        return 0..0;
    }
    group.column(positions.start)..group.column(positions.end - 1) + 1
}

/// The requests of a step in batch order; reused from call to call.
#[derive(Debug, Default)]
pub struct Batch {
    requests: Vec<Request>,
    num_tokens: u32,
}

impl Batch {
    /// Take the requests of a new step, none of whose positions are known to be settled.
    ///
    /// # Errors
    /// Lengths that disagree, negative counts, sums beyond 31 bits; no memory.
    pub fn fill(
        &mut self,
        computed: impl ExactSizeIterator<Item = i64> + Clone,
        scheduled: impl ExactSizeIterator<Item = i64> + Clone,
    ) -> Result<()> {
        let num_reqs = scheduled.len();
        same_length("num_computed_tokens", computed.len(), num_reqs)?;
        self.requests.clear();
        reserve(&mut self.requests, num_reqs)?;
        // One pass without a way out, for the sake of speed: what is wrong shows in the bits.
        let (mut total, mut bits) = (0_i64, 0_i64);
        self.requests.extend(computed.clone().zip(scheduled.clone()).map(|(computed, scheduled)| {
            let offset = total;
            total = total.wrapping_add(scheduled);
            bits |= computed | scheduled | computed.wrapping_add(scheduled) | total;
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked below")]
            let [computed, scheduled, offset] = [computed as u32, scheduled as u32, offset as u32];
            Request { computed, scheduled, offset, settled: 0, prompt: u32::MAX, read: computed }
        }));
        self.num_tokens = u32::try_from(total).unwrap_or(0);
        if (0..=i64::from(i32::MAX)).contains(&bits) {
            Ok(())
        } else {
            Err(self.what_does_not_fit(computed, scheduled))
        }
    }

    /// The first count or sum that is negative or leaves 31 bits.
    #[cold]
    fn what_does_not_fit(
        &mut self,
        computed: impl Iterator<Item = i64>,
        scheduled: impl Iterator<Item = i64>,
    ) -> Error {
        self.requests.clear();
        self.num_tokens = 0;
        let mut total = 0;
        let mut check = |request, computed, scheduled| {
            count("num_computed_tokens", request, computed)?;
            count("num_scheduled_tokens", request, scheduled)?;
            fits("num_computed_tokens + num_scheduled_tokens", request, computed + scheduled)?;
            total += scheduled;
            fits("the sum of num_scheduled_tokens so far", request, total)
        };
        computed
            .zip(scheduled)
            .enumerate()
            .find_map(|(request, (computed, scheduled))| check(request, computed, scheduled).err())
            .unwrap_or(Error::TooManyTokens { what: "the sum of num_scheduled_tokens", request: 0, value: total })
    }

    /// Say how many leading positions of each request an earlier step is known to have written.
    ///
    /// # Errors
    /// A length that disagrees, negative counts.
    pub fn settle(&mut self, settled: impl ExactSizeIterator<Item = i64>) -> Result<()> {
        same_length("num_settled_tokens", settled.len(), self.requests.len())?;
        for (request, (counts, value)) in self.requests.iter_mut().zip(settled).enumerate() {
            counts.settled = count("num_settled_tokens", request, value)?;
        }
        Ok(())
    }

    /// Say how many leading positions of each request are its prompt. Until then all are taken to be.
    ///
    /// # Errors
    /// A length that disagrees, negative counts.
    pub fn prompts(&mut self, prompt: impl ExactSizeIterator<Item = i64>) -> Result<()> {
        same_length("num_prompt_tokens", prompt.len(), self.requests.len())?;
        for (request, (counts, value)) in self.requests.iter_mut().zip(prompt).enumerate() {
            counts.prompt = count("num_prompt_tokens", request, value)?;
        }
        Ok(())
    }

    /// Say up to which position each request reads what others make, where that is beyond its computed tokens. The tokens
    /// below it run, but write nothing. Nobody reads beyond its own tokens.
    ///
    /// # Errors
    /// A length that disagrees, negative counts, counts below the computed tokens.
    pub fn read_on(&mut self, read: impl ExactSizeIterator<Item = i64>) -> Result<()> {
        same_length("num_read_tokens", read.len(), self.requests.len())?;
        for (request, (counts, value)) in self.requests.iter_mut().zip(read).enumerate() {
            let (read, computed) = (count("num_read_tokens", request, value)?, counts.computed);
            if read < computed {
                return Err(Error::ReadsTooLittle { request, read, computed });
            }
            counts.read = read.min(counts.end());
        }
        Ok(())
    }

    /// Which requests have a query of at most so many tokens.
    #[must_use]
    pub fn short(&self, short_query: i64) -> Vec<bool> {
        self.requests.iter().map(|request| i64::from(request.scheduled) <= short_query).collect()
    }

    /// Leave a request out of account but for the room its tokens take: it reads nothing and writes nothing.
    pub(crate) fn leave_out(&mut self, request: usize) {
        let counts = &mut self.requests[request];
        (counts.settled, counts.read) = (u32::MAX, u32::MAX);
    }

    /// The requests.
    #[must_use]
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// Scheduled tokens of the step.
    #[must_use]
    pub fn num_tokens(&self) -> u32 {
        self.num_tokens
    }
}

pub(crate) fn same_length(what: &'static str, found: usize, expected: usize) -> Result<()> {
    if found == expected { Ok(()) } else { Err(Error::Length { what, found, expected }) }
}

fn count(what: &'static str, request: usize, value: i64) -> Result<u32> {
    if value < 0 {
        return Err(Error::NegativeTokens { what, request, value });
    }
    fits(what, request, value)
}

fn fits(what: &'static str, request: usize, value: i64) -> Result<u32> {
    match u32::try_from(value) {
        Ok(small) if small <= i32::MAX.unsigned_abs() => Ok(small),
        _ => Err(Error::TooManyTokens { what, request, value }),
    }
}

/// One row of block ids, of either integer type and any stride.
#[derive(Debug, Clone, Copy)]
pub enum Row<'a> {
    /// 32-bit ids.
    I32(ArrayView1<'a, i32>),
    /// 64-bit ids.
    I64(ArrayView1<'a, i64>),
}

impl Row<'_> {
    /// Columns the row has.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Row::I32(row) => row.len(),
            Row::I64(row) => row.len(),
        }
    }

    /// Whether the row has no columns.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Where the rows of a batch come from.
pub trait Tables {
    /// Whether the ids in the rows were checked when they came. What was not is checked wherever the step reads or
    /// writes it, also where the answer does not depend on it; only of the requests in front that are wholly settled the
    /// caller vouches for the rows too, as long as they are asked for unsafe cuts alone.
    const TRUSTED: bool;

    /// The row of the request at a batch position. Both indices are within the batch and the groups.
    fn row(&self, group: usize, request: usize) -> Row<'_>;

    /// One id of such a row, if the row reaches that far.
    fn id(&self, group: usize, request: usize, column: usize) -> Option<i64>;

    /// None if no other row can hold the block; else the time at which it came into use (see
    /// [`Tables::first_column_since`]). Tables without a history say: at time 0.
    #[inline]
    fn shared_since(&self, _group: usize, _block: u32) -> Option<u32> {
        Some(0)
    }

    /// First column in which the row can hold a block that came into use at `since` or later.
    #[inline]
    fn first_column_since(&self, _group: usize, _request: usize, _since: u32) -> u32 {
        0
    }
}

/// A block table as an engine holds it: one row a request, in batch order.
#[derive(Debug, Clone, Copy)]
pub enum Table<'a> {
    /// 32-bit ids.
    I32(ArrayView2<'a, i32>),
    /// 64-bit ids.
    I64(ArrayView2<'a, i64>),
}

impl Table<'_> {
    /// Rows the table has.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        match self {
            Table::I32(table) => table.nrows(),
            Table::I64(table) => table.nrows(),
        }
    }

    /// Columns of every row.
    #[must_use]
    pub fn num_columns(&self) -> usize {
        match self {
            Table::I32(table) => table.ncols(),
            Table::I64(table) => table.ncols(),
        }
    }
}

impl Tables for [Table<'_>] {
    const TRUSTED: bool = false;

    #[inline]
    fn row(&self, group: usize, request: usize) -> Row<'_> {
        match &self[group] {
            Table::I32(table) => Row::I32(table.row(request)),
            Table::I64(table) => Row::I64(table.row(request)),
        }
    }

    #[inline]
    fn id(&self, group: usize, request: usize, column: usize) -> Option<i64> {
        match &self[group] {
            Table::I32(table) => table.get((request, column)).map(|&id| i64::from(id)),
            Table::I64(table) => table.get((request, column)).copied(),
        }
    }
}

/// Check that there is a table for each group, with a row for each request that reaches as far as its tokens.
///
/// # Errors
/// [`Error::Length`] or [`Error::RowTooShort`] for the first that does not.
pub fn rows_reach(groups: &[Group], tables: &[Table<'_>], batch: &Batch) -> Result<()> {
    same_length("block_tables", tables.len(), groups.len())?;
    for (index, (group, table)) in groups.iter().zip(tables).enumerate() {
        if table.num_rows() < batch.requests().len() {
            return Err(Error::Length {
                what: "a block table",
                found: table.num_rows(),
                expected: batch.requests().len(),
            });
        }
        let found = table.num_columns();
        let needs =
            |counts: &Request| if counts.scheduled == 0 { 0 } else { columns(group, &(0..counts.end())).end as usize };
        // The longest first: it is enough where nothing is wrong.
        let longest = batch.requests().iter().filter(|counts| counts.scheduled > 0).max_by_key(|counts| counts.end());
        if longest.is_some_and(|counts| needs(counts) > found)
            && let Some(request) = batch.requests().iter().position(|counts| needs(counts) > found)
        {
            return Err(Error::RowTooShort { group: index, request, found, needed: needs(&batch.requests()[request]) });
        }
    }
    Ok(())
}
