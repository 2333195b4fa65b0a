//! The core against oracles that execute, enumerate or recompute instead of reasoning about ranges.

mod exhaustive;
mod oracle;
mod order;
mod properties;
