"""Scatter-addition of many rows into few on a GPU, such as the gradient of group effects.

A GPU adds by atomic instructions, which wait for each other if they have the same target.  To avoid this wait, rows are
added into several copies of the result, and the copies are summed at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from synkhronos.devices import JAX
from synkhronos.variable_types import Array, Node

#: Maximal number of copies.
_MAX_COPIES = 1024
#: Maximal number of elements of all copies: 8 MB of float64, which fit into a GPU's cache.
_MAX_ELEMENTS = 1 << 20
#: Minimal number of items that are added into a row of a copy, so that summing the copies is a small part of the work.
_MIN_ITEMS_PER_ROW = 256


def wrap_scatter_add(run: Callable[..., Any], node: Node) -> Callable[..., Any]:
    """Wrap the JAX function of a scatter-addition of rows to use copies on a GPU.  Return other nodes' unchanged."""
    from pytensor.tensor import subtensor

    op = node.op
    # PyTensor up to 3.0 has a separate Op for a single index vector.
    op_classes = (
        subtensor.AdvancedIncSubtensor,
        getattr(subtensor, "AdvancedIncSubtensor1", subtensor.AdvancedIncSubtensor),
    )
    if not isinstance(op, op_classes) or op.set_instead_of_inc:
        return run
    if len(node.inputs) != 3 or node.inputs[2].type.ndim != 1 or "int" not in node.inputs[2].type.dtype:
        return run

    def add(x: Array, y: Array, index: Array) -> Array:
        n_copies = choose_n_copies(np.shape(x), np.shape(y), np.shape(index)) if JAX.is_on_gpu else 1
        return scatter_add_rows(x, y, index, n_copies) if n_copies > 1 else run(x, y, index)

    return add


def choose_n_copies(x_shape: tuple[int, ...], y_shape: tuple[int, ...], index_shape: tuple[int, ...]) -> int:
    """Return the number of copies of ``x`` with which to compute ``x.at[index].add(y)``; 1 or less means none."""
    if not math.prod(x_shape) or not x_shape or y_shape != (*index_shape, *x_shape[1:]):
        return 1
    return min(_MAX_COPIES, _MAX_ELEMENTS // math.prod(x_shape), index_shape[0] // (_MIN_ITEMS_PER_ROW * x_shape[0]))


def scatter_add_rows(x: Array, y: Array, index: Array, n_copies: int) -> Array:
    """Return ``x.at[index].add(y)``, computed in ``n_copies`` copies of the result.

    ``x`` is (rows, *item shape), ``y`` (items, *item shape) of the same dtype, ``index`` (items,) of integers::

        index    2 0 2 2 1 2
        copy     0 1 0 1 0 1    each copy adds two items into its row 2, instead of four into one row
    """
    import jax.numpy as jnp

    n_rows = x.shape[0]
    index = jnp.where(index < 0, index + n_rows, index.astype(int))
    target = index + n_rows * (jnp.arange(index.shape[0]) % n_copies)
    # Rows with an index out of bounds are dropped, as without copies.
    target = jnp.where((index >= 0) & (index < n_rows), target, n_rows * n_copies)
    sums = jnp.zeros((n_rows * n_copies, *x.shape[1:]), y.dtype).at[target].add(y, mode="drop")
    return x + sums.reshape(n_copies, *x.shape).sum(axis=0)
