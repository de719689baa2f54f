"""The module ``theano.gof.graph``, on PyTensor: traversal of graphs."""

from collections.abc import Iterable
from typing import Any

from pytensor.graph.basic import Apply, Constant, Variable, clone, clone_get_equiv, equal_computations
from pytensor.graph.traversal import ancestors, io_toposort, variable_depends_on
from pytensor.graph.traversal import graph_inputs as _graph_inputs


def inputs(variable_list: Iterable[Any], blockers: Any = None) -> list[Any]:
    """Return the inputs of the graph that computes some variables: those without an Apply node."""
    return list(_graph_inputs(list(variable_list), blockers))


def variables(i: Iterable[Any], o: Iterable[Any]) -> set[Any]:
    """Return the variables between inputs ``i`` and outputs ``o``, both included."""
    return set(ancestors(list(o), list(i))) | set(i) | set(o)


def ops(i: Iterable[Any], o: Iterable[Any]) -> set[Any]:
    """Return the Apply nodes between inputs ``i`` and outputs ``o``."""
    return set(io_toposort(list(i), list(o)))


def is_same_graph(var1: Any, var2: Any, givens: Any = None, debug: bool = False) -> bool:
    """Return True if two variables are equal computations, after the replacements ``givens``; ignore ``debug``.

    Examples
    --------
    >>> x = T.dscalar("x")
    >>> theano.gof.graph.is_same_graph(x + 1, x + 1)
    True
    """
    pairs = dict(givens or {})
    return equal_computations([var1], [var2], list(pairs), list(pairs.values()))
