"""Static lengths of slices whose bounds are data and differ by a constant, in JAX mode.

PyTensor infers a length for ``x[i:i + 28]`` that is less than 28 near the end of ``x``.  If ``i`` is data, as in a
random crop, XLA can't compile an array of that length; the lowering in `shapes` returns 28 rows, or NaN.  So a rewrite
specifies the length 28, and no shape that is inferred from it depends on data.
"""

from __future__ import annotations

from typing import Any

from pytensor.compile.mode import optdb
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import GraphRewriter
from pytensor.tensor.shape import specify_shape
from pytensor.tensor.subtensor import Subtensor

from synkhronos.lowering.lengths import KnownVariables, split_indexing
from synkhronos.lowering.polynomial import find_constant_extent


class SliceLengthRewriter(GraphRewriter):
    """Rewrite that specifies the lengths of slices whose bounds are data and differ by a constant."""

    def apply(self, fgraph: FunctionGraph) -> None:
        """Rewrite a graph in place."""
        slices = [node for node in fgraph.toposort() if isinstance(node.op, Subtensor)]
        known_variables = KnownVariables(fgraph) if slices else None
        for node in slices:
            lengths = _find_lengths(node, known_variables)
            out = node.outputs[0]
            if any(length is not None for length in lengths):
                fgraph.replace(out, specify_shape(node.op(*node.inputs), lengths), reason="slice_lengths")


def _find_lengths(node: Any, known_variables: Any) -> list[int | None]:
    """Return the length of each axis of a node's output, if it is a slice by data with constant length; else None."""
    lengths: list[int | None] = []
    for index in split_indexing(node.op, node.inputs)[1]:
        if not isinstance(index, slice):
            continue
        bounds = [bound for bound in (index.start, index.stop, index.step) if bound is not None]
        is_data = not all(map(known_variables.is_known_in_trace, bounds))
        lengths.append(find_constant_extent(index, {}) if is_data else None)
    return lengths + [None] * (node.outputs[0].type.ndim - len(lengths))


# Before shapes are inferred, at 0.1.
optdb.register("slice_lengths", SliceLengthRewriter(), "jax", position=0.05)
