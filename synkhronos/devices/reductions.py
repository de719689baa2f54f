"""How do many values become one?  A table: a new reduction is one row.

`Reduction`
    A row.
`REDUCTIONS`
    The rows, by name.
`of_collectives`
    The names that collectives take.

========  =============================================================
op        the reduction of values v_i that come from w_i rows each
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
    """A row of the table.

    Attributes
    ----------
    combine : ufunc or None
        Makes one value of two; on JAX arrays ``jax.numpy`` has it by the same name.  None: values are joined.
    nccl : int or None
        NCCL's number (ncclRedOp_t).  None: collectives between GPUs go through host memory.
    kernel : str or None
        What libgpuarray computes for two elements.  None: GpuArrays can't be accumulated over slices.
    divides : bool
        Whether what was combined is divided, by the number of values or of rows.
    by_rows : bool
        Whether each value counts as many times as it has rows, which collectives know nothing of.
    refuses : str
        The kinds of dtypes whose reduction would not be of that dtype.
    """

    combine: np.ufunc | None
    nccl: int | None = None
    kernel: str | None = None
    divides: bool = False
    by_rows: bool = False
    refuses: str = ""

    def suits(self, dtype: np.dtype) -> bool:
        """Whether the reduction of values of a dtype is of that dtype."""
        return dtype.kind not in self.refuses

    def working(self, dtype: np.dtype) -> np.dtype:
        """Return the dtype in which values of a dtype are combined.

        A sum may be out of float16's range where the average is not, and its parts too small for it.
        """
        return np.dtype(np.float32) if self.divides and dtype.char == "e" else dtype


_ADD = "res = a + b"
REDUCTIONS = {
    "avg": Reduction(np.add, 4, _ADD, divides=True, refuses="biu"),
    "mean": Reduction(np.add, None, _ADD, divides=True, by_rows=True, refuses="biu"),
    # NumPy's sum of booleans is a logical or; whoever sums them means to count.
    "sum": Reduction(np.add, 0, _ADD, refuses="b"),
    "prod": Reduction(np.multiply, 1, "res = a * b"),
    # A NaN stays one.
    "min": Reduction(np.minimum, 3, "res = (a <= b || a != a) ? a : b"),
    "max": Reduction(np.maximum, 2, "res = (a >= b || a != a) ? a : b"),
    "gather": Reduction(None),
}


def of_collectives() -> tuple[str, ...]:
    """Return the names of the reductions that need nothing but the values."""
    return tuple(name for name, row in REDUCTIONS.items() if row.combine is not None and not row.by_rows)
