//! Set of block ids with a fast "none of these" over whole rows.

use fixedbitset::FixedBitSet;
use multiversion::multiversion;

/// A set of block ids below a fixed bound, and the range they span.
///
/// The range is what makes long rows cheap: a pool hands out neighbouring ids together, so most stretches of a
/// reader's row lie wholly outside the range of the blocks being written, and comparing with two bounds runs at
/// the speed of memory, while a look into the bits costs a dependent load per id.
#[derive(Debug)]
pub struct BlockSet {
    bits: FixedBitSet,
    low: u32,
    high: u32,
}

impl BlockSet {
    /// An empty set of ids below `num_blocks`.
    #[must_use]
    pub fn new(num_blocks: u32) -> Self {
        Self { bits: FixedBitSet::with_capacity(num_blocks as usize), low: u32::MAX, high: 0 }
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
        self.bits.contains(block as usize)
    }

    /// Add an id below the bound; whether it is new.
    #[inline]
    pub fn insert(&mut self, block: u32) -> bool {
        self.low = self.low.min(block);
        self.high = self.high.max(block);
        !self.bits.put(block as usize)
    }

    /// Empty the set, given (at least) the ids in it: the bits of a large pool are not worth a sweep per step.
    pub fn clear(&mut self, members: impl Iterator<Item = u32>) {
        for block in members {
            self.bits.set(block as usize, false);
        }
        (self.low, self.high) = (u32::MAX, 0);
    }

    /// Bytes of heap memory held.
    #[must_use]
    pub fn nbytes(&self) -> usize {
        self.bits.len().div_ceil(8)
    }

    fn bounds(&self) -> Bounds {
        Bounds {
            low: self.low,
            width: if self.is_empty() { 0 } else { self.high - self.low + 1 },
            num_blocks: u32::try_from(self.bits.len()).unwrap_or(u32::MAX),
        }
    }
}

/// What a row is compared with at full speed: the range of a set's ids, and of the pool's.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    low: u32,
    width: u32,
    num_blocks: u32,
}

/// Ids compared in one go; small enough that a hit costs few single looks.
const CHUNK: usize = 64;

/// Integer types block tables come in.
pub trait BlockId: Copy {
    /// The id, widened.
    fn widen(self) -> i64;

    /// Where the first chunk starts that holds an id within the bounds or outside the pool, if any does.
    fn first_suspect(ids: &[Self], bounds: Bounds) -> Option<usize>;
}

macro_rules! block_id {
    ($int:ty, $unsigned:ty, $scan:ident) => {
        // The plain loop is what the compiler turns into vector code; a wheel is built for the oldest
        // processors, so the wider versions are compiled beside it and chosen when the program runs.
        #[multiversion(targets(
            "x86_64+avx+avx2+avx512f+avx512bw+avx512dq+avx512vl+bmi1+bmi2",
            "x86_64+avx+avx2+bmi1+bmi2",
        ))]
        fn $scan(ids: &[$int], bounds: Bounds) -> Option<usize> {
            let low = <$unsigned>::from(bounds.low);
            let width = <$unsigned>::from(bounds.width);
            let num_blocks = <$unsigned>::from(bounds.num_blocks);
            ids.chunks(CHUNK)
                .position(|chunk| {
                    chunk.iter().fold(false, |found, &id| {
                        let id = id.cast_unsigned();
                        found | (id.wrapping_sub(low) < width) | (id >= num_blocks)
                    })
                })
                .map(|chunk| chunk * CHUNK)
        }

        impl BlockId for $int {
            #[inline]
            fn widen(self) -> i64 {
                i64::from(self)
            }

            #[inline]
            fn first_suspect(ids: &[Self], bounds: Bounds) -> Option<usize> {
                $scan(ids, bounds)
            }
        }
    };
}

block_id!(i32, u32, first_suspect_i32);
block_id!(i64, u64, first_suspect_i64);

/// The places in a row whose id is in the set or outside the pool, with some others: everything that
/// needs a second look, as `(index, id)`, ascending.
pub fn suspects<'a, T: BlockId>(ids: &'a [T], set: &BlockSet) -> impl Iterator<Item = (usize, i64)> + 'a {
    let bounds = set.bounds();
    let mut start = 0;
    let mut within = 0..0;
    std::iter::from_fn(move || {
        loop {
            for index in within.by_ref() {
                let id = ids[index].widen();
                let offset = id - i64::from(bounds.low);
                if (0..i64::from(bounds.width)).contains(&offset) || !(0..i64::from(bounds.num_blocks)).contains(&id) {
                    return Some((index, id));
                }
            }
            let chunk = start + T::first_suspect(&ids[start..], bounds)?;
            start = (chunk + CHUNK).min(ids.len());
            within = chunk..start;
        }
    })
}
