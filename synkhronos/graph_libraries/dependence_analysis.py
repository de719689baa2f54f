"""Dependence of expressions on the values of inputs, and the denominators of means in them.

A loss such as ``(mask * errors).sum() / mask.sum()`` is a mean over the items that `mask` selects.  Ranks select
different numbers of items, so each rank's loss needs its denominator as the weight in the mean over ranks.  A
denominator that depends on lengths alone is not needed, since ranks are weighted by their numbers of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from synkhronos.graph_libraries.library import GraphLibrary
from synkhronos.variable_types import Node, Variable

_SHAPE_OPS = ("Shape", "Shape_i")
#: Ops whose outputs have lengths that depend on values.
_SELECTION_OPS = ("Nonzero", "NonZero", "Unique", "AdvancedBooleanSubtensor")
#: Elementwise ops whose result counts as a sum if an input is a sum.
_SUM_PRESERVING_OPS = "Cast Neg Mul Add Sub Maximum ScalarMaximum Minimum ScalarMinimum Clip Switch".split()


class DependenceAnalysis:
    """Dependence of expressions, and of the variables from which they are computed, on sources.

    Sources are inputs and shared variables whose values differ between ranks.

    Examples
    --------
    >>> import pytensor.tensor as pt
    >>> from synkhronos.graph_libraries import get_library
    >>> x, mask = pt.matrix("x"), pt.matrix("mask")
    >>> loss = (mask * x).sum() / mask.sum()
    >>> found = DependenceAnalysis(get_library(x), [loss, x.mean()], [x, mask])
    >>> [found.list_source_names(denominator) for denominator in found.find_denominators(loss)]
    [['mask']]
    >>> found.find_denominators(x.mean())
    []
    """

    def __init__(self, library: GraphLibrary, expressions: Sequence[Any], sources: Iterable[Any]):
        self._library = library
        self._sources = {id(source): source for source in sources}
        self._value_dependents = set(self._sources)
        #: Variables whose shapes depend on values of sources.
        self._length_dependents: set[int] = set()
        for node in library.sort_nodes(expressions):
            self._add_node(node)

    def _add_node(self, node: Node) -> None:
        """Record whether a node's outputs depend on values of sources, and whether their lengths do."""
        name, inputs = type(node.op).__name__, node.inputs
        if name in _SHAPE_OPS:
            depends = id(inputs[0]) in self._length_dependents
        else:
            # `Second` fills an array with the shape of its first input.
            depends = any(map(self.depends_on_values, inputs[1:] if _get_scalar_name(node) == "Second" else inputs))
        is_selection = (
            name in _SELECTION_OPS
            or name == "AdvancedSubtensor"
            and any(getattr(index.type, "dtype", None) == "bool" for index in inputs[1:])
        )
        lengths_depend = depends and is_selection or any(id(variable) in self._length_dependents for variable in inputs)
        for output in node.outputs:
            if depends:
                self._value_dependents.add(id(output))
            if lengths_depend and getattr(output.type, "ndim", None) != 0 and name not in _SHAPE_OPS:
                self._length_dependents.add(id(output))

    def depends_on_values(self, variable: Variable) -> bool:
        """Whether the variable's values depend on the values of a source, rather than on its shape alone."""
        return id(variable) in self._value_dependents

    def list_source_names(self, variable: Variable) -> list[str]:
        """Return the names of the sources on which a variable depends."""
        nodes = self._library.sort_nodes([variable])
        ancestors = {id(variable), *(id(ancestor) for node in nodes for ancestor in node.inputs)}
        return [source.name or str(source) for key, source in self._sources.items() if key in ancestors]

    def find_denominators(self, expression: Variable) -> list[Variable]:
        """Return the denominators of means in an expression that depend on values of sources.

        Only scalar denominators are returned; an array, such as a softmax's sums, does not count rows.  Either the
        numerator is a sum, or the denominator is a sum that depends on sources alone.  A denominator is the divisor of
        a quotient, or a factor's inverse or power of -1, but not a logarithm that is subtracted.
        """
        denominators = []
        for node in self._library.sort_nodes([expression]):
            name = _get_scalar_name(node)
            if name in ("TrueDiv", "IntDiv"):
                numerator, denominator = node.inputs
            elif name in ("Inv", "Reciprocal") or name == "Pow" and self._is_minus_one(node.inputs[1]):
                numerator, denominator = None, node.inputs[0]
            else:
                continue
            if not self.depends_on_values(denominator) or not _is_scalar(denominator):
                continue
            is_count = _is_sum(denominator) and not self._has_parameters(denominator)
            if is_count or numerator is not None and self.depends_on_values(numerator) and _is_sum(numerator):
                denominators.append(denominator)
        return denominators

    def _is_minus_one(self, exponent: Any) -> bool:
        return self._library.is_constant(exponent) and exponent.data.size == 1 and exponent.data == -1

    def _has_parameters(self, variable: Variable) -> bool:
        """Whether a variable depends on shared variables that are not sources."""
        return any(id(shared) not in self._sources for shared in self._library.find_shareds([variable]))


def _get_scalar_name(node: Node) -> str:
    """Return the class name of an Elemwise node's scalar op; "" for any other node."""
    return type(node.op.scalar_op).__name__ if type(node.op).__name__ == "Elemwise" else ""


def _is_scalar(variable: Variable) -> bool:
    return all(getattr(variable.type, "broadcastable", (False,)))


def _is_sum(variable: Variable) -> bool:
    """Whether a scalar is a sum over all elements, up to factors, terms, bounds and casts."""
    node = variable.owner
    if node is None or not _is_scalar(variable):
        return False
    name, scalar = type(node.op).__name__, _get_scalar_name(node)
    if name in ("Sum", "Dot") or name == "CAReduce" and type(node.op.scalar_op).__name__ == "Add":
        return True
    if name in ("DimShuffle", "Reshape", "TensorFromScalar", "SpecifyShape") or scalar == "TrueDiv":
        return _is_sum(node.inputs[0])
    if name == "Subtensor":  # the length of a selection
        source = node.inputs[0].owner
        return source is not None and type(source.op).__name__ in _SHAPE_OPS
    if name in _SHAPE_OPS:
        return True
    return scalar in _SUM_PRESERVING_OPS and any(map(_is_sum, node.inputs))
