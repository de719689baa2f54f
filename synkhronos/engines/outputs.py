"""Reduction of a call's outputs over the ranks.

Every rank computes the outputs of its own rows, and the master returns one value for each output:

- Scalars, the common case in a training loop, are packed into one record per call.  Each worker writes its record into
  its slot and continues without waiting for the master.
- Outputs of any shape are reduced one at a time.  All ranks gather the shapes, with the contents of small arrays.
  Large arrays are gathered or reduced through shared memory, in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from synkhronos.casts import check_cast
from synkhronos.devices import NUMPY, ArrayLayout, find_device, get_rank_device
from synkhronos.devices.reduce_op import REDUCE_OPS
from synkhronos.engines.accumulator import Accumulator
from synkhronos.ranks import MAX_PAYLOAD_NBYTES, Rank

#: Maximal number of bytes of an array whose contents are gathered together with its shape.
MAX_SMALL_NBYTES = 1 << 12
#: Maximal number of scalars in a record, which has to fit into a slot.
_MAX_SCALARS = 1024
#: Minimal number of ranks whose scalars are reduced as one array.  Fewer scalars are reduced faster one by one.
_MIN_RANKS_OF_ARRAY = 4


class OutputSpec(NamedTuple):
    """Reduction ops and dtypes of a compiled function's outputs."""

    #: Keys of `REDUCE_OPS`; None for an output that is not reduced.
    ops: list[str | None]
    #: Dtype of each output, None for one that is not reduced, if all reduced outputs are scalars and fit into one
    #: record.  None if the outputs are reduced as arrays.
    scalar_dtypes: tuple[np.dtype | None, ...] | None

    @classmethod
    def from_types(cls, types: Sequence[Any], ops: list[str | None], is_sliced: bool) -> OutputSpec:
        """Return the specification of outputs of the graph library's types.

        If each rank computes its rows in slices, a scalar that is gathered over slices becomes a vector.
        """
        if len(types) > _MAX_SCALARS or is_sliced and any(op == "gather" for op in ops):
            return cls(ops, None)
        # An output that is not reduced may be of any type.
        reduced = [None if op is None else output_type for output_type, op in zip(types, ops, strict=True)]
        if any(output_type is not None and output_type.ndim for output_type in reduced):
            return cls(ops, None)
        dtypes = [None if output_type is None else np.dtype(output_type.dtype) for output_type in reduced]
        return cls(ops, tuple(dtypes))

    def repeat(self, n_repeats: int) -> OutputSpec:
        """Return the specification of a launch that computes each output ``n_repeats`` times in a row."""
        dtypes = (
            None if self.scalar_dtypes is None else tuple([d for d in self.scalar_dtypes for _ in range(n_repeats)])
        )
        return OutputSpec([op for op in self.ops for _ in range(n_repeats)], dtypes)


def compute_no_outputs() -> list[Any]:
    """Return no outputs, in a call in which some rank has rows, or on a rank whose outputs are not needed."""
    return []


class RankOutputs(NamedTuple):
    """Outputs that one rank computed in one call."""

    #: Number of rows that this rank computed: the weight of its values in a mean.
    n_rows: int
    #: One for each output; empty on a rank without rows.
    values: list[Any]
    spec: OutputSpec
    #: Computes the outputs of zero rows, for a call in which no rank has rows.
    compute_zero_rows: Callable[[], list[Any]] = compute_no_outputs

    def with_values(self, values: list[Any]) -> RankOutputs:
        """Return a copy with the values of `Engine.fetch_outputs`.  Values that are not reduced become NumPy arrays."""
        ops = self.spec.ops if values else []
        values = [_to_numpy(value) if op is None else value for value, op in zip(values, ops, strict=True)]
        return self._replace(values=values)

    def prepare_deferred_reduction(self, rank: Rank) -> RankOutputs:
        """Return a copy that can be reduced after shared variables have changed.

        If the master has no rows, it computes the outputs of zero rows now.  An error of this computation is raised by
        `reduce`, if it needs these outputs.  Workers drop the values of outputs that are not reduced.
        """
        if not rank.is_master:
            values = [None if op is None else v for v, op in zip(self.values, self.spec.ops, strict=False)]
            return RankOutputs(self.n_rows, values, self.spec)
        try:
            return RankOutputs(self.n_rows, self.values or self.compute_zero_rows(), self.spec)
        except Exception as error:
            deferred = error

            def fail() -> list[Any]:
                raise deferred

            return self._replace(compute_zero_rows=fail)

    def reduce(self, rank: Rank) -> Any:
        """Reduce the outputs over all ranks.  Return one value for each output in the master."""
        if not self.spec.ops:
            return []
        return _reduce_arrays(rank, self) if self.spec.scalar_dtypes is None else _reduce_scalars(rank, [self])[0]

    @staticmethod
    def reduce_many(rank: Rank, outputs_by_call: Sequence[RankOutputs]) -> list[Any]:
        """Return the results of `reduce` for several calls; records are packed into as few messages as possible."""
        results: list[Any] = []
        pending: list[RankOutputs] = []
        nbytes = 0
        for outputs in outputs_by_call:
            dtypes = outputs.spec.scalar_dtypes
            record_nbytes = None if dtypes is None else _make_record_dtype(dtypes).itemsize
            if pending and (record_nbytes is None or nbytes + record_nbytes > MAX_PAYLOAD_NBYTES):
                results += _reduce_scalars(rank, pending)
                pending, nbytes = [], 0
            if record_nbytes is None:
                results.append(_reduce_arrays(rank, outputs))
            else:
                pending.append(outputs)
                nbytes += record_nbytes
        return results + _reduce_scalars(rank, pending) if pending else results


# -- scalars -----------------------------------------------------------------------------------------------------
#
# A record is the number of rows as int64, then the reduced values.  It is written as bytes, since pickling small arrays
# would dominate the time of a call in a training loop.


@lru_cache(maxsize=256)
def _make_record_dtype(dtypes: tuple[np.dtype | None, ...]) -> np.dtype:
    """Return the structured dtype of a record with values of these dtypes."""
    return np.dtype([("rows", np.int64), *((str(i), dtype) for i, dtype in enumerate(dtypes) if dtype is not None)])


def _reduce_scalars(rank: Rank, outputs_by_call: Sequence[RankOutputs]) -> list[Any]:
    """Return the results of calls whose records fit into one message.  In workers, each result is None."""
    for outputs in outputs_by_call:
        if outputs.n_rows:
            _check_scalar_dtypes(outputs, rank.number)
    if len(outputs_by_call) == 1 and rank.size < _MIN_RANKS_OF_ARRAY:
        (outputs,) = outputs_by_call
        messages = rank.gather_bytes(b"" if rank.is_master else _pack_records(outputs_by_call))
        return [None if messages is None else _reduce_messages(outputs, messages, rank.number)]
    # The key is the specification, not its dtypes: NumPy 1.23 compares None as a dtype.
    groups = [outputs_by_call]
    if len(outputs_by_call) > 1:
        groups = [list(group) for _, group in groupby(outputs_by_call, lambda outputs: outputs.spec)]
    messages = rank.gather_bytes(b"".join(map(_pack_records, groups)))
    if messages is None:
        return [None] * len(outputs_by_call)
    results: list[Any] = []
    offset = 0
    for group in groups:
        dtype = _make_record_dtype(group[0].spec.scalar_dtypes or ())
        stop = offset + len(group) * dtype.itemsize
        records = np.frombuffer(b"".join([message[offset:stop] for message in messages]), dtype)
        results += _reduce_records(group, records.reshape(rank.size, len(group)))
        offset = stop
    return results


def _check_scalar_dtypes(outputs: RankOutputs, rank_number: int) -> None:
    """Raise TypeError if a scalar would change in the record, which has the dtype of its output's type.

    An operation written in Python may return another dtype, or a Python number; PyTensor's cumsum of int8 does, too.
    """
    for i, dtype in enumerate(outputs.spec.scalar_dtypes or ()):
        value = outputs.values[i]
        if dtype is None or getattr(value, "dtype", None) is dtype:  # nearly always
            continue
        check_cast(np.asarray(value), dtype, f"output {i} of rank {rank_number}")


def _reduce_messages(outputs: RankOutputs, messages: Sequence[bytes], own_number: int) -> list[Any]:
    """Reduce one call's records in the master, one rank after another.  The master's own values are in ``outputs``."""
    dtypes = outputs.spec.scalar_dtypes or ()
    contributions = []
    for r, message in enumerate(map(bytearray, messages)):  # writable: the result of "gather" may be a view
        n_rows, values = outputs.n_rows, outputs.values
        if r != own_number:
            n_rows, values, offset = int.from_bytes(message[:8], "little"), [], 8
            for dtype in dtypes:
                values.append(None if dtype is None else np.ndarray((), dtype, message, offset))
                offset += 0 if dtype is None else dtype.itemsize
        if n_rows:
            contributions.append((n_rows, values))
    if not contributions:
        return outputs.values or outputs.compute_zero_rows()
    results = []
    for i, op in enumerate(outputs.spec.ops):
        if op is None:
            results.append(outputs.values[i] if outputs.n_rows else None)
            continue
        total = Accumulator(op)
        for n_rows, values in contributions:
            total.add(values[i], n_rows)
        results.append(total.get_result())
    return results


def _pack_records(outputs_by_call: Sequence[RankOutputs]) -> bytes:
    """Return this rank's records of several calls with the same specification, or zeros where it has no rows."""
    dtypes = outputs_by_call[0].spec.scalar_dtypes or ()
    dtype = _make_record_dtype(dtypes)
    reduced = [i for i, value_dtype in enumerate(dtypes) if value_dtype is not None]
    if len(outputs_by_call) > 1:
        no_rows_record = 0, *(0 for _ in reduced)
        records = [
            (outputs.n_rows, *[outputs.values[i] for i in reduced]) if outputs.n_rows else no_rows_record
            for outputs in outputs_by_call
        ]
        return np.array(records, dtype).tobytes()
    # Packing a single record without a structured array is faster.
    (outputs,) = outputs_by_call
    if not outputs.n_rows:
        return bytes(dtype.itemsize)
    values = [np.asarray(outputs.values[i], dtypes[i]).tobytes() for i in reduced]
    return b"".join([outputs.n_rows.to_bytes(8, "little"), *values])


def _reduce_records(outputs_by_call: Sequence[RankOutputs], records: np.ndarray) -> list[Any]:
    """Reduce the records of calls with the same specification, of shape (ranks, calls), in the master."""
    n_rows = np.ascontiguousarray(records["rows"])
    if np.count_nonzero(n_rows) < n_rows.size:
        # Ranks without rows contribute nothing.  They may differ from call to call, so each call is reduced by itself.
        results: list[Any] = []
        for k, outputs in enumerate(outputs_by_call):
            contributions = records[n_rows[:, k] > 0, k : k + 1]
            if len(contributions):
                results += _reduce_records([outputs], contributions)
            else:
                results.append(outputs.values or outputs.compute_zero_rows())
        return results
    columns: list[Any] = []
    for i, op in enumerate(outputs_by_call[0].spec.ops):
        if op is None:
            columns.append([outputs.values[i] if outputs.n_rows else None for outputs in outputs_by_call])
            continue
        values = np.ascontiguousarray(records[str(i)])
        if REDUCE_OPS[op].ufunc is None:
            columns.append([values[:, k].copy() for k in range(len(outputs_by_call))])
        else:
            reduced = REDUCE_OPS[op].reduce_first_axis(values, n_rows)
            columns.append([reduced[k, ...] for k in range(len(outputs_by_call))])
    return [list(row) for row in zip(*columns, strict=True)]


# -- arrays ------------------------------------------------------------------------------------------------------


def _reduce_arrays(rank: Rank, outputs: RankOutputs) -> Any:
    """Reduce outputs of any shape.  All ranks gather the layouts; a communicator transfers large arrays."""
    arrays = [
        None if op is None else v if find_device(v) is not NUMPY else np.asarray(v)
        for v, op in zip(outputs.values, outputs.spec.ops, strict=False)
    ]
    own_entry: Any = (outputs.n_rows, [_pack_array(value) for value in arrays] if outputs.n_rows else [])
    entries = rank.all_gather(own_entry) if rank.size > 1 else [own_entry]
    contributors = [r for r, (n_rows, _) in enumerate(entries) if n_rows]
    if not contributors:
        return (outputs.values or outputs.compute_zero_rows()) if rank.is_master else None
    results: list[Any] = []
    for i, op in enumerate(outputs.spec.ops):
        if op is None:
            results.append(outputs.values[i] if outputs.n_rows else None)
            continue
        packed = {r: entries[r][1][i] for r in contributors}
        layouts: dict[int, ArrayLayout] = {r: (shape, np.dtype(dtype)) for r, (shape, dtype, _) in packed.items()}
        _check_layouts(rank, i, op, layouts)
        is_own_alone = rank.size == 1 and isinstance(arrays[i], np.ndarray)
        if is_own_alone or all(content is not None for _, _, content in packed.values()):
            if rank.is_master:
                total = Accumulator(op)
                for r in contributors:
                    total.add(arrays[i] if r == rank.number else _unpack_array(*packed[r]), entries[r][0])
                results.append(total.get_result())
        elif op == "gather":
            results.append(_gather_large_arrays(rank, arrays[i] if outputs.n_rows else None, layouts))
        else:
            weights = {r: entries[r][0] for r in contributors}
            results.append(_reduce_large_arrays(rank, op, arrays[i] if outputs.n_rows else None, layouts, weights))
    return results if rank.is_master else None


def _to_numpy(value: Any) -> Any:
    """Convert an array on a device to NumPy.  Return other values unchanged."""
    device = find_device(value)
    return value if device is NUMPY else device.to_numpy(value)


def _pack_array(value: Any) -> tuple[tuple[int, ...], str, bytes | None] | None:
    """Return an array's shape, dtype and, if it is small, bytes: these are pickled faster than an array."""
    if value is None:
        return None
    if find_device(value) is not NUMPY:
        return value.shape, value.dtype.str, None
    return value.shape, value.dtype.str, value.tobytes() if value.nbytes <= MAX_SMALL_NBYTES else None


def _unpack_array(shape: tuple[int, ...], dtype: str, content: bytes) -> np.ndarray:
    """Return the small array that `_pack_array` packed."""
    return np.array(np.frombuffer(content, dtype).reshape(shape))


def _check_layouts(rank: Rank, position: int, op: str, layouts: dict[int, ArrayLayout]) -> None:
    """Raise an error on all ranks if an output's shapes or dtypes can't be reduced.

    An operation written in Python may return another dtype than it declares, on some ranks only.
    """
    is_elementwise = REDUCE_OPS[op].ufunc is not None
    if len({shape if is_elementwise else shape[1:] for shape, _ in layouts.values()}) > 1:
        condition = "the same shape" if is_elementwise else "equal lengths of all axes but axis 0"
        text = ", ".join(f"rank {r} has {shape}" for r, (shape, _) in layouts.items())
        message = f"output {position}: op {op!r} needs {condition} on all ranks, but {text}"
        rank.raise_common_error(ValueError(message))
    if len({dtype for _, dtype in layouts.values()}) > 1:
        text = ", ".join(f"rank {r} has {dtype}" for r, (_, dtype) in layouts.items())
        message = f"output {position}: an operation must return the dtype of its output's type, but {text}"
        rank.raise_common_error(TypeError(message))


def _gather_large_arrays(rank: Rank, value: Any, layouts: dict[int, ArrayLayout]) -> np.ndarray | None:
    """Concatenate large arrays along axis 0 in the master.  ``value`` is None on a rank without rows."""
    communicator = NUMPY.get_communicator(rank)
    all_layouts = [layouts.get(r) for r in range(rank.size)]
    own = None if value is None else find_device(value).transfers.as_byte_source(value)
    if not rank.is_master:
        communicator.gather(own, rank.master_rank, all_layouts, None)
        return None
    (_, *rest), dtype = next(iter(layouts.values()))
    shape = sum(shape[0] for shape, _ in layouts.values()), *rest
    joined = get_rank_device(rank).transfers.empty_in_host_memory(shape, dtype)
    out, start = [], 0
    for layout in all_layouts:
        length = 0 if layout is None else layout[0][0]
        out.append(None if layout is None else joined[start : start + length])
        start += length
    communicator.gather(own, rank.master_rank, all_layouts, out)
    return joined


def _reduce_large_arrays(
    rank: Rank, op: str, value: Any, layouts: dict[int, ArrayLayout], weights: dict[int, int]
) -> np.ndarray | None:
    """Reduce large arrays into the master; each rank reduces a share of the elements.

    Each rank multiplies its values by its weight.  The sum over ranks is then divided by the sum of the weights.
    """
    # `_check_layouts` has found them equal.
    shape, dtype = next(iter(layouts.values()))
    reduce_op = REDUCE_OPS[op]
    accumulator_dtype = reduce_op.choose_accumulator_dtype(dtype)
    own: Any = None
    if value is not None:
        device = find_device(value)
        own = np.ascontiguousarray(value, accumulator_dtype) if device is NUMPY else value.astype(accumulator_dtype)
        if reduce_op.needs_row_counts:
            own = own * np.asarray(weights[rank.number], accumulator_dtype)
        if device is not NUMPY:
            own = device.transfers.as_byte_source(own)
    out = get_rank_device(rank).transfers.empty_in_host_memory(shape, accumulator_dtype) if rank.is_master else None
    op_name = "sum" if reduce_op.is_mean else op
    NUMPY.get_communicator(rank).reduce(
        own, op_name, rank.master_rank, out, (shape, accumulator_dtype), sorted(layouts)
    )
    if out is None:
        return None
    if reduce_op.is_mean:
        total = sum(weights.values()) if reduce_op.needs_row_counts else len(weights)
        np.true_divide(out, total, out=out)
    return out.astype(dtype, copy=False)
