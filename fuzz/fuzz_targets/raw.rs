//! Small groups and requests out of bytes.

use arbitrary::Arbitrary;
use ubatch_guard::step::{Batch, Group};

use crate::oracle::Request;

#[derive(Arbitrary, Debug)]
pub struct RawGroup {
    tokens_per_column: u8,
    num_blocks: u8,
    locality: u8,
    size: u8,
    null_block: u8,
}

impl RawGroup {
    pub fn group(&self) -> Group {
        let num_blocks = 1 + u32::from(self.num_blocks % 12);
        let size = 1 + u32::from(self.size % 12);
        Group {
            tokens_per_column: 1 + u32::from(self.tokens_per_column % 5),
            num_blocks,
            sliding_window: (self.locality % 4 == 1).then_some(size),
            prompt_in_view: self.locality % 8 == 5,
            attention_chunk_size: (self.locality % 4 == 2).then_some(size),
            null_block: [None, Some(-1), Some(0), Some(i64::from(num_blocks))][usize::from(self.null_block % 4)],
        }
    }
}

#[derive(Arbitrary, Debug)]
pub struct RawRequest {
    computed: u8,
    scheduled: u8,
    settled: u8,
    ahead: u8,
    prompt: u8,
}

impl RawRequest {
    pub fn request(&self) -> Request {
        Request {
            computed: u32::from(self.computed % 16),
            scheduled: u32::from(self.scheduled % 8),
            // Half of all requests have neither.
            settled: u32::from(self.settled % 32).saturating_sub(16),
            ahead: u32::from(self.ahead % 8).saturating_sub(4),
            prompt: u32::from(self.prompt % 16),
        }
    }
}

/// A block of the pool, or now and then the null block.
pub fn id(group: &Group, byte: u8) -> i64 {
    match group.null_block {
        Some(null) if byte > 240 => null,
        _ => i64::from(u32::from(byte) % group.num_blocks),
    }
}

pub fn batch(requests: &[Request]) -> Batch {
    let mut batch = Batch::default();
    let counts = |count: fn(&Request) -> u32| requests.iter().map(move |request| i64::from(count(request)));
    batch.fill(counts(|r| r.computed), counts(|r| r.scheduled)).unwrap();
    batch.settle(counts(|r| r.settled)).unwrap();
    batch.prompts(counts(|r| r.prompt)).unwrap();
    batch.read_on(counts(|r| r.computed + r.ahead)).unwrap();
    batch
}
