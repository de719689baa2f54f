"""A PyMC model whose log-density is computed by all ranks.

`DataParallelModel`
    What `synkhronos.extensions.pymc.data_parallel` returns.

PyMC is imported with this module.
"""

from __future__ import annotations

import operator
import sys
from functools import reduce
from types import FrameType
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from pymc.data import MinibatchOp
from pymc.logprob.utils import CheckParameterValue
from pytensor.compile import SharedVariable
from pytensor.graph.basic import Constant
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorType
from pytensor.tensor.math import Sum

from synkhronos.extensions.rows_sum import sum_over_rows
from synkhronos.extensions.rowwise import NotRowwiseError, RowSearch, make_rowwise


class DataParallelModel(pm.Model):
    """A model that has all from another one, its variables and data, but has the ranks compute its log-density.

    Parameters
    ----------
    model : pymc.Model
        The other one.

    Attributes
    ----------
    reasons : dict of str to str
        Why an observed variable or a potential is not split, by their names.
    """

    def __init__(self, model: pm.Model):
        self.__dict__.update(model.__dict__)
        self._sums: dict[Any, Any] = {}
        self.reasons: dict[str, str] = {}
        for variable in [*model.observed_RVs, *filter(_reads_data, model.potentials)]:
            try:
                self._sums[variable] = _sum_over_rows(model, variable)
            except NotRowwiseError as error:
                self.reasons[variable.name] = str(error)

    @property
    def split_RVs(self) -> list[Any]:
        """The observed variables and potentials that are split."""
        return list(self._sums)

    def logp(self, vars: Any = None, jacobian: bool = True, sum: bool = True) -> Any:
        """Return the log-density as an expression, as `pymc.Model.logp` does, from which all samplers start.

        The log-density of each row, which it is with ``sum=False``, is computed by this process.

        Raises
        ------
        RuntimeError
            If no ranks are running in this process.  Some samplers take an error of an evaluation for a point without
            a density, so that this is checked before they start.
        ValueError
            If pymc-extras' pathfinder asks for the log-density, and would evaluate it in other processes.
        """
        if vars is None:
            vars = [*self.basic_RVs, *self.potentials]
        each = [self.values_to_rvs.get(one, one) for one in (vars if isinstance(vars, list | tuple) else [vars])]
        sums = [self._sums[one] for one in each if one in self._sums]
        if not sum or not sums:
            return super().logp(vars, jacobian, sum)
        _check_pathfinder()
        for total in sums:
            total.owner.op.rows.get_session()
        others = [one for one in each if one not in self._sums]
        return reduce(operator.add, sums if not others else [super().logp(others, jacobian), *sums])

    def copy(self) -> DataParallelModel:
        """Return a copy, with variables and data of its own."""
        return DataParallelModel(super().copy())


def _check_pathfinder() -> None:
    """Raise ValueError if pymc-extras' pathfinder is calling, with paths in processes of their own.

    These have no ranks, and pathfinder does not report the error: it asks to report a bug.
    """
    frame: FrameType | None = sys._getframe()
    while frame := frame and frame.f_back:
        is_pathfinder = frame.f_globals.get("__name__", "").startswith("pymc_extras.inference.pathfinder")
        if is_pathfinder and frame.f_locals.get("concurrent") == "process":
            raise ValueError(
                "concurrent: pathfinder computes its paths in other processes, which have no ranks; "
                "pass concurrent=None: paths then run one after another, each on all ranks"
            )


def _sum_over_rows(model: pm.Model, variable: Any) -> Any:
    """Return the sum of an observed variable's or a potential's rows; raise `NotRowwiseError` if that can't be."""
    try:
        (terms,) = model.logp([variable], sum=False)
    except NotImplementedError as error:
        raise NotRowwiseError(f"PyMC has no log-density of it: {error}") from error
    if variable in model.potentials:
        terms = _added_up(terms)
        if not terms.type.ndim:
            raise NotRowwiseError("it is one number, and not the sum of an element for each row")
        find = pytensor.function(model.value_vars, terms.shape, mode="FAST_COMPILE", on_unused_input="ignore")
        shape = find(**model.initial_point())
    else:
        shape = model.rvs_to_values[variable].shape.eval()
    if not len(shape) or shape[0] < 2:
        raise NotRowwiseError(f"it has shape {tuple(map(int, shape))}, and so no rows to share out")

    def checked(search: RowSearch, node: Any, axis: int) -> Any:
        # What PyMC makes of a check of parameters when it compiles a model.
        value, *conditions = node.inputs
        value = search.restrict(value, axis)
        conditions = [search.restrict_condition(condition) for condition in conditions]
        if not node.op.can_be_replaced_by_ninf:
            return node.op(value, *conditions)
        return pt.switch(reduce(pt.and_, conditions), value, -np.inf) if model.check_bounds else value

    terms, rows = make_rowwise(terms, int(shape[0]), {CheckParameterValue: checked, MinibatchOp: _drawn})
    total = sum_over_rows(terms, rows, name=variable.name)
    # As Ctrl-C is: a sampler returns the draws so far.
    total.owner.op.rows.interrupts_on_exit = True
    return total


def _added_up(terms: Any) -> Any:
    """Return what a sum adds up, to the last number; else the terms."""
    node = terms.owner
    return node.inputs[0] if terms.type.ndim == 0 and node is not None and isinstance(node.op, Sum) else terms


def _reads_data(potential: Any) -> bool:
    """Whether a potential is computed from arrays, and may be a likelihood; else it weighs parameters alone."""
    data = (v for v in ancestors([potential]) if isinstance(v.type, TensorType))
    return any(
        isinstance(v, Constant)
        and v.data.size > 1
        or isinstance(v, SharedVariable)
        and v.get_value(borrow=True).size > 1
        for v in data
    )


def _drawn(search: RowSearch, node: Any, axis: int) -> Any:
    raise NotRowwiseError(
        "pm.Minibatch draws other rows at each evaluation; give all rows to a model that is to be split"
    )
