"""The table of reductions, by the names that users pass as ``op``.

A row is all that defines an op: functions, updates, collectives, programs, metrics and error messages read the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class ReduceOp:
    """A reduction: an entry of ``REDUCE_OPS``.

    Attributes
    ----------
    ufunc : ufunc or None
        Reduces two values to one.  JAX arrays use the function of the same name in ``jax.numpy``.  None: values are
        concatenated.
    nccl_op : int or None
        NCCL's number of the reduction (ncclRedOp_t).  None: collectives between GPUs use host memory.
    nccl_drops_nan : bool
        Whether NCCL's reduction of floats returns the other operand where one is NaN, unlike the ufunc.
    gpuarray_expression : str or None
        libgpuarray's expression for two elements.  None: GpuArrays can't be accumulated over slices.
    is_mean : bool
        Whether the sum is divided by the number of values, or of rows.
    needs_row_counts : bool
        Whether each value is weighted by its number of rows.  Collectives have no row counts, and exclude such an op.
    unsupported_kinds : str
        Kinds (``dtype.kind``) of dtypes that the ufunc refuses, or that the reduction would change.
    """

    ufunc: np.ufunc | None
    nccl_op: int | None = None
    nccl_drops_nan: bool = False
    gpuarray_expression: str | None = None
    is_mean: bool = False
    needs_row_counts: bool = False
    unsupported_kinds: str = ""

    @property
    def can_reduce_metrics(self) -> bool:
        """Whether it reduces metrics over batches of different lengths: elementwise, and no mean with equal weights."""
        return self.ufunc is not None and (self.needs_row_counts or not self.is_mean)

    def can_reduce(self, dtype: np.dtype) -> bool:
        """Whether the reduction is defined for a dtype: its result has the same dtype."""
        return dtype.kind not in self.unsupported_kinds

    def choose_accumulator_dtype(self, dtype: np.dtype) -> np.dtype:
        """Return the dtype, in the machine's byte order, in which values of a dtype are reduced.

        For a mean of float16 this is float32, since sums may overflow, and quotients before a sum may underflow.
        """
        return np.dtype(np.float32) if self.is_mean and dtype.char == "e" else dtype.newbyteorder("=")

    def reduce_first_axis(self, values: np.ndarray, n_rows: np.ndarray | None = None) -> Any:
        """Return the reduction along axis 0, bitwise equal to reducing the arrays one after another.

        ``n_rows`` has the shape of ``values``: the weights of a mean, if the op needs them.
        """
        assert self.ufunc is not None
        terms = values.astype(self.choose_accumulator_dtype(values.dtype), copy=False)
        if self.needs_row_counts:
            assert n_rows is not None
            terms = terms * n_rows.astype(terms.dtype)
        if math.prod(values.shape[1:]) > 1:
            # There is no initial value, since 0 + -0.0 is 0.
            total = self.ufunc.reduce(terms, axis=0, dtype=terms.dtype, initial=None)
        else:  # ufunc.reduce would add the numbers of a single column in pairs
            total = self.ufunc.accumulate(terms, axis=0, dtype=terms.dtype)[-1]
        if not self.is_mean:
            return total
        count = len(values) if n_rows is None or not self.needs_row_counts else np.add.reduce(n_rows)
        return np.true_divide(total, np.asarray(count, terms.dtype)).astype(values.dtype, copy=False)


_ADD = "res = a + b"
REDUCE_OPS = {
    # (v_1 + ... + v_k) / k
    "avg": ReduceOp(np.add, nccl_op=4, gpuarray_expression=_ADD, is_mean=True, unsupported_kinds="biu"),
    # (w_1 v_1 + ... + w_k v_k) / (w_1 + ... + w_k), where v_i is computed from w_i rows
    "mean": ReduceOp(np.add, gpuarray_expression=_ADD, is_mean=True, needs_row_counts=True, unsupported_kinds="biu"),
    # NumPy's sum of booleans is a logical or, where users expect a count.
    "sum": ReduceOp(np.add, nccl_op=0, gpuarray_expression=_ADD, unsupported_kinds="b"),
    "prod": ReduceOp(np.multiply, nccl_op=1, gpuarray_expression="res = a * b"),
    # The comparison with itself propagates a NaN.
    "min": ReduceOp(np.minimum, nccl_op=3, nccl_drops_nan=True, gpuarray_expression="res = (a <= b || a != a) ? a : b"),
    "max": ReduceOp(np.maximum, nccl_op=2, nccl_drops_nan=True, gpuarray_expression="res = (a >= b || a != a) ? a : b"),
    # Concatenated along axis 0; scalars become a vector.
    "gather": ReduceOp(None),
}


def divide_in_place(sums: np.ndarray, count: int) -> None:
    """Divide sums by a number of values.

    A product with the inverse of a power of two has the same bits as the quotient, in a third of the time.
    """
    if sums.dtype.kind == "f" and count.bit_count() == 1:
        np.multiply(sums, sums.dtype.type(1 / count), out=sums)
    else:
        np.true_divide(sums, count, out=sums)


def list_ops(dtype: np.dtype | None = None) -> tuple[str, ...]:
    """Return the names of all reductions, or only of the reductions that are defined for a dtype."""
    return tuple(name for name, op in REDUCE_OPS.items() if dtype is None or op.can_reduce(dtype))


def list_collective_ops(dtype: np.dtype | None = None) -> tuple[str, ...]:
    """Return the names from `list_ops` that collectives accept: elementwise reductions that need no row counts."""
    ops = [(name, REDUCE_OPS[name]) for name in list_ops(dtype)]
    return tuple(name for name, op in ops if op.ufunc is not None and not op.needs_row_counts)


def list_metric_ops() -> tuple[str, ...]:
    """Return the names of the reductions that metrics of trainers accept."""
    return tuple(name for name, op in REDUCE_OPS.items() if op.can_reduce_metrics)
