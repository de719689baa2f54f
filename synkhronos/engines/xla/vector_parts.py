"""Long vectors, such as the gradient, whose parts are written into the memory of their old values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from synkhronos.engines.xla.jaxpr_evaluator import JaxprEvaluator
from synkhronos.lowering.jax_function import JaxFunction
from synkhronos.variable_types import Array

#: Minimal number of bytes of a vector whose parts are written into its memory one after another.
MIN_NBYTES_IN_PLACE = 1 << 20
#: Minimal number of elements of a part that is copied alone.
MIN_PART_ITEMS = 1 << 16


def trace_in_place(function: JaxFunction, operands: Sequence[Any]) -> Sequence[Array]:
    """Trace a function.  Copy the parts of a long vector, such as the gradient, into the memory of its old value.

    XLA's kernel that concatenates many arrays takes four times as long as copies.
    """
    if function.length_graph is not None:
        return function.run(*operands)  # lengths are numbers, which the evaluator would trace as arrays
    positions = {id(storage): function.n_inputs + i for i, storage in enumerate(function.storages)}
    for i, storage in enumerate(function.result_storages[function.n_outputs :], start=function.n_outputs):
        old_value = operands[positions[id(storage)]]
        if not _is_long_vector(old_value):
            continue
        evaluator = JaxprEvaluator(function.run, operands, function.n_outputs, i)
        if can_write_parts(old_value, [part.aval for part in evaluator.parts]):
            return evaluator.compute_results(write_parts(old_value, evaluator.compute(evaluator.parts)))
    return function.run(*operands)


def can_write_parts(vector: Array, parts: Sequence[Any]) -> bool:
    """Whether to write several vectors into the memory of ``vector``, which must be long, and of their joint type."""
    if not _is_long_vector(vector) or len(parts) == 1:
        return False
    return bool(parts[0].dtype == vector.dtype and sum(part.size for part in parts) == vector.size)


def _is_long_vector(array: Array) -> bool:
    return bool(array.ndim == 1 and array.nbytes >= MIN_NBYTES_IN_PLACE)


def write_parts(vector: Array, parts: Sequence[Any]) -> Array:
    """Return the concatenation of vectors, in the memory of ``vector``.  Short neighbours are copied together."""
    import jax.numpy as jnp
    from jax import lax

    start = 0
    for _, group in groupby(enumerate(parts), lambda item: item[0] if item[1].size >= MIN_PART_ITEMS else -1):
        values = [part for _, part in group]
        values = [jnp.concatenate(values)] if len(values) > 1 else values
        vector = lax.dynamic_update_slice(vector, *values, (start,))
        start += values[0].size
    return vector
