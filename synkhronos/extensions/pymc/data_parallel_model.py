"""The class of models that `synkhronos.extensions.pymc.data_parallel` returns.

All samplers of PyMC start from ``Model.logp``, an expression.  The class replaces those of its terms that are sums over
rows by sums over rows on the ranks.  Everything else stays as PyMC builds it.

PyMC is imported with this module.
"""

from __future__ import annotations

import logging
import operator
import sys
from collections.abc import Callable
from functools import reduce
from types import FrameType
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from pymc.blocking import DictToArrayBijection
from pymc.data import MinibatchOp
from pymc.logprob.utils import CheckParameterValue
from pymc.pytensorf import rewrite_pregrad
from pytensor.compile import SharedVariable
from pytensor.graph.basic import Constant
from pytensor.graph.traversal import ancestors
from pytensor.scan.op import Scan
from pytensor.tensor import TensorType
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.math import Sum
from pytensor.tensor.type import float_dtypes

from synkhronos import ranks
from synkhronos.extensions.chains import can_compute_in_forks, find_chain, measure_evaluation_rate
from synkhronos.extensions.pymc import chain_servers
from synkhronos.extensions.pymc.logistic import simplify_logistic
from synkhronos.extensions.pymc.row_restrictor import NotRowwiseError, RowRestrictor, make_rowwise
from synkhronos.extensions.pymc.rowwise_rules import RULES
from synkhronos.extensions.pymc.rowwise_scan import restrict_scan
from synkhronos.extensions.pymc.xla_samplers import wrap_samplers
from synkhronos.extensions.rows_sum import DistributedSum, SumOverRows
from synkhronos.extensions.rows_sum_graph import replace_variables
from synkhronos.extensions.sampler_threads import stop_sampler
from synkhronos.graph_libraries import get_library
from synkhronos.variable_types import Node, Variable

#: PyMC prints the messages of its own logger and of those below it.
_log = logging.getLogger("pymc.synkhronos")

#: Least gain, as a factor, for which `DataParallelModel.choose_ranks` gives a chain more ranks.
_MIN_GAIN = 1.05


class DataParallelModel(pm.Model):
    """A model that shares variables and data with another one, and whose log-density is computed by all ranks.

    Parameters
    ----------
    model : pymc.Model
        The other model.

    Attributes
    ----------
    reasons : dict of str to str
        Reasons why observed variables and potentials are not split, by name.
    distributed_sums : list of DistributedSum
        The sums over rows that the log-density contains.
    """

    def __init__(self, model: pm.Model):
        chain_servers.patch_external_sampler()
        self.__dict__.update(model.__dict__)
        self._distributed_logps: dict[Any, Any] = {}
        self.reasons: dict[str, str] = {}
        for variable in [*model.observed_RVs, *filter(_reads_data, model.potentials)]:
            try:
                self._distributed_logps[variable] = _make_distributed_logp(model, variable)
            except NotRowwiseError as error:
                self.reasons[variable.name] = str(error)
        self.distributed_sums: list[DistributedSum] = [
            variable.owner.op.sum
            for variable in ancestors(self._distributed_logps.values())
            if variable.owner is not None and isinstance(variable.owner.op, SumOverRows)
        ]

    @property
    def split_RVs(self) -> list[Variable]:
        """The observed variables and potentials that are split."""
        return list(self._distributed_logps)

    @property
    def unobserved_value_vars(self) -> list[Variable]:
        """The value variables of unobserved variables.

        PyMC's samplers in JAX read them first, so that the functions that they call next can be wrapped here.
        """
        wrap_samplers()
        variables: list[Any] = super().unobserved_value_vars
        return variables

    def logp(self, vars: Any = None, jacobian: bool = True, sum: bool = True) -> Variable:
        """Return the log-density as an expression, as `pymc.Model.logp` does.

        With ``sum=False`` it is PyMC's own expression, which this process computes.

        Raises
        ------
        RuntimeError
            If no ranks are running in this process.  An evaluation would raise it as well, but some samplers take
            errors of evaluations for points without a density.
        ValueError
            If pymc-extras' pathfinder would evaluate the log-density in other processes.
        """
        if vars is None:
            vars = [*self.basic_RVs, *self.potentials]
        vars = vars if isinstance(vars, list | tuple) else [vars]
        variables = [self.values_to_rvs.get(variable, variable) for variable in vars]
        sums = [self._distributed_logps[variable] for variable in variables if variable in self._distributed_logps]
        if not sum or not sums:
            return super().logp(vars, jacobian, sum)
        _check_pathfinder()
        wrap_samplers()
        for distributed_sum in self.distributed_sums:
            distributed_sum.ensure_session()
        unsplit = [variable for variable in variables if variable not in self._distributed_logps]
        return reduce(operator.add, sums if not unsplit else [super().logp(unsplit, jacobian), *sums])

    def copy(self) -> DataParallelModel:
        """Return a copy that has its own variables and data."""
        return DataParallelModel(super().copy())

    def choose_ranks(self, model: pm.Model, chains: int) -> None:
        """Measure gradients with 1, 2, 4, ... ranks for each chain, and limit chains to the quickest number of ranks.

        If `model`, from which this one was made, is as quick in its chains' processes alone, no variable is split.  The
        result is logged.
        """
        session = ranks.get_session()
        if chains == 1 or not can_compute_in_forks(session):
            # The master samples one chain at a time, on all ranks.
            chains, rank_counts = 1, [session.size]
        else:
            share = max(1, len(session.rank.local_ranks) // chains)
            rank_counts = [*(1 << i for i in range(share.bit_length()) if 1 << i < share), share]
        evaluate_alone, evaluate_parallel = _make_evaluator(model), _make_evaluator(self)
        evaluate_alone(), evaluate_parallel()  # compiled here once, and not by each chain
        rates = [measure_evaluation_rate(evaluate_alone, chains)]
        fastest, min_rate = 0, rates[0] * _MIN_GAIN  # 0 ranks: PyMC alone
        for count in rank_counts:
            self._limit_chain_ranks(count)
            rates.append(measure_evaluation_rate(evaluate_parallel, chains))
            if rates[-1] > min_rate:
                fastest, min_rate = count, rates[-1]
        names = {0: "PyMC alone"} | {count: f"{count} rank{'s' if count > 1 else ''}" for count in rank_counts}
        times = ", ".join(f"{name} {1e3 * chains / r:.3g} ms" for name, r in zip(names.values(), rates, strict=True))
        _log.info("Each of %s chains is computed by %s. Times of a gradient: %s", chains, names[fastest], times)
        if not fastest:
            self.reasons.update(
                (variable.name, f"PyMC alone is as quick: {times}") for variable in self._distributed_logps
            )
            self._distributed_logps, self.distributed_sums = {}, []
        else:  # the largest number is a share, and chains may divide the remainder
            self._limit_chain_ranks(None if fastest == rank_counts[-1] else fastest)

    def _limit_chain_ranks(self, count: int | None) -> None:
        for distributed_sum in self.distributed_sums:
            distributed_sum.max_chain_ranks = count


class _ModelSum(DistributedSum):
    """Sum of a model's terms: after a worker's exit, PyMC's samplers return the draws so far, as after Ctrl-C."""

    def rewrite_before_gradient(self, total: Any) -> Variable:
        """Rewrite the sum as PyMC does."""
        return rewrite_pregrad(total)

    def handle_worker_error(self, error: ranks.WorkerError) -> None:
        """Stop the sampler if the session has ended, unless this is a chain's process, which reports the error."""
        session = self.rows.session
        if (session is None or session.close_reason is not None) and not find_chain():
            stop_sampler(error, self if session is None else session)


def _check_pathfinder() -> None:
    """Raise ValueError if the caller is pymc-extras' pathfinder, which computes paths in processes of their own.

    Such processes have no ranks, and pathfinder does not report the error: it asks the user to report a bug.
    """
    frame: FrameType | None = sys._getframe()
    while frame := frame and frame.f_back:
        is_pathfinder = frame.f_globals.get("__name__", "").startswith("pymc_extras.inference.pathfinder")
        if is_pathfinder and frame.f_locals.get("concurrent") == "process":
            raise ValueError(
                "concurrent: pathfinder computes its paths in other processes, which have no ranks; "
                "pass concurrent=None: paths then run one after another, each on all ranks"
            )


def _make_evaluator(model: pm.Model) -> Callable[[], Any]:
    """Return a function that evaluates a model's log-density and gradient, each time at another point."""
    point = model.initial_point()
    if not model.continuous_value_vars:
        density = model.compile_logp()
        return lambda: density(point)
    function = model.logp_dlogp_function(ravel_inputs=True)
    function.set_extra_values(point)
    center = DictToArrayBijection.map({v.name: point[v.name] for v in model.continuous_value_vars}).data
    generator = np.random.default_rng(0)
    return lambda: function(center + generator.normal(scale=1e-3, size=center.shape))


def _make_distributed_logp(model: pm.Model, variable: Variable) -> Variable:
    """Return the log-density of an observed variable or a potential as an expression that the ranks compute.

    Raise NotRowwiseError if it is not a sum over rows.
    """
    try:
        (terms,) = model.logp([variable], sum=False)
    except NotImplementedError as error:
        raise NotRowwiseError(f"PyMC has no log-density of it: {error}") from error
    if not isinstance(terms.type, TensorType):
        raise NotRowwiseError("it is a variable of pymc.dims; use the distributions of pymc in place of those")
    if variable not in model.potentials:
        return _sum_terms_on_ranks(model, terms, model.rvs_to_values[variable].shape.eval(), variable.name)
    if terms.type.ndim:
        return _sum_terms_on_ranks(model, terms, _evaluate_shape(model, terms), variable.name)
    sums = [total for total in _find_full_sums(terms) if _reads_data(total)]
    if not sums:
        raise NotRowwiseError("it is one number, and not computed from sums of an element for each row")
    replacements = {}
    for total in sums:
        (addends,) = total.owner.inputs
        replacements[total] = _sum_terms_on_ranks(model, addends, _evaluate_shape(model, addends), variable.name)
    return replace_variables(terms, get_library(terms).sort_nodes([terms]), replacements)


def _find_full_sums(scalar: Any) -> list[Variable]:
    """Return the full sums that a scalar is computed from, such as both in ``a.sum() - b.sum()``."""
    node = scalar.owner
    if node is None or scalar.type.ndim:
        return []
    if isinstance(node.op, Sum):
        return [scalar]
    if not isinstance(node.op, Elemwise):
        return []
    return list(dict.fromkeys(total for variable in node.inputs for total in _find_full_sums(variable)))


def _evaluate_shape(model: pm.Model, terms: Variable) -> Any:
    function = pytensor.function(model.value_vars, terms.shape, mode="FAST_COMPILE", on_unused_input="ignore")
    return function(**model.initial_point())


def _sum_terms_on_ranks(model: pm.Model, terms: Variable, shape: Any, name: str) -> Variable:
    """Return the sum of all terms as an expression that the ranks compute.

    Axis 0 runs along the rows, or with loops another axis, if axis 0 is the time.
    """
    has_loops = any(isinstance(node.op, Scan) for node in get_library(terms).sort_nodes([terms]))
    reasons = []
    for axis in range(max(1, terms.type.ndim) if has_loops else 1):  # a multivariate row has one term
        try:
            rows_first = pt.moveaxis(terms, axis, 0) if axis else terms
            return _sum_rows_on_ranks(model, rows_first, shape[axis:], name)
        except NotRowwiseError as error:
            reasons.append(f"along axis {axis}: {error}" if axis else str(error))
    raise NotRowwiseError("; ".join(reasons))


def _sum_rows_on_ranks(model: pm.Model, terms: Variable, shape: Any, name: str) -> Variable:
    """Return the sum of all terms as an expression that the ranks compute.  Axis 0 of the terms runs along the rows."""
    if not len(shape) or shape[0] < 2:
        raise NotRowwiseError(f"the log-density has shape {tuple(map(int, shape))}, and so no rows to share out")
    if terms.dtype not in float_dtypes:
        raise NotRowwiseError(f"its terms are of dtype {terms.dtype}, and only floats are added by the ranks")

    def restrict_check(restrictor: RowRestrictor, node: Node, axis: int) -> Variable:
        value, *conditions = node.inputs
        value = restrictor.restrict(value, axis)
        if not model.check_bounds:
            return value
        return node.op(value, *[restrictor.restrict_condition(condition) for condition in conditions])

    terms, rows = make_rowwise(
        simplify_logistic(terms),
        int(shape[0]),
        {**RULES, CheckParameterValue: restrict_check, MinibatchOp: _reject_minibatch, Scan: restrict_scan},
    )
    distributed_sum = _ModelSum(terms, rows, name, model.value_vars)
    return SumOverRows(distributed_sum)(*distributed_sum.params)


def _reads_data(potential: Any) -> bool:
    """Whether a potential is computed from arrays, and so may be a likelihood rather than a prior of parameters."""
    data = (v for v in ancestors([potential]) if isinstance(v.type, TensorType))
    return any(
        isinstance(v, Constant)
        and v.data.size > 1
        or isinstance(v, SharedVariable)
        and v.get_value(borrow=True).size > 1
        for v in data
    )


def _reject_minibatch(restrictor: RowRestrictor, node: Node, axis: int) -> Any:
    raise NotRowwiseError(
        "pm.Minibatch draws other rows at each evaluation; give all rows to a model that is to be split"
    )
