//! The Python module `ubatch_guard._core`: borrow, check, convert, map errors. The only file that knows Python or numpy.

use std::panic::{AssertUnwindSafe, catch_unwind};

use numpy::ndarray::Dimension;
use numpy::{
    Element, IntoPyArray, PyArray, PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray, PyReadonlyArray1,
    PyReadonlyArray2, PyUntypedArrayMethods,
};
use pyo3::exceptions::{PyOverflowError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use pyo3::{create_exception, ffi, intern};
use smallvec::SmallVec;

use crate::error::Error;
use crate::floor;
use crate::hazard::{self, Cuts, UnsafeCuts};
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
create_exception!(ubatch_guard, InternalError, PyRuntimeError, "A defect of the guard itself.");

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        match error {
            Error::Group { .. } => GroupError::new_err(message),
            Error::Length { .. } | Error::RowTooShort { .. } => ShapeError::new_err(message),
            Error::NegativeTokens { .. } | Error::TooManyTokens { .. } => TokenCountError::new_err(message),
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

/// A range of cuts from optional Python integers; what lies outside any step is clipped.
fn cuts(first: Option<i64>, last: Option<i64>) -> Cuts {
    let clip = |cut: i64| u32::try_from(cut.max(0)).unwrap_or(u32::MAX);
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
        groups.push(Group {
            tokens_per_column: size(intern!(py, "tokens_per_column"))?,
            num_blocks: size(intern!(py, "num_blocks"))?,
            sliding_window: optional(intern!(py, "sliding_window"))?,
            attention_chunk_size: optional(intern!(py, "attention_chunk_size"))?,
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

fn fill(
    batch: &mut Batch,
    computed: &Bound<'_, PyAny>,
    scheduled: &Bound<'_, PyAny>,
    settled: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let computed = Ints::borrow("num_computed_tokens", computed)?;
    let scheduled = Ints::borrow("num_scheduled_tokens", scheduled)?;
    with_values!(computed of &computed => with_values!(scheduled of &scheduled => batch.fill(computed, scheduled)))?;
    if let Some(settled) = settled {
        let settled = Ints::borrow("num_settled_tokens", settled)?;
        with_values!(settled of &settled => batch.settle(settled))?;
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
        settled: Option<&Bound<'_, PyAny>>,
        question: impl FnOnce(&mut Self, &[Table<'_>]) -> crate::error::Result<T>,
    ) -> PyResult<T> {
        fill(&mut self.batch, counts[0], counts[1], settled)?;
        let ids: SmallVec<[Ids<'_>; FEW]> =
            block_tables.try_iter()?.map(|table| Ids::borrow(&table?)).collect::<PyResult<_>>()?;
        let tables: SmallVec<[Table<'_>; FEW]> = ids.iter().map(Ids::table).collect();
        rows_reach(self.core.groups(), &tables, &self.batch)?;
        Ok(question(self, &tables)?)
    }
}

#[pymethods]
impl Checker {
    #[new]
    fn new(groups: &Bound<'_, PyAny>) -> PyResult<Self> {
        let core = hazard::Checker::new(self::groups(groups)?)?;
        Ok(Self { core, batch: Batch::default(), found: Vec::new(), planner: Planner::default() })
    }

    #[pyo3(signature = (block_tables, num_computed_tokens, num_scheduled_tokens, first_cut=None, last_cut=None, num_settled_tokens=None))]
    fn is_safe(
        &mut self,
        block_tables: &Bound<'_, PyAny>,
        num_computed_tokens: &Bound<'_, PyAny>,
        num_scheduled_tokens: &Bound<'_, PyAny>,
        first_cut: Option<i64>,
        last_cut: Option<i64>,
        num_settled_tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<bool> {
        contained(|| {
            self.ask(block_tables, [num_computed_tokens, num_scheduled_tokens], num_settled_tokens, |this, tables| {
                this.core.is_safe(tables, &this.batch, cuts(first_cut, last_cut))
            })
        })
    }

    #[pyo3(signature = (block_tables, num_computed_tokens, num_scheduled_tokens, first_cut=None, last_cut=None, num_settled_tokens=None))]
    fn unsafe_cuts(
        &mut self,
        block_tables: &Bound<'_, PyAny>,
        num_computed_tokens: &Bound<'_, PyAny>,
        num_scheduled_tokens: &Bound<'_, PyAny>,
        first_cut: Option<i64>,
        last_cut: Option<i64>,
        num_settled_tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<UnsafeTuple>> {
        contained(|| {
            self.ask(block_tables, [num_computed_tokens, num_scheduled_tokens], num_settled_tokens, |this, tables| {
                this.core.unsafe_cuts(tables, &this.batch, cuts(first_cut, last_cut), &mut this.found)?;
                Ok(unsafe_tuples(&this.found))
            })
        })
    }

    #[pyo3(signature = (block_tables, num_computed_tokens, num_scheduled_tokens, phases=None, num_settled_tokens=None, short_query=None))]
    fn order(
        &mut self,
        block_tables: &Bound<'_, PyAny>,
        num_computed_tokens: &Bound<'_, PyAny>,
        num_scheduled_tokens: &Bound<'_, PyAny>,
        phases: Option<&Bound<'_, PyAny>>,
        num_settled_tokens: Option<&Bound<'_, PyAny>>,
        short_query: Option<i64>,
    ) -> PyResult<Option<OrderTuple>> {
        contained(|| {
            let phases = phases.map(self::phases).transpose()?;
            self.ask(block_tables, [num_computed_tokens, num_scheduled_tokens], num_settled_tokens, |this, tables| {
                let (planner, requests) = (&mut this.planner, this.batch.requests().len());
                planner.clear();
                this.core.dependencies(tables, &this.batch, |reader, writer| planner.depend(reader, writer))?;
                let short = short_query.map(|most| this.batch.short(most));
                Ok(order_tuple(planner.order(requests, phases.as_deref(), short.as_deref())?))
            })
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

/// Block tables of the live requests on the host, with a count per block of the rows that hold it.
#[pyclass(module = "ubatch_guard._core")]
struct Mirror {
    core: mirror::Mirror,
    /// Request id to slot.
    slots: Py<PyDict>,
    batch: Batch,
    found: Vec<UnsafeCuts>,
    planner: Planner,
    ids: Vec<i64>,
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
        let staged = if row.cast::<numpy::PyUntypedArray>().is_ok() {
            let ids = Ints::borrow("a row of block ids", row)?;
            with_values!(values of &ids => self.core.stage(0, group, values))
        } else {
            if let Ok(list) = row.cast::<PyList>()
                && self.core.stage(0, group, plain_ids(list)).is_ok()
            {
                return Ok(());
            }
            self.ids.clear();
            for id in row.try_iter()? {
                self.ids.push(block_id(&id?)?);
            }
            self.core.stage(0, group, self.ids.iter().copied())
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
        self.core.append(slot);
        Ok(())
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
        // take the item out of the list.
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
        let text = text_of(id);
        if error.is_instance_of::<PyOverflowError>(id.py()) {
            BlockIdError::new_err(format!("block id {text} has more than 31 bits"))
        } else {
            DtypeError::new_err(format!("block id {text} is no integer"))
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
            ids: Vec::new(),
        })
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        self.slots.bind(py).len()
    }

    fn __contains__(&self, request_id: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.slots.bind(request_id.py()).contains(request_id)
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.core.nbytes()
    }

    fn add(&mut self, request_id: &Bound<'_, PyAny>, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        contained(|| {
            let slots = self.slots.clone_ref(request_id.py()).into_bound(request_id.py());
            if slots.contains(request_id)? {
                return Err(DuplicateRequestError::new_err(format!("request {} is there already", request_id.repr()?)));
            }
            self.stage(request_id, rows)?;
            slots.set_item(request_id, self.core.add())
        })
    }

    fn replace(&mut self, request_id: &Bound<'_, PyAny>, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        contained(|| {
            let slot = self.slot(request_id)?;
            self.stage(request_id, rows)?;
            self.core.replace(slot);
            Ok(())
        })
    }

    fn append(&mut self, request_id: &Bound<'_, PyAny>, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        contained(|| self.append_rows(request_id, rows))
    }

    fn append_each(&mut self, request_ids: &Bound<'_, PyAny>, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        contained(|| {
            let (ids, new) = (request_ids.len()?, rows.len()?);
            if ids != new {
                return Err(ShapeError::new_err(format!("rows: length {new}, expected {ids}")));
            }
            for (request_id, rows) in request_ids.try_iter()?.zip(rows.try_iter()?) {
                let rows = rows?;
                if !rows.is_none() {
                    self.append_rows(&request_id?, &rows)?;
                }
            }
            Ok(())
        })
    }

    fn free(&mut self, request_id: &Bound<'_, PyAny>) -> PyResult<()> {
        contained(|| {
            let slot = self.slot(request_id)?;
            self.slots.bind(request_id.py()).del_item(request_id)?;
            self.core.free(slot);
            Ok(())
        })
    }

    fn clear(&mut self, py: Python<'_>) -> PyResult<()> {
        contained(|| {
            let slots = self.slots.bind(py);
            for slot in slots.values() {
                self.core.free(slot.extract()?);
            }
            slots.clear();
            Ok(())
        })
    }

    #[pyo3(signature = (request_ids, *, missing=false))]
    fn slots<'py>(&self, request_ids: &Bound<'py, PyAny>, missing: bool) -> PyResult<Bound<'py, PyArray1<i32>>> {
        contained(|| {
            let known = self.slots.bind(request_ids.py());
            let mut slots = Vec::with_capacity(request_ids.len()?);
            for request_id in request_ids.try_iter()? {
                let request_id = request_id?;
                match known.get_item(&request_id)? {
                    Some(slot) => slots.push(slot.extract()?),
                    None if missing => slots.push(mirror::NO_ROW),
                    None => return Err(unknown(&request_id)),
                }
            }
            Ok(slots.into_pyarray(request_ids.py()))
        })
    }

    fn row<'py>(&self, request_id: &Bound<'py, PyAny>, group: usize) -> PyResult<Bound<'py, PyArray1<i32>>> {
        contained(|| {
            let slot = self.slot(request_id)?;
            let groups = self.core.groups().len();
            if group >= groups {
                return Err(ShapeError::new_err(format!("group {group} of {groups}")));
            }
            Ok(PyArray1::from_slice(request_id.py(), self.core.row(slot, group)))
        })
    }

    #[pyo3(signature = (slots, num_computed_tokens, num_scheduled_tokens, first_cut=None, last_cut=None))]
    fn is_safe(
        &mut self,
        slots: &Bound<'_, PyAny>,
        num_computed_tokens: &Bound<'_, PyAny>,
        num_scheduled_tokens: &Bound<'_, PyAny>,
        first_cut: Option<i64>,
        last_cut: Option<i64>,
    ) -> PyResult<bool> {
        contained(|| {
            fill(&mut self.batch, num_computed_tokens, num_scheduled_tokens, None)?;
            let slots = slot_array(slots)?;
            Ok(self.core.is_safe(slots.as_slice()?, &mut self.batch, cuts(first_cut, last_cut))?)
        })
    }

    #[pyo3(signature = (slots, num_computed_tokens, num_scheduled_tokens, first_cut=None, last_cut=None))]
    fn unsafe_cuts(
        &mut self,
        slots: &Bound<'_, PyAny>,
        num_computed_tokens: &Bound<'_, PyAny>,
        num_scheduled_tokens: &Bound<'_, PyAny>,
        first_cut: Option<i64>,
        last_cut: Option<i64>,
    ) -> PyResult<Vec<UnsafeTuple>> {
        contained(|| {
            fill(&mut self.batch, num_computed_tokens, num_scheduled_tokens, None)?;
            let slots = slot_array(slots)?;
            self.core.unsafe_cuts(slots.as_slice()?, &mut self.batch, cuts(first_cut, last_cut), &mut self.found)?;
            Ok(unsafe_tuples(&self.found))
        })
    }

    #[pyo3(signature = (slots, num_computed_tokens, num_scheduled_tokens, phases=None, short_query=None))]
    fn order(
        &mut self,
        slots: &Bound<'_, PyAny>,
        num_computed_tokens: &Bound<'_, PyAny>,
        num_scheduled_tokens: &Bound<'_, PyAny>,
        phases: Option<&Bound<'_, PyAny>>,
        short_query: Option<i64>,
    ) -> PyResult<Option<OrderTuple>> {
        contained(|| {
            let phases = phases.map(self::phases).transpose()?;
            fill(&mut self.batch, num_computed_tokens, num_scheduled_tokens, None)?;
            let slots = slot_array(slots)?;
            let slots = slots.as_slice()?;
            let order = self.core.order(slots, &mut self.batch, phases.as_deref(), short_query, &mut self.planner)?;
            Ok(order_tuple(order))
        })
    }

    fn first_difference(
        &mut self,
        slots: &Bound<'_, PyAny>,
        group: usize,
        block_table: &Bound<'_, PyAny>,
        num_blocks_per_row: &Bound<'_, PyAny>,
    ) -> PyResult<Option<(usize, usize)>> {
        contained(|| {
            let groups = self.core.groups().len();
            if group >= groups {
                return Err(ShapeError::new_err(format!("group {group} of {groups}")));
            }
            let slots = slot_array(slots)?;
            let ids = Ids::borrow(block_table)?;
            let lengths = Ints::borrow("num_blocks_per_row", num_blocks_per_row)?;
            let slots = slots.as_slice()?;
            Ok(with_values!(lengths of &lengths => self.core.first_difference(slots, group, &ids.table(), lengths))?)
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
#[pymodule]
mod _core {
    #[pymodule_export]
    use super::{
        _read_floor, BlockIdError, Checker, DtypeError, DuplicateRequestError, GroupError, GuardError, InternalError,
        Mirror, PhaseError, ShapeError, TokenCountError, UnknownRequestError,
    };

    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "the name Python tools look for")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
