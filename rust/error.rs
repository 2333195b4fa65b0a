//! What can be wrong with the input.

use thiserror::Error;

/// Input the guard cannot decide on. Every variant carries the values that are wrong.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Error {
    /// A KV cache group that cannot be.
    #[error("group {group}: {what}")]
    Group {
        /// Index of the group.
        group: usize,
        /// What is wrong with it, with the value.
        what: String,
    },
    /// Memory that could not be had.
    #[error("no memory for {bytes} bytes")]
    Memory {
        /// How much was asked for.
        bytes: usize,
    },
    /// Arrays that should have one entry a request, or one a group, and do not.
    #[error("{what}: length {found}, expected {expected}")]
    Length {
        /// Which argument.
        what: &'static str,
        /// Its length.
        found: usize,
        /// The length the other arguments ask for.
        expected: usize,
    },
    /// A negative token count.
    #[error("{what}[{request}] is {value}; token counts are not negative")]
    NegativeTokens {
        /// Which argument.
        what: &'static str,
        /// Batch position.
        request: usize,
        /// The count.
        value: i64,
    },
    /// A request said to read less than it has computed.
    #[error("num_read_tokens[{request}] is {read}, below its {computed} computed tokens")]
    ReadsTooLittle {
        /// Batch position.
        request: usize,
        /// Tokens it is said to read.
        read: u32,
        /// Tokens it has computed.
        computed: u32,
    },
    /// Token counts so large that positions or offsets leave 31 bits.
    #[error("request {request}: {what} is {value}, above {}", i32::MAX)]
    TooManyTokens {
        /// Which sum.
        what: &'static str,
        /// Batch position.
        request: usize,
        /// The sum.
        value: i64,
    },
    /// A block table row that ends before the request's tokens do.
    #[error("group {group}: the row of request {request} has {found} columns, its tokens need {needed}")]
    RowTooShort {
        /// Index of the group.
        group: usize,
        /// Batch position.
        request: usize,
        /// Columns there.
        found: usize,
        /// Columns needed.
        needed: usize,
    },
    /// A block id outside its pool.
    #[error("group {group}: request {request} has block {block} in column {column}; ids are 0 to {last}", last = i64::from(*num_blocks) - 1)]
    BlockId {
        /// Index of the group.
        group: usize,
        /// Batch position, or the slot in a mirror.
        request: usize,
        /// Block-table column.
        column: usize,
        /// The id.
        block: i64,
        /// Blocks in the pool.
        num_blocks: u32,
    },
    /// A phase that is none.
    #[error("phases[{request}] is {phase}; phases are 0, 1 and 2")]
    Phase {
        /// Batch position.
        request: usize,
        /// The phase.
        phase: i8,
    },
    /// A slot without a row in the mirror.
    #[error("slots[{request}] is {slot}, which holds no request")]
    UnknownSlot {
        /// Batch position.
        request: usize,
        /// The slot.
        slot: i64,
    },
    /// The same slot twice in one batch.
    #[error("slot {slot} stands twice in the batch")]
    DuplicateSlot {
        /// The slot.
        slot: i64,
    },
}

/// Result of everything that reads input.
pub type Result<T> = std::result::Result<T, Error>;
