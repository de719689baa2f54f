"""Rewriting of a row-wise expression so that it computes some rows only, the *computed rows*.

An expression is row-wise if row ``i`` of its value depends on row ``i`` of the data, and otherwise on nothing that has
rows.  The search starts at the output and walks to the inputs, with one rule for each operation.  For example, rows of
``a + b`` need the same rows of ``a`` and of ``b``; rows of ``effects[group]`` need rows of ``group``, and all of
``effects``.  The search ends at data, which are replaced by inputs of any number of rows, and at parameters, which stay
as they are.  An operation that mixes rows, or that has no rule, raises `NotRowwiseError`.
"""

from __future__ import annotations

from typing import Any

from pytensor.scan.op import Scan

from synkhronos.extensions.distributed_rows import get_rows
from synkhronos.extensions.pymc.row_restrictor import NotRowwiseError, RowRestrictor, RowwiseRule
from synkhronos.extensions.pymc.rowwise_rules import RULES
from synkhronos.extensions.rows_sum_graph import replace_variables
from synkhronos.graph_libraries import get_library
from synkhronos.variable_types import Variable

__all__ = ["make_rowwise"]


def make_rowwise(
    terms: Variable, length: int, rules: dict[type, RowwiseRule] | None = None
) -> tuple[Any, dict[Any, Any]]:
    """Return an expression for the terms of any number of rows, and the data that it needs.

    Parameters
    ----------
    terms : variable
        At least one-dimensional; axis 0 runs along the rows.
    length : int
        Number of rows; more than one.
    rules : dict of class to callable, optional
        Rules for further operations, by the class of the Op.

    Returns
    -------
    terms : variable
        Computed from symbolic inputs for the rows, and from parameters.
    rows : dict of variable to ndarray, shared variable or ComputedRows
        The values of these inputs, for `synkhronos.extensions.rows_sum.sum_over_rows`.

    Raises
    ------
    NotRowwiseError
        If a row of the terms depends on other rows, or if no rule excludes that.
    """
    if not terms.type.ndim:
        raise NotRowwiseError("the log-density is one number for all rows, as where these depend on each other")
    # The rows of loops are few and costly.
    has_loops = any(isinstance(node.op, Scan) for node in get_library(terms).sort_nodes([terms]))
    restrictor = RowRestrictor(length, {**RULES, **(rules or {})}, allow_row_parameters=has_loops)
    restricted = restrictor.restrict(terms, 0)
    nodes = get_library(restricted).sort_nodes([restricted])
    used_variables = {restricted, *(variable for node in nodes for variable in node.inputs)}
    rows = {
        placeholder: values
        for placeholder, values in restrictor.rows_by_placeholder.items()
        if placeholder in used_variables
    }
    if not rows:
        raise NotRowwiseError("no data run along the rows")
    for values in rows.values():
        n_rows = len(get_rows(values))
        if n_rows != length:
            raise NotRowwiseError(f"the log-density has {length} rows, and data along them have {n_rows}")
    restricted = replace_variables(restricted, nodes, {restrictor.n_rows_variable: next(iter(rows)).shape[0]})
    restrictor.check_parameters(restricted)
    return restricted, rows
