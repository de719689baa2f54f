"""The table of reductions; a new reduction is one entry.

========  =============================================================
op        reduction of values v_i, each computed from w_i rows
========  =============================================================
avg       (v_1 + ... + v_k) / k
mean      (w_1 v_1 + ... + w_k v_k) / (w_1 + ... + w_k)
sum       v_1 + ... + v_k
prod      v_1 * ... * v_k
min, max  elementwise
gather    joined along axis 0 (scalars become a vector)
========  =============================================================
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Reduction:
    """An entry of the table.

    Attributes
    ----------
    ufunc : ufunc or None
        Reduces two values to one.  JAX arrays use the function of ``jax.numpy`` of the same name.  None concatenates.
    nccl : int or None
        NCCL's number (ncclRedOp_t).  None: collectives between GPUs go through host memory.
    kernel : str or None
        libgpuarray's expression for two elements.  None: GpuArrays can't be accumulated over slices.
    divides : bool
        Whether the result is divided by the number of values, or of rows.
    weights_rows : bool
        Whether each value is weighted by its number of rows.  Collectives have no rows, so they lack such an op.
    refuses : str
        Kinds of dtypes (``dtype.kind``) that the reduction would not preserve.
    """

    ufunc: np.ufunc | None
    nccl: int | None = None
    kernel: str | None = None
    divides: bool = False
    weights_rows: bool = False
    refuses: str = ""

    def can_reduce(self, dtype: np.dtype) -> bool:
        """Whether values of a dtype are reduced to the same dtype."""
        return dtype.kind not in self.refuses

    def choose_accumulator_dtype(self, dtype: np.dtype) -> np.dtype:
        """Return the dtype in which values of a dtype are reduced.

        It is float32 for a mean of float16: the sum may overflow, and quotients of the summands underflow.
        """
        return np.dtype(np.float32) if self.divides and dtype.char == "e" else dtype


_ADD = "res = a + b"
REDUCTIONS = {
    "avg": Reduction(np.add, 4, _ADD, divides=True, refuses="biu"),
    "mean": Reduction(np.add, None, _ADD, divides=True, weights_rows=True, refuses="biu"),
    # NumPy's sum of booleans is a logical or, where users expect a count.
    "sum": Reduction(np.add, 0, _ADD, refuses="b"),
    "prod": Reduction(np.multiply, 1, "res = a * b"),
    # The comparison with itself propagates a NaN.
    "min": Reduction(np.minimum, 3, "res = (a <= b || a != a) ? a : b"),
    "max": Reduction(np.maximum, 2, "res = (a >= b || a != a) ? a : b"),
    "gather": Reduction(None),
}


def list_collective_ops() -> tuple[str, ...]:
    """Return the names of the reductions that collectives accept: those that need no row counts."""
    return tuple(
        name for name, reduction in REDUCTIONS.items() if reduction.ufunc is not None and not reduction.weights_rows
    )
