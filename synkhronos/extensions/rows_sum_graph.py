"""The part of a graph that ranks compute for a sum over rows: its nodes and its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply, Constant
from pytensor.graph.traversal import ancestors
from pytensor.scan.op import Scan
from pytensor.tensor import TensorType
from pytensor.tensor.elemwise import DimShuffle

from synkhronos.checks import describe
from synkhronos.graph_libraries import get_library
from synkhronos.variable_types import SharedVariable, Variable

#: Maximal number of elements of constants that are sent with the graph, and of arrays that ranks compute at each call
#: from constants or parameters.
_MAX_CONSTANT_SIZE = 1000


def select_rank_nodes(terms: Variable, rows: Sequence[Any]) -> list[Apply]:
    """Return the nodes that the ranks compute, in topological order.

    These are the nodes that depend on rows, and nodes of small arrays before them.  Rewrites need the small nodes, too:
    from ``sigma = exp(log_sigma)`` alone they could not make ``log(sigma)`` and its gradient finite where ``sigma`` is
    0.
    """
    nodes = get_library(terms).sort_nodes([terms])
    read_variables = {terms, *(variable for node in nodes for variable in node.inputs)}
    unused = [describe(variable) for variable in rows if variable not in read_variables]
    if unused:
        raise ValueError(f"rows: the terms are not computed from {', '.join(unused)}")
    row_dependent = set(rows)
    constants = {v for v in read_variables if isinstance(v, Constant) and np.size(v.data) <= _MAX_CONSTANT_SIZE}
    for node in nodes:
        if not row_dependent.isdisjoint(node.inputs):
            row_dependent.update(node.outputs)
        if constants.issuperset(node.inputs):
            constants.update(node.outputs)
    needed = {terms}
    selected = []
    for node in reversed(nodes):
        needed_outputs = needed.intersection(node.outputs)
        if needed_outputs and (
            not needed_outputs.isdisjoint(row_dependent | constants)
            or not all(map(_is_array, needed_outputs))
            or isinstance(node.op, DimShuffle)
            or _is_cheap(node)
        ):
            selected.append(node)
            needed.update(node.inputs)
    return selected[::-1]


def find_params(selected: Sequence[Apply], rows: Sequence[Any]) -> list[Variable]:
    """Return the inputs of these nodes other than rows and constants."""
    computed = {variable for node in selected for variable in node.outputs}
    params: dict[Any, None] = {}
    for variable in (variable for node in selected for variable in node.inputs):
        if variable in computed or variable in rows or isinstance(variable, Constant):
            continue
        if not _is_array(variable):
            raise TypeError(f"terms: computed from {describe(variable)} of type {variable.type}, which cannot be sent")
        params[variable] = None
    return list(params)


def sort_params(params: Sequence[SharedVariable], variable_order: Sequence[Variable]) -> list[SharedVariable]:
    """Sort the parameters by their earliest ancestor in ``variable_order``; parameters without one are last."""
    position = {variable: i for i, variable in enumerate(variable_order)}
    return sorted(params, key=lambda param: min(position.get(v, len(position)) for v in ancestors([param])))


def replace_variables(variable: Variable, nodes: Sequence[Apply], replacements: Mapping[Any, Any]) -> Variable:
    """Return `variable` with ``replacements`` in its graph.  ``nodes`` is the graph in topological order."""
    new_variables = dict(replacements)
    for node in nodes:
        if not new_variables.keys().isdisjoint(node.inputs):
            new_node = node.clone_with_new_inputs([new_variables.get(v, v) for v in node.inputs], strict=False)
            outputs = zip(node.outputs, new_node.outputs, strict=True)
            new_variables.update((output, new_output) for output, new_output in outputs if output not in replacements)
    return new_variables.get(variable, variable)


def replace_checks(variables: Sequence[Variable], replace: Callable[..., Any]) -> list[Variable]:
    """Return `variables` with ``replace(op, value, *conditions)`` in place of each check of parameters by PyMC."""
    new_variables: dict[Any, Any] = {}
    for node in get_library(variables[0]).sort_nodes(variables):
        inputs = [new_variables.get(v, v) for v in node.inputs]
        if hasattr(node.op, "can_be_replaced_by_ninf"):
            new_variables[node.outputs[0]] = replace(node.op, *inputs)
        elif not new_variables.keys().isdisjoint(node.inputs):
            new_node = node.clone_with_new_inputs(inputs, strict=False)
            new_variables.update(zip(node.outputs, new_node.outputs, strict=True))
    return [new_variables.get(variable, variable) for variable in variables]


def _is_array(variable: Variable) -> bool:
    return isinstance(variable.type, TensorType)


def _is_cheap(node: Apply) -> bool:
    """Whether a node of PyTensor or PyMC computes small arrays from small arrays."""
    arrays = [*node.inputs, *node.outputs]
    op = getattr(node.op, "scalar_op", node.op)
    # Users' Ops may have state or effects, and stay in the master.
    return (
        type(op).__module__.startswith(("pytensor.", "pymc."))
        and not isinstance(op, Scan)
        and all(
            isinstance(v.type, TensorType)
            and None not in v.type.shape
            and math.prod(v.type.shape) <= _MAX_CONSTANT_SIZE
            for v in arrays
        )
    )
