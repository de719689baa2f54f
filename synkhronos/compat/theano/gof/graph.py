"""The module ``theano.gof.graph``, on PyTensor: traversal of graphs."""

from collections.abc import Iterable
from typing import Any

from pytensor.graph.basic import Apply, Constant, Variable, clone, clone_get_equiv, equal_computations
from pytensor.graph.traversal import ancestors, io_toposort, variable_depends_on
from pytensor.graph.traversal import graph_inputs as _graph_inputs


def inputs(variable_list: Iterable[Any], blockers: Any = None) -> list[Any]:
    """Return the inputs of the graph that computes some variables: those without an Apply node."""
    return list(_graph_inputs(list(variable_list), blockers))


def is_same_graph(var1: Any, var2: Any, givens: Any = None, debug: bool = False) -> bool:
    """Return True if two variables are equal computations, after the replacements ``givens``.  Ignore ``debug``."""
    pairs = dict(givens or {})
    return equal_computations([var1], [var2], list(pairs), list(pairs.values()))
