//! A yardstick for benchmarks: what it costs at least to read rows of block ids.

use multiversion::multiversion;

/// Add up the ids of a row, wrapping. No check that looks at every id does less.
#[must_use]
pub fn sum(ids: &[i32]) -> i32 {
    wrapping_sum(ids)
}

// Compiled for the same processors as the scan in `bitset`.
#[multiversion(targets("x86_64+avx+avx2+avx512f+avx512bw+avx512dq+avx512vl+bmi1+bmi2", "x86_64+avx+avx2+bmi1+bmi2",))]
fn wrapping_sum(ids: &[i32]) -> i32 {
    ids.iter().fold(0, |sum, &id| sum.wrapping_add(id))
}
