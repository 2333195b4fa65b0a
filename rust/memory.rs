//! Memory that may not be there: a failed allocation is an error, not the end of the process.

use crate::error::{Error, Result};

/// Make room for so many more items.
#[inline]
pub(crate) fn reserve<T>(items: &mut Vec<T>, more: usize) -> Result<()> {
    items.try_reserve(more).map_err(|_| no_memory::<T>(items.len().saturating_add(more)))
}

/// So many zeroes, of integers or tuples of them.
///
/// The standard library can reserve memory or fail, and it can take zeroed pages that cost nothing until they are used,
/// but not both. A pool of which little is used should not be filled with zeroes, so the first is a trial for the second.
pub(crate) fn zeroed<T: Clone + Default>(len: usize) -> Result<Vec<T>> {
    let mut trial = Vec::<T>::new();
    trial.try_reserve_exact(len).map_err(|_| no_memory::<T>(len))?;
    drop(trial);
    Ok(vec![T::default(); len])
}

#[cold]
fn no_memory<T>(items: usize) -> Error {
    Error::Memory { bytes: items.saturating_mul(size_of::<T>()) }
}
