//! Exact check of microbatched LLM inference steps with prefix caching.
#![deny(missing_docs)]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

pub mod bitset;
pub mod error;
pub mod floor;
pub mod hazard;
mod memory;
pub mod mirror;
pub mod order;
#[cfg(feature = "python")]
mod py;
pub mod step;
