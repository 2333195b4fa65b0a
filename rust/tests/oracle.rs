//! What happens when a step runs in microbatches, token by token and KV slot by KV slot.
//!
//! Nothing here compares ranges of blocks or of offsets, and no code of the crate is called: [`Group`] is plain data.

use ubatch_guard::step::Group;

/// One request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Request {
    pub computed: u32,
    pub scheduled: u32,
    pub settled: u32,
    /// Tokens that it reads beyond those computed, as far as it has so many. It does not write them.
    pub ahead: u32,
    /// Leading positions that are its prompt.
    pub prompt: u32,
}

impl Request {
    /// Where its reads of others' making end and its writes begin.
    pub fn read(&self) -> u32 {
        self.computed + self.ahead.min(self.scheduled)
    }
}

/// A step: `rows[group][request][column]` are block ids.
#[derive(Debug, Clone)]
pub struct Step {
    pub groups: Vec<Group>,
    pub requests: Vec<Request>,
    pub rows: Vec<Vec<Vec<i64>>>,
}

impl Step {
    /// The same requests in another batch order.
    pub fn permuted(&self, permutation: &[usize]) -> Step {
        Step {
            groups: self.groups.clone(),
            requests: permutation.iter().map(|&r| self.requests[r]).collect(),
            rows: self.rows.iter().map(|rows| permutation.iter().map(|&r| rows[r].clone()).collect()).collect(),
        }
    }

    pub fn num_tokens(&self) -> u32 {
        self.requests.iter().map(|request| request.scheduled).sum()
    }
}

/// A token of the step: whose it is, and the KV slots it reads and writes.
#[derive(Debug)]
pub struct Token {
    pub request: usize,
    pub reads: Vec<usize>,
    pub writes: Vec<usize>,
}

/// A block id that is neither in the pool nor the null block, where a token reads or writes.
#[derive(Debug, PartialEq, Eq)]
pub struct BadBlock;

/// The tokens of a step in the order they run.
#[derive(Debug)]
pub struct Oracle {
    pub tokens: Vec<Token>,
    /// First slot of each group's pool.
    first_slot: Vec<usize>,
    /// By slot: the offsets of the tokens that write it, ascending.
    writes: Vec<Vec<usize>>,
    slot_size: Vec<usize>,
}

impl Oracle {
    pub fn new(step: &Step) -> Result<Self, BadBlock> {
        let mut first_slot = vec![0];
        for group in &step.groups {
            let pool = group.num_blocks as usize * group.tokens_per_column as usize;
            first_slot.push(first_slot.last().unwrap() + pool);
        }
        let num_slots = *first_slot.last().unwrap();
        let slot = |group: usize, request: usize, position: u32| -> Result<Option<usize>, BadBlock> {
            let rules = &step.groups[group];
            let block = step.rows[group][request][(position / rules.tokens_per_column) as usize];
            if rules.null_block == Some(block) {
                return Ok(None);
            }
            if block < 0 || block >= i64::from(rules.num_blocks) {
                return Err(BadBlock);
            }
            let size = rules.tokens_per_column as usize;
            let block = usize::try_from(block).unwrap();
            Ok(Some(first_slot[group] + block * size + position as usize % size))
        };
        let mut tokens = Vec::new();
        let mut writes = vec![Vec::new(); num_slots];
        for (request, counts) in step.requests.iter().enumerate() {
            for position in counts.computed..counts.computed + counts.scheduled {
                let mut token = Token { request, reads: Vec::new(), writes: Vec::new() };
                for (group, rules) in step.groups.iter().enumerate() {
                    for read in counts.settled..counts.read() {
                        // From which of its tokens on it reads ahead is not known: from the first.
                        if read > position || attends(rules, counts, position, read) {
                            token.reads.extend(slot(group, request, read)?);
                        }
                    }
                    if position >= counts.read()
                        && let Some(slot) = slot(group, request, position)?
                    {
                        token.writes.push(slot);
                        writes[slot].push(tokens.len());
                    }
                }
                tokens.push(token);
            }
        }
        let slot_size = step.groups.iter().map(|group| group.tokens_per_column as usize).collect();
        Ok(Oracle { tokens, first_slot, writes, slot_size })
    }

    /// Run the step in microbatches that begin at offset 0 and at each of the cuts: in each, every token writes, then
    /// every token reads. Whether some read comes before the last write of the slot by another request.
    pub fn violates(&self, cuts: &[u32]) -> bool {
        let mut done = vec![0; self.writes.len()];
        let mut start = 0;
        for end in cuts.iter().map(|&cut| cut as usize).chain([self.tokens.len()]) {
            let end = end.clamp(start, self.tokens.len());
            for slot in self.tokens[start..end].iter().flat_map(|token| &token.writes) {
                done[*slot] += 1;
            }
            for token in &self.tokens[start..end] {
                for &slot in &token.reads {
                    let to_come = &self.writes[slot][done[slot]..];
                    if to_come.iter().any(|&writer| self.tokens[writer].request != token.request) {
                        return true;
                    }
                }
            }
            start = end;
        }
        false
    }

    /// The cuts 0 ..= number of tokens + 1 that violate.
    pub fn unsafe_cuts(&self) -> Vec<u32> {
        let last = u32::try_from(self.tokens.len()).unwrap() + 1;
        (0..=last).filter(|&cut| self.violates(&[cut])).collect()
    }

    /// Slots that some token of the request reads.
    pub fn reads_of(&self, request: usize) -> impl Iterator<Item = usize> + '_ {
        let tokens = self.tokens.iter().filter(move |token| token.request == request);
        tokens.flat_map(|token| token.reads.iter().copied())
    }

    /// Offset of the last token of another request that writes a slot which the request reads.
    pub fn last_write_for(&self, request: usize) -> Option<usize> {
        let writes = self.reads_of(request).flat_map(|slot| &self.writes[slot]).copied();
        writes.filter(|&writer| self.tokens[writer].request != request).max()
    }

    /// Pairs (reader, writer) of requests, ascending.
    pub fn dependencies(&self, num_reqs: usize) -> Vec<(usize, usize)> {
        let mut pairs = Vec::new();
        for reader in 0..num_reqs {
            for slot in self.reads_of(reader) {
                pairs.extend(self.writes[slot].iter().map(|&writer| (reader, self.tokens[writer].request)));
            }
        }
        pairs.retain(|&(reader, writer)| reader != writer);
        pairs.sort_unstable();
        pairs.dedup();
        pairs
    }

    /// Group and block of a slot.
    pub fn block_of(&self, slot: usize) -> (usize, u32) {
        let group = self.first_slot.iter().rposition(|&first| first <= slot).unwrap();
        // Pools are never empty, so the last entry, the end of all pools, is above every slot.
        let block = (slot - self.first_slot[group]) / self.slot_size[group];
        (group, u32::try_from(block).unwrap())
    }
}

/// Whether a query attends to a position before it.
fn attends(group: &Group, request: &Request, query: u32, position: u32) -> bool {
    let in_view = group.prompt_in_view && position < request.prompt;
    let in_window = in_view || group.sliding_window.is_none_or(|window| query - position < window);
    let in_chunk = group.attention_chunk_size.is_none_or(|chunk| query / chunk == position / chunk);
    in_window && in_chunk
}
