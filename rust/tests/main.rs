//! The core against oracles that execute, enumerate or recompute instead of reasoning about ranges.

mod exhaustive;
mod mirror;
mod oracle;
mod order;
mod properties;
