//! The Python module `ubatch_guard._core`: borrow, check, convert, map errors. The only file that knows Python or numpy.

use std::panic::{AssertUnwindSafe, catch_unwind};

use numpy::ndarray::Dimension;
use numpy::{
    Element, IntoPyArray, PyArray, PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray, PyReadonlyArray1,
    PyReadonlyArray2, PyUntypedArrayMethods,
};
use pyo3::PyClass;
use pyo3::exceptions::{PyOverflowError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pyclass::boolean_struct::False;
use pyo3::types::{PyDict, PyList};
use pyo3::{create_exception, ffi, intern};
use smallvec::SmallVec;

use crate::error::Error;
use crate::floor;
use crate::hazard::{self, Cuts, UnsafeCuts};
use crate::memory;
use crate::mirror;
use crate::order::{Order, Planner};
use crate::step::{Batch, Group, Table, rows_reach};

create_exception!(
    ubatch_guard,
    GuardError,
    PyValueError,
    "Input that the guard cannot decide on; the message has the values."
);
create_exception!(
    ubatch_guard,
    DtypeError,
    GuardError,
    "An array that is neither int32 nor int64, or ids that are no integers."
);
create_exception!(
    ubatch_guard,
    ShapeError,
    GuardError,
    "Lengths or dimensions that disagree, or a block table row shorter than its request needs."
);
create_exception!(
    ubatch_guard,
    TokenCountError,
    GuardError,
    "A negative token count, or counts whose sum does not fit."
);
create_exception!(ubatch_guard, BlockIdError, GuardError, "A block id outside its pool.");
create_exception!(
    ubatch_guard,
    GroupError,
    GuardError,
    "A KV cache group that cannot be: no tokens per column, a window of 0, and the like."
);
create_exception!(ubatch_guard, PhaseError, GuardError, "A phase that is none of 0, 1, 2, or phases that are missing.");
create_exception!(ubatch_guard, UnknownRequestError, GuardError, "A request id or slot the mirror has no row for.");
create_exception!(
    ubatch_guard,
    DuplicateRequestError,
    GuardError,
    "A request id that the mirror holds already, or that stands twice in a batch."
);
create_exception!(
    ubatch_guard,
    AllocationError,
    GuardError,
    "Memory that could not be had, for a pool or a row that is too large; nothing has changed."
);
create_exception!(
    ubatch_guard,
    BusyError,
    GuardError,
    "The object is in use: by another thread, or by the very call whose arguments call it."
);
create_exception!(ubatch_guard, InternalError, PyRuntimeError, "A defect of the guard itself.");

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        match error {
            Error::Group { .. } => GroupError::new_err(message),
            Error::Length { .. } | Error::RowTooShort { .. } => ShapeError::new_err(message),
            Error::NegativeTokens { .. } | Error::ReadsTooLittle { .. } | Error::TooManyTokens { .. } => {
                TokenCountError::new_err(message)
            }
            Error::Memory { .. } => AllocationError::new_err(message),
            Error::BlockId { .. } => BlockIdError::new_err(message),
            Error::Phase { .. } => PhaseError::new_err(message),
            Error::UnknownSlot { .. } => UnknownRequestError::new_err(message),
            Error::DuplicateSlot { .. } => DuplicateRequestError::new_err(message),
        }
    }
}

/// Run `body`; a panic becomes an exception. `PyO3`'s own for this is no `Exception`, and would get past every handler of
/// an engine.
fn contained<T>(body: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        Err(InternalError::new_err(text.unwrap_or("panic").to_owned()))
    })
}

/// Run `body` with the object for itself.
fn exclusive<C, T>(object: &Bound<'_, C>, body: impl FnOnce(&mut C) -> PyResult<T>) -> PyResult<T>
where
    C: PyClass<Frozen = False>,
{
    contained(|| body(&mut *object.try_borrow_mut().map_err(|_| busy(object))?))
}

/// Run `body` with the object, which it does not change.
fn shared<C: PyClass, T>(object: &Bound<'_, C>, body: impl FnOnce(&C) -> PyResult<T>) -> PyResult<T> {
    contained(|| body(&*object.try_borrow().map_err(|_| busy(object))?))
}

#[cold]
fn busy(object: &Bound<'_, impl PyClass>) -> PyErr {
    let name = object.as_any().get_type().name().map_or_else(|_| "?".to_owned(), |name| name.to_string());
    BusyError::new_err(format!("the {name} is in use by another call"))
}

/// (first, last, reader, writer, group, block)
type UnsafeTuple = (u32, u32, usize, usize, usize, u32);
/// (permutation, swaps, demoted)
type OrderTuple = (Vec<usize>, Vec<(usize, usize)>, Vec<usize>);

fn unsafe_tuples(found: &[UnsafeCuts]) -> Vec<UnsafeTuple> {
    found
        .iter()
        .map(|range| {
            let hazard = range.hazard;
            (range.first, range.last, hazard.reader, hazard.writer, hazard.group, hazard.block)
        })
        .collect()
}

fn order_tuple(order: Option<Order>) -> Option<OrderTuple> {
    order.map(|order| (order.permutation, order.swaps, order.demoted))
}

/// A Python integer, clipped to 64 bits.
#[derive(Clone, Copy)]
struct Clipped(i64);

impl<'py> FromPyObject<'_, 'py> for Clipped {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match object.extract() {
            Ok(value) => Ok(Self(value)),
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
                Ok(Self(if object.lt(0)? { i64::MIN } else { i64::MAX }))
            }
            Err(error) => Err(error),
        }
    }
}

/// A range of cuts from optional Python integers; what lies outside any step is clipped.
fn cuts(first: Option<Clipped>, last: Option<Clipped>) -> Cuts {
    let clip = |Clipped(cut): Clipped| u32::try_from(cut.max(0)).unwrap_or(u32::MAX);
    Cuts {
        first: first.map_or(Cuts::ALL.first, clip),
        // A last cut below 0 leaves no cut at all.
        last: last.map_or(Cuts::ALL.last, clip),
    }
}

/// The groups from objects with the attributes of `ubatch_guard.KVCacheGroup`.
fn groups(objects: &Bound<'_, PyAny>) -> PyResult<Vec<Group>> {
    let py = objects.py();
    let mut groups = Vec::new();
    for (index, object) in objects.try_iter()?.enumerate() {
        let object = object?;
        let wrong = |name: &str, value: &Bound<'_, PyAny>| {
            let value = text_of(value);
            GroupError::new_err(format!("group {index}: {name} is {value}"))
        };
        let size = |name: &Bound<'_, pyo3::types::PyString>| -> PyResult<u32> {
            let value = object.getattr(name)?;
            value.extract().map_err(|_| wrong(&name.to_string(), &value))
        };
        let optional = |name: &Bound<'_, pyo3::types::PyString>| -> PyResult<Option<u32>> {
            let value = object.getattr(name)?;
            value.extract().map_err(|_| wrong(&name.to_string(), &value))
        };
        let null_block = object.getattr(intern!(py, "null_block"))?;
        let prompt_in_view = object.getattr(intern!(py, "prompt_in_view"))?;
        groups.push(Group {
            tokens_per_column: size(intern!(py, "tokens_per_column"))?,
            num_blocks: size(intern!(py, "num_blocks"))?,
            sliding_window: optional(intern!(py, "sliding_window"))?,
            attention_chunk_size: optional(intern!(py, "attention_chunk_size"))?,
            prompt_in_view: prompt_in_view.extract().map_err(|_| wrong("prompt_in_view", &prompt_in_view))?,
            null_block: null_block.extract().map_err(|_| wrong("null_block", &null_block))?,
        });
    }
    Ok(groups)
}

/// Borrow an array to read. A view whose elements are not where multiples of the element size put them (a field of a
/// structured array) is copied first, for a view of strides cannot express it.
fn readable<'py, T: Element, D: Dimension>(array: &Bound<'py, PyArray<T, D>>) -> PyResult<PyReadonlyArray<'py, T, D>> {
    let size = size_of::<T>().cast_signed();
    if array.strides().iter().all(|stride| stride % size == 0) && array.data().is_aligned() {
        return Ok(array.try_readonly()?);
    }
    let copy = array.call_method0(intern!(array.py(), "copy"))?;
    Ok(copy.cast_into::<PyArray<T, D>>()?.try_readonly()?)
}

fn refused(name: &str, dimensions: usize, object: &Bound<'_, PyAny>) -> PyErr {
    let found = match object.cast::<numpy::PyUntypedArray>() {
        Ok(array) if array.ndim() != dimensions => {
            return ShapeError::new_err(format!("{name} has {} dimensions, expected {dimensions}", array.ndim()));
        }
        Ok(array) => array.dtype().to_string(),
        Err(_) => object.get_type().to_string(),
    };
    DtypeError::new_err(format!("{name} is {found}, expected a numpy array of int32 or int64"))
}

/// A borrowed one-dimensional array of integers, contiguous.
enum Ints<'py> {
    I32(PyReadonlyArray1<'py, i32>),
    I64(PyReadonlyArray1<'py, i64>),
}

impl<'py> Ints<'py> {
    fn borrow(name: &str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        if let Ok(array) = object.cast::<PyArray1<i32>>() {
            return Ok(Ints::I32(contiguous(array)?));
        }
        if let Ok(array) = object.cast::<PyArray1<i64>>() {
            return Ok(Ints::I64(contiguous(array)?));
        }
        Err(refused(name, 1, object))
    }
}

/// Borrow a short array to read, or a copy of it where it is strided.
fn contiguous<'py, T: Element>(array: &Bound<'py, PyArray1<T>>) -> PyResult<PyReadonlyArray1<'py, T>> {
    if array.is_c_contiguous() && array.data().is_aligned() {
        return Ok(array.try_readonly()?);
    }
    let copy = array.call_method0(intern!(array.py(), "copy"))?;
    Ok(copy.cast_into::<PyArray1<T>>()?.try_readonly()?)
}

/// Evaluate an expression with `$values` an iterator of i64 over the integers, whatever their type.
macro_rules! with_values {
    ($values:ident of $ints:expr => $body:expr) => {
        match $ints {
            Ints::I32(array) => {
                let $values = array.as_slice()?.iter().map(|&value| i64::from(value));
                $body
            }
            Ints::I64(array) => {
                let $values = array.as_slice()?.iter().copied();
                $body
            }
        }
    };
}

/// Counts of a step that it need not have.
#[derive(Clone, Copy)]
struct More<'a, 'py> {
    settled: Option<&'a Bound<'py, PyAny>>,
    read: Option<&'a Bound<'py, PyAny>>,
    prompt: Option<&'a Bound<'py, PyAny>>,
}

fn fill(batch: &mut Batch, counts: [&Bound<'_, PyAny>; 2], more: More<'_, '_>) -> PyResult<()> {
    let computed = Ints::borrow("num_computed_tokens", counts[0])?;
    let scheduled = Ints::borrow("num_scheduled_tokens", counts[1])?;
    with_values!(computed of &computed => with_values!(scheduled of &scheduled => batch.fill(computed, scheduled)))?;
    if let Some(settled) = more.settled {
        let settled = Ints::borrow("num_settled_tokens", settled)?;
        with_values!(settled of &settled => batch.settle(settled))?;
    }
    if let Some(read) = more.read {
        let read = Ints::borrow("num_read_tokens", read)?;
        with_values!(read of &read => batch.read_on(read))?;
    }
    if let Some(prompt) = more.prompt {
        let prompt = Ints::borrow("num_prompt_tokens", prompt)?;
        with_values!(prompt of &prompt => batch.prompts(prompt))?;
    }
    Ok(())
}

/// A borrowed block table.
enum Ids<'py> {
    I32(PyReadonlyArray2<'py, i32>),
    I64(PyReadonlyArray2<'py, i64>),
}

impl<'py> Ids<'py> {
    fn borrow(object: &Bound<'py, PyAny>) -> PyResult<Self> {
        if let Ok(array) = object.cast::<PyArray2<i32>>() {
            return Ok(Ids::I32(readable(array)?));
        }
        if let Ok(array) = object.cast::<PyArray2<i64>>() {
            return Ok(Ids::I64(readable(array)?));
        }
        Err(refused("a block table", 2, object))
    }

    fn table(&self) -> Table<'_> {
        match self {
            Ids::I32(array) => Table::I32(array.as_array()),
            Ids::I64(array) => Table::I64(array.as_array()),
        }
    }
}

/// From so many block ids on, a question lets other Python threads run: reading them takes longer than letting go.
const MANY_IDS: usize = 1 << 16;

/// Engines have one or two KV cache groups, seldom more: up to this many tables take no memory from the heap.
const FEW: usize = 4;

/// Stateless check over numpy block tables; keeps scratch between calls.
#[pyclass(module = "ubatch_guard._core")]
struct Checker {
    core: hazard::Checker,
    batch: Batch,
    found: Vec<UnsafeCuts>,
    planner: Planner,
}

impl Checker {
    /// Borrow a step's arrays, check that they fit each other, and ask.
    fn ask<T>(
        &mut self,
        block_tables: &Bound<'_, PyAny>,
        counts: [&Bound<'_, PyAny>; 2],
        more: More<'_, '_>,
        question: impl FnOnce(&mut Self, &[Table<'_>]) -> crate::error::Result<T> + Send,
    ) -> PyResult<T>
    where
        T: Send,
    {
        fill(&mut self.batch, counts, more)?;
        let ids: SmallVec<[Ids<'_>; FEW]> =
            block_tables.try_iter()?.map(|table| Ids::borrow(&table?)).collect::<PyResult<_>>()?;
        let tables: SmallVec<[Table<'_>; FEW]> = ids.iter().map(Ids::table).collect();
        rows_reach(self.core.groups(), &tables, &self.batch)?;
        let num_reqs = self.batch.requests().len();
        let num_ids: usize = tables.iter().map(|table| num_reqs.saturating_mul(table.num_columns())).sum();
        if num_ids < MANY_IDS {
            return Ok(question(self, &tables)?);
        }
        Ok(block_tables.py().detach(|| question(self, &tables))?)
    }
}

#[expect(clippy::too_many_arguments, reason = "those of the Python methods")]
#[pymethods]
impl Checker {
    #[new]
    fn new(groups: &Bound<'_, PyAny>) -> PyResult<Self> {
        let core = hazard::Checker::new(self::groups(groups)?)?;
        Ok(Self { core, batch: Batch::default(), found: Vec::new(), planner: Planner::default() })
    }

    #[pyo3(signature = (block_tables, num_computed_tokens, num_scheduled_tokens, first_cut=None, last_cut=None, num_settled_tokens=None, num_read_tokens=None, num_prompt_tokens=None))]
    fn is_safe(
        slf: &Bound<'_, Self>,
        block_tables: &Bound<'_, PyAny>,
        num_computed_tokens: &Bound<'_, PyAny>,
        num_scheduled_tokens: &Bound<'_, PyAny>,
        first_cut: Option<Clipped>,
        last_cut: Option<Clipped>,
        num_settled_tokens: Option<&Bound<'_, PyAny>>,
        num_read_tokens: Option<&Bound<'_, PyAny>>,
        num_prompt_tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<bool> {
        exclusive(slf, |this| {
            this.ask(
                block_tables,
                [num_computed_tokens, num_scheduled_tokens],
                More { settled: num_settled_tokens, read: num_read_tokens, prompt: num_prompt_tokens },
                |this, tables| this.core.is_safe(tables, &this.batch, cuts(first_cut, last_cut)),
            )
        })
    }

    #[pyo3(signature = (block_tables, num_computed_tokens, num_scheduled_tokens, first_cut=None, last_cut=None, num_settled_tokens=None, num_read_tokens=None, num_prompt_tokens=None))]
    fn unsafe_cuts(
        slf: &Bound<'_, Self>,
        block_tables: &Bound<'_, PyAny>,
        num_computed_tokens: &Bound<'_, PyAny>,
        num_scheduled_tokens: &Bound<'_, PyAny>,
        first_cut: Option<Clipped>,
        last_cut: Option<Clipped>,
        num_settled_tokens: Option<&Bound<'_, PyAny>>,
        num_read_tokens: Option<&Bound<'_, PyAny>>,
        num_prompt_tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<UnsafeTuple>> {
        exclusive(slf, |this| {
            this.ask(
                block_tables,
                [num_computed_tokens, num_scheduled_tokens],
                More { settled: num_settled_tokens, read: num_read_tokens, prompt: num_prompt_tokens },
                |this, tables| {
                    this.core.unsafe_cuts(tables, &this.batch, cuts(first_cut, last_cut), &mut this.found)?;
                    Ok(unsafe_tuples(&this.found))
                },
            )
        })
    }

    #[pyo3(signature = (block_tables, num_computed_tokens, num_scheduled_tokens, phases=None, num_settled_tokens=None, short_query=None, num_read_tokens=None, num_prompt_tokens=None))]
    fn order(
        slf: &Bound<'_, Self>,
        block_tables: &Bound<'_, PyAny>,
        num_computed_tokens: &Bound<'_, PyAny>,
        num_scheduled_tokens: &Bound<'_, PyAny>,
        phases: Option<&Bound<'_, PyAny>>,
        num_settled_tokens: Option<&Bound<'_, PyAny>>,
        short_query: Option<Clipped>,
        num_read_tokens: Option<&Bound<'_, PyAny>>,
        num_prompt_tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<OrderTuple>> {
        exclusive(slf, |this| {
            let phases = phases.map(self::phases).transpose()?;
            this.ask(
                block_tables,
                [num_computed_tokens, num_scheduled_tokens],
                More { settled: num_settled_tokens, read: num_read_tokens, prompt: num_prompt_tokens },
                |this, tables| {
                    let (planner, requests) = (&mut this.planner, this.batch.requests().len());
                    planner.clear();
                    this.core.dependencies(tables, &this.batch, |reader, writer| planner.depend(reader, writer))?;
                    let short = short_query.map(|Clipped(most)| this.batch.short(most));
                    Ok(order_tuple(planner.order(requests, phases.as_deref(), short.as_deref())?))
                },
            )
        })
    }
}

fn phases(object: &Bound<'_, PyAny>) -> PyResult<Vec<i8>> {
    let array = object.cast::<PyArray1<i8>>().map_err(|_| match object.cast::<numpy::PyUntypedArray>() {
        Ok(array) if array.ndim() != 1 => refused("phases", 1, object),
        _ => DtypeError::new_err("phases is not a numpy array of int8"),
    })?;
    Ok(array.try_readonly()?.as_array().to_vec())
}

/// Slots that memory is taken for before the ids are seen.
const FEW_SLOTS: usize = 1 << 12;

/// Block tables of the live requests on the host, with a count per block of the rows that hold it.
#[pyclass(module = "ubatch_guard._core")]
struct Mirror {
    core: mirror::Mirror,
    /// Request id to slot.
    slots: Py<PyDict>,
    batch: Batch,
    found: Vec<UnsafeCuts>,
    planner: Planner,
    /// Slot, group and length before it of each row that the latest call appended to.
    appended: Vec<(usize, usize, usize)>,
}

impl Mirror {
    fn slot(&self, request_id: &Bound<'_, PyAny>) -> PyResult<usize> {
        match self.slots.bind(request_id.py()).get_item(request_id)? {
            Some(slot) => slot.extract(),
            None => Err(unknown(request_id)),
        }
    }

    /// Take a change's block ids, one row a group.
    fn stage(&mut self, request_id: &Bound<'_, PyAny>, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        let expected = self.core.groups().len();
        let mut group = 0;
        for row in rows.try_iter()? {
            if group < expected {
                self.stage_row(request_id, group, &row?)?;
            }
            group += 1;
        }
        if group != expected {
            let what = format!("rows of request {}: {group}, one for each of {expected} groups", request_id.repr()?);
            return Err(ShapeError::new_err(what));
        }
        Ok(())
    }

    fn stage_row(&mut self, request_id: &Bound<'_, PyAny>, group: usize, row: &Bound<'_, PyAny>) -> PyResult<()> {
        if let Ok(list) = row.cast::<PyList>()
            && self.core.stage(0, group, plain_ids(list)).is_ok()
        {
            return Ok(());
        }
        let staged = if row.cast::<numpy::PyUntypedArray>().is_ok() {
            let ids = Ints::borrow("a row of block ids", row)?;
            with_values!(values of &ids => self.core.stage(0, group, values))
        } else {
            let mut wrong = None;
            let ids = row
                .try_iter()?
                .map_while(|id| id.and_then(|id| block_id(&id)).map_err(|error| wrong = Some(error)).ok());
            let staged = self.core.stage(0, group, ids);
            if let Some(error) = wrong {
                return Err(error);
            }
            staged
        };
        match staged {
            Err(Error::BlockId { column, block, num_blocks, .. }) => Err(BlockIdError::new_err(format!(
                "group {group}: request {} has block {block} as its new block {column}; ids are 0 to {}",
                request_id.repr()?,
                num_blocks - 1
            ))),
            other => Ok(other?),
        }
    }

    fn append_rows(&mut self, request_id: &Bound<'_, PyAny>, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        let slot = self.slot(request_id)?;
        self.stage(request_id, rows)?;
        for group in 0..self.core.groups().len() {
            self.appended.push((slot, group, self.core.row(slot, group).len()));
        }
        Ok(self.core.append(slot)?)
    }

    /// Take back what was appended since the list of it was cleared.
    fn take_back(&mut self) {
        for (slot, group, len) in self.appended.drain(..).rev() {
            self.core.truncate(slot, group, len);
        }
    }
}

/// The ids in a list of plain ints: the form in which schedulers hand them out. For anything else, and for what may
/// stand for an error, a value that is no block id, so that the row is read again with care.
///
/// By way of `Bound` each id costs five calls into the interpreter; the two that are needed take less than half of
/// that time (`ubatch-guard bench` reports it as upkeep).
#[expect(unsafe_code, reason = "two calls into the interpreter an id instead of five")]
fn plain_ids(list: &Bound<'_, PyList>) -> impl Iterator<Item = i64> {
    const NO_ID: i64 = i64::MIN;
    (0..list.len()).map(|index| {
        // SAFETY: `list` is a list and the thread is attached to the interpreter. `PyList_GetItem` checks the index
        // itself. The reference it lends is used only for an exact int, whose conversion runs no Python code that could
        // take the item out of the list; nor can another thread, which would need the GIL (`gil_used` below).
        unsafe {
            let item = ffi::PyList_GetItem(list.as_ptr(), index.cast_signed());
            if !item.is_null() && ffi::PyLong_CheckExact(item) != 0 {
                let id = ffi::PyLong_AsLongLong(item);
                if id != -1 {
                    return id;
                }
            }
            ffi::PyErr_Clear();
        }
        NO_ID
    })
}

fn unknown(request_id: &Bound<'_, PyAny>) -> PyErr {
    UnknownRequestError::new_err(format!("no request {}", text_of(request_id)))
}

fn text_of(object: &Bound<'_, PyAny>) -> String {
    object.repr().map_or_else(|_| "?".to_owned(), |text| text.to_string())
}

fn block_id(id: &Bound<'_, PyAny>) -> PyResult<i64> {
    id.extract().map_err(|error: PyErr| {
        if error.is_instance_of::<PyOverflowError>(id.py()) {
            BlockIdError::new_err(format!("block id {} has more than 31 bits", text_of(id)))
        } else if error.is_instance_of::<PyTypeError>(id.py()) {
            DtypeError::new_err(format!("block id {} is no integer", text_of(id)))
        } else {
            error
        }
    })
}

/// The slots of a batch, as [`Mirror::slots`] gives them.
fn slot_array<'py>(object: &Bound<'py, PyAny>) -> PyResult<PyReadonlyArray1<'py, i32>> {
    match object.cast::<PyArray1<i32>>() {
        Ok(array) => contiguous(array),
        Err(_) => Err(match object.cast::<PyArray1<i64>>() {
            Ok(_) => DtypeError::new_err("slots is int64, expected a numpy array of int32"),
            Err(_) => refused("slots", 1, object),
        }),
    }
}

#[expect(clippy::too_many_arguments, reason = "those of the Python methods")]
#[pymethods]
impl Mirror {
    #[new]
    fn new(py: Python<'_>, groups: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self {
            core: mirror::Mirror::new(self::groups(groups)?)?,
            slots: PyDict::new(py).unbind(),
            batch: Batch::default(),
            found: Vec::new(),
            planner: Planner::default(),
            appended: Vec::new(),
        })
    }

    fn __len__(slf: &Bound<'_, Self>) -> PyResult<usize> {
        shared(slf, |this| Ok(this.slots.bind(slf.py()).len()))
    }

    fn __contains__(slf: &Bound<'_, Self>, request_id: &Bound<'_, PyAny>) -> PyResult<bool> {
        shared(slf, |this| this.slots.bind(slf.py()).contains(request_id))
    }

    #[getter]
    fn nbytes(slf: &Bound<'_, Self>) -> PyResult<usize> {
        shared(slf, |this| Ok(this.core.nbytes()))
    }

    fn add(slf: &Bound<'_, Self>, request_id: &Bound<'_, PyAny>, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        exclusive(slf, |this| {
            let slots = this.slots.clone_ref(request_id.py()).into_bound(request_id.py());
            if slots.contains(request_id)? {
                return Err(DuplicateRequestError::new_err(format!("request {} is there already", request_id.repr()?)));
            }
            this.stage(request_id, rows)?;
            let slot = this.core.add()?;
            // The id's own code runs once more and may fail this time.
            slots.set_item(request_id, slot).inspect_err(|_| this.core.free(slot))
        })
    }

    fn replace(slf: &Bound<'_, Self>, request_id: &Bound<'_, PyAny>, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        exclusive(slf, |this| {
            let slot = this.slot(request_id)?;
            this.stage(request_id, rows)?;
            Ok(this.core.replace(slot)?)
        })
    }

    fn append(slf: &Bound<'_, Self>, request_id: &Bound<'_, PyAny>, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        exclusive(slf, |this| {
            this.appended.clear();
            this.append_rows(request_id, rows)
        })
    }

    fn append_each(slf: &Bound<'_, Self>, request_ids: &Bound<'_, PyAny>, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        exclusive(slf, |this| {
            let (ids, new) = (request_ids.len()?, rows.len()?);
            if ids != new {
                return Err(ShapeError::new_err(format!("rows: length {new}, expected {ids}")));
            }
            this.appended.clear();
            let mut append_all = || {
                // Schedulers hand out lists, with None for most requests.
                if let (Ok(request_ids), Ok(rows)) = (request_ids.cast::<PyList>(), rows.cast::<PyList>()) {
                    for (index, rows) in rows.iter().enumerate() {
                        if !rows.is_none() {
                            this.append_rows(&request_ids.get_item(index)?, &rows)?;
                        }
                    }
                    return Ok(());
                }
                for (request_id, rows) in request_ids.try_iter()?.zip(rows.try_iter()?) {
                    let rows = rows?;
                    if !rows.is_none() {
                        this.append_rows(&request_id?, &rows)?;
                    }
                }
                Ok(())
            };
            append_all().inspect_err(|_| this.take_back())
        })
    }

    fn free(slf: &Bound<'_, Self>, request_id: &Bound<'_, PyAny>) -> PyResult<()> {
        exclusive(slf, |this| {
            let slot = this.slot(request_id)?;
            this.slots.bind(request_id.py()).del_item(request_id)?;
            this.core.free(slot);
            Ok(())
        })
    }

    fn clear(slf: &Bound<'_, Self>, py: Python<'_>) -> PyResult<()> {
        exclusive(slf, |this| {
            let slots = this.slots.bind(py);
            for slot in slots.values() {
                this.core.free(slot.extract()?);
            }
            slots.clear();
            Ok(())
        })
    }

    #[pyo3(signature = (request_ids, *, missing=false))]
    fn slots<'py>(
        slf: &Bound<'_, Self>,
        request_ids: &Bound<'py, PyAny>,
        missing: bool,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        shared(slf, |this| {
            let known = this.slots.bind(request_ids.py());
            // A length is not believed: there may be no end to a range, and an unknown id at its start.
            let mut slots = Vec::with_capacity(request_ids.len()?.min(FEW_SLOTS));
            for request_id in request_ids.try_iter()? {
                let request_id = request_id?;
                let slot = match known.get_item(&request_id)? {
                    Some(slot) => slot.extract()?,
                    None if missing => mirror::NO_ROW,
                    None => return Err(unknown(&request_id)),
                };
                if slots.len() == slots.capacity() {
                    memory::reserve(&mut slots, 1)?;
                }
                slots.push(slot);
            }
            Ok(slots.into_pyarray(request_ids.py()))
        })
    }

    fn row<'py>(
        slf: &Bound<'_, Self>,
        request_id: &Bound<'py, PyAny>,
        group: usize,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        shared(slf, |this| {
            let slot = this.slot(request_id)?;
            let groups = this.core.groups().len();
            if group >= groups {
                return Err(ShapeError::new_err(format!("group {group} of {groups}")));
            }
            Ok(PyArray1::from_slice(request_id.py(), this.core.row(slot, group)))
        })
    }

    #[pyo3(signature = (slots, num_computed_tokens, num_scheduled_tokens, first_cut=None, last_cut=None, num_read_tokens=None, num_prompt_tokens=None))]
    fn is_safe(
        slf: &Bound<'_, Self>,
        slots: &Bound<'_, PyAny>,
        num_computed_tokens: &Bound<'_, PyAny>,
        num_scheduled_tokens: &Bound<'_, PyAny>,
        first_cut: Option<Clipped>,
        last_cut: Option<Clipped>,
        num_read_tokens: Option<&Bound<'_, PyAny>>,
        num_prompt_tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<bool> {
        exclusive(slf, |this| {
            fill(
                &mut this.batch,
                [num_computed_tokens, num_scheduled_tokens],
                More { settled: None, read: num_read_tokens, prompt: num_prompt_tokens },
            )?;
            let slots = slot_array(slots)?;
            Ok(this.core.is_safe(slots.as_slice()?, &mut this.batch, cuts(first_cut, last_cut))?)
        })
    }

    #[pyo3(signature = (slots, num_computed_tokens, num_scheduled_tokens, first_cut=None, last_cut=None, num_read_tokens=None, num_prompt_tokens=None))]
    fn unsafe_cuts(
        slf: &Bound<'_, Self>,
        slots: &Bound<'_, PyAny>,
        num_computed_tokens: &Bound<'_, PyAny>,
        num_scheduled_tokens: &Bound<'_, PyAny>,
        first_cut: Option<Clipped>,
        last_cut: Option<Clipped>,
        num_read_tokens: Option<&Bound<'_, PyAny>>,
        num_prompt_tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<UnsafeTuple>> {
        exclusive(slf, |this| {
            fill(
                &mut this.batch,
                [num_computed_tokens, num_scheduled_tokens],
                More { settled: None, read: num_read_tokens, prompt: num_prompt_tokens },
            )?;
            let slots = slot_array(slots)?;
            let (slots, cuts) = (slots.as_slice()?, cuts(first_cut, last_cut));
            let Mirror { core, batch, found, .. } = this;
            slf.py().detach(|| core.unsafe_cuts(slots, batch, cuts, found))?;
            Ok(unsafe_tuples(found))
        })
    }

    #[pyo3(signature = (slots, num_computed_tokens, num_scheduled_tokens, phases=None, short_query=None, num_read_tokens=None, num_prompt_tokens=None))]
    fn order(
        slf: &Bound<'_, Self>,
        slots: &Bound<'_, PyAny>,
        num_computed_tokens: &Bound<'_, PyAny>,
        num_scheduled_tokens: &Bound<'_, PyAny>,
        phases: Option<&Bound<'_, PyAny>>,
        short_query: Option<Clipped>,
        num_read_tokens: Option<&Bound<'_, PyAny>>,
        num_prompt_tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<OrderTuple>> {
        exclusive(slf, |this| {
            let phases = phases.map(self::phases).transpose()?;
            fill(
                &mut this.batch,
                [num_computed_tokens, num_scheduled_tokens],
                More { settled: None, read: num_read_tokens, prompt: num_prompt_tokens },
            )?;
            let slots = slot_array(slots)?;
            let slots = slots.as_slice()?;
            let short_query = short_query.map(|Clipped(most)| most);
            let Mirror { core, batch, planner, .. } = this;
            let order = slf.py().detach(|| core.order(slots, batch, phases.as_deref(), short_query, planner))?;
            Ok(order_tuple(order))
        })
    }

    fn first_difference(
        slf: &Bound<'_, Self>,
        slots: &Bound<'_, PyAny>,
        group: usize,
        block_table: &Bound<'_, PyAny>,
        num_blocks_per_row: &Bound<'_, PyAny>,
    ) -> PyResult<Option<(usize, usize)>> {
        exclusive(slf, |this| {
            let groups = this.core.groups().len();
            if group >= groups {
                return Err(ShapeError::new_err(format!("group {group} of {groups}")));
            }
            let slots = slot_array(slots)?;
            let ids = Ids::borrow(block_table)?;
            let lengths = Ints::borrow("num_blocks_per_row", num_blocks_per_row)?;
            let slots = slots.as_slice()?;
            Ok(with_values!(lengths of &lengths => this.core.first_difference(slots, group, &ids.table(), lengths))?)
        })
    }
}

/// Read rows of block ids once and add them up: the floor that `ubatch_guard.bench` compares the stateless check with.
#[pyfunction]
fn _read_floor(rows: &Bound<'_, PyArray2<i32>>) -> PyResult<i32> {
    contained(|| {
        let rows = readable(rows)?;
        rows.as_array().outer_iter().try_fold(0_i32, |sum, row| {
            let ids = row.to_slice().ok_or_else(|| ShapeError::new_err("the ids of a row do not lie side by side"))?;
            Ok(sum.wrapping_add(floor::sum(ids)))
        })
    })
}

/// The Rust core. Use `ubatch_guard`; this module is private.
#[pymodule(gil_used = true)]
mod _core {
    #[pymodule_export]
    use super::{
        _read_floor, AllocationError, BlockIdError, BusyError, Checker, DtypeError, DuplicateRequestError, GroupError,
        GuardError, InternalError, Mirror, PhaseError, ShapeError, TokenCountError, UnknownRequestError,
    };

    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "the name Python tools look for")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
