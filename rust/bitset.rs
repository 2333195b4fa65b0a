//! Set of block ids, with a search for its members in long rows.

use multiversion::multiversion;

use crate::error::Result;
use crate::memory::zeroed;

/// A set of block ids below a fixed bound, and the range they span.
///
/// The range is what makes long rows cheap: a pool hands out neighbouring ids together, so most stretches of a
/// reader's row lie wholly outside the range of the blocks being written, and comparing with two bounds runs at
/// the speed of memory, while a look into the bits costs a dependent load per id.
#[derive(Debug)]
pub struct BlockSet {
    words: Vec<usize>,
    num_blocks: u32,
    low: u32,
    high: u32,
}

impl BlockSet {
    /// An empty set of ids below `num_blocks`.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::error::Error::Memory).
    pub fn new(num_blocks: u32) -> Result<Self> {
        let words = zeroed((num_blocks as usize).div_ceil(WORD))?;
        Ok(Self { words, num_blocks, low: u32::MAX, high: 0 })
    }

    /// Whether no id is in the set.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.low > self.high
    }

    /// Whether the id is in the set.
    #[inline]
    #[must_use]
    pub fn contains(&self, block: u32) -> bool {
        self.words.get(block as usize / WORD).is_some_and(|word| (word >> (block as usize % WORD)) & 1 == 1)
    }

    /// Add an id below the bound; whether it is new.
    #[inline]
    pub fn insert(&mut self, block: u32) -> bool {
        self.low = self.low.min(block);
        self.high = self.high.max(block);
        let (word, bit) = (&mut self.words[block as usize / WORD], 1 << (block as usize % WORD));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    /// Empty the set, given (at least) the ids in it: the bits of a large pool are not worth a sweep per step.
    pub fn clear(&mut self, members: impl Iterator<Item = u32>) {
        for block in members {
            self.words[block as usize / WORD] &= !(1 << (block as usize % WORD));
        }
        (self.low, self.high) = (u32::MAX, 0);
    }

    /// Bytes of heap memory held.
    #[must_use]
    pub fn nbytes(&self) -> usize {
        size_of_val(&*self.words)
    }

    /// The first place at or after `from` whose id is in the set or outside the pool.
    #[inline]
    #[must_use]
    pub fn find<T: BlockId>(&self, ids: &[T], from: usize) -> Option<usize> {
        let rest = ids.get(from..)?;
        // Shared prefixes are runs of members: do not start the long search for each of them.
        if self.is_suspect(rest.first()?.widen()) {
            return Some(from);
        }
        T::find_in(rest, self).map(|place| from + place)
    }

    /// Whether an id is in the set or outside the pool.
    #[inline]
    fn is_suspect(&self, id: i64) -> bool {
        u32::try_from(id).map_or(true, |id| id >= self.num_blocks || self.contains(id))
    }
}

/// Ids compared in one go: enough to keep vector units busy, few enough that a hit costs little.
const CHUNK: usize = 64;

/// Integer types block tables come in.
pub trait BlockId: Copy {
    /// The id, widened.
    fn widen(self) -> i64;

    /// The first place whose id is in the set or outside the pool.
    fn find_in(ids: &[Self], set: &BlockSet) -> Option<usize>;
}

macro_rules! block_id {
    ($int:ty, $unsigned:ty, $find:ident) => {
        // Plain loops, which the compiler turns into vector code. A wheel is built for the oldest processors,
        // so versions for wider ones are compiled beside that and chosen when the program runs.
        #[multiversion(targets(
            "x86_64+avx+avx2+avx512f+avx512bw+avx512dq+avx512vl+bmi1+bmi2",
            "x86_64+avx+avx2+bmi1+bmi2",
        ))]
        fn $find(ids: &[$int], set: &BlockSet) -> Option<usize> {
            let low = <$unsigned>::from(set.low);
            let width = if set.is_empty() { 0 } else { <$unsigned>::from(set.high - set.low + 1) };
            let num_blocks = <$unsigned>::from(set.num_blocks);
            let words = &set.words[..];
            let (chunks, rest) = ids.as_chunks::<CHUNK>();
            for (index, chunk) in chunks.iter().enumerate() {
                let (mut within, mut top) = (false, 0);
                for &id in chunk {
                    let id = id.cast_unsigned();
                    within |= id.wrapping_sub(low) < width;
                    top = top.max(id);
                }
                if !within && top < num_blocks {
                    continue;
                }
                let mut found = top >= num_blocks;
                for &id in chunk {
                    #[allow(clippy::cast_possible_truncation, reason = "an id that does not fit is found above")]
                    let id = id.cast_unsigned() as usize;
                    let word = words.get(id / WORD).copied().unwrap_or(0);
                    found |= (word >> (id % WORD)) & 1 == 1;
                }
                if found {
                    let place = chunk.iter().position(|&id| set.is_suspect(i64::from(id)))?;
                    return Some(index * CHUNK + place);
                }
            }
            let place = rest.iter().position(|&id| set.is_suspect(i64::from(id)))?;
            Some(ids.len() - rest.len() + place)
        }

        impl BlockId for $int {
            #[inline]
            fn widen(self) -> i64 {
                i64::from(self)
            }

            #[inline]
            fn find_in(ids: &[Self], set: &BlockSet) -> Option<usize> {
                $find(ids, set)
            }
        }
    };
}

/// Bits in a word of the set.
const WORD: usize = usize::BITS as usize;

block_id!(i32, u32, find_i32);
block_id!(i64, u64, find_i64);
