"""Slices of a constant length that begin where an array's values say, in JAX mode.

PyTensor infers the length of ``x[i:i + 28]`` as it would be at the end of ``x``, where fewer rows are left.  If ``i``
is data, as in a random crop, XLA can't make an array of that length: `shapes` takes 28 rows, or NaN.  So the length is
specified to be 28, or shapes that are inferred from it would depend on data.
"""

from __future__ import annotations

from typing import Any

from pytensor.compile.mode import optdb
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import GraphRewriter
from pytensor.tensor.shape import specify_shape
from pytensor.tensor.subtensor import Subtensor

from synkhronos.lowering.lengths import Known, indices_of
from synkhronos.lowering.shapes import constant_length

__all__ = ["SliceLengths"]


class SliceLengths(GraphRewriter):
    """Specifies the lengths of slices whose bounds are data, and differ by a constant."""

    def apply(self, fgraph: FunctionGraph) -> None:
        """Rewrite a graph."""
        slices = [node for node in fgraph.toposort() if isinstance(node.op, Subtensor)]
        known = Known(fgraph) if slices else None
        for node in slices:
            lengths = _lengths(node, known)
            out = node.outputs[0]
            if any(length is not None for length in lengths):
                fgraph.replace(out, specify_shape(node.op(*node.inputs), lengths), reason="slice_lengths")


def _lengths(node: Any, known: Any) -> list[int | None]:
    """Return for each axis of a node's output the length of a slice by data, or None."""
    found: list[int | None] = []
    for index in indices_of(node.op, node.inputs[1:]):
        if not isinstance(index, slice):
            continue
        bounds = [bound for bound in (index.start, index.stop, index.step) if bound is not None]
        is_data = not all(map(known.is_known_to_jax, bounds))
        found.append(constant_length(index, {}) if is_data else None)
    return found + [None] * (node.outputs[0].type.ndim - len(found))


# Before shapes are inferred, at 0.1.
optdb.register("slice_lengths", SliceLengths(), "jax", position=0.05)
