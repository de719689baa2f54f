"""A sum over rows as a PyTensor expression that all ranks compute.

Any function, gradient or optimizer may contain the expression: the ranks work inside a graph that other code compiles.
The rows are scattered to the ranks once.  An evaluation broadcasts the parameters and reduces the ranks' sums, in one
command.

.. code-block:: text

   graph of the user's function              functions on the ranks, each on its own rows
     priors ... ──┐
     parameters ──┼─▶ SumOverRows ─▶ value        value
                  ├─▶ ValueAndGradients           value and gradients, in one call
                  └─▶ HessianProduct              product of the Hessian with a direction

A compiled function with gradients has no node for the value alone: `_merge_value_with_gradients` removes it.
"""

from __future__ import annotations

import itertools
import os
import textwrap
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property, partial, reduce
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType, grad, grad_not_implemented
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.graph.replace import clone_replace
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorType
from pytensor.tensor.math import Sum
from pytensor.tensor.rewriting.basic import register_canonicalize
from pytensor.tensor.type import float_dtypes

from synkhronos import ranks
from synkhronos.extensions.chains import start_chain_ranks
from synkhronos.extensions.distributed_rows import DistributedRows
from synkhronos.extensions.row_slices import PreparedSum
from synkhronos.extensions.rows_sum_graph import (
    find_params,
    replace_checks,
    replace_variables,
    select_rank_nodes,
    sort_params,
)
from synkhronos.extensions.sampler_threads import is_foreign_thread, stop_sampler, warn_of_ignored_errors
from synkhronos.functions import Function, function, get_dispatcher
from synkhronos.variable_types import Array, FunctionGraph, Node

__all__ = ["sum_over_rows"]

# Numba has to leave the call of the ranks to Python.
warnings.filterwarnings("ignore", "Numba will use object mode to run SumOverRows")

Variables = Sequence[Variable]
_numbers = itertools.count()
#: The sums of this process by process id and number: unpickling in this process returns the original.
_sums: weakref.WeakValueDictionary[tuple[int, int], DistributedSum] = weakref.WeakValueDictionary()


def sum_over_rows(terms: Variable, rows: Mapping[Any, Any], name: str | None = None) -> Variable:
    """Return an expression for the sum of terms over all rows, which the ranks compute.

    Parameters
    ----------
    terms : variable
        Float, with an element or more for each row, or the sum of such elements: all are added.  The terms of a row may
        depend on that row and on parameters, but not on other rows.
    rows : dict of variable to array_like, Data, shared variable or ComputedRows
        The values of each symbolic input of `terms` that has rows.  Axis 0 runs along the rows; all have the same
        length.
    name : str, optional
        Name in error messages and profiles.

    Returns
    -------
    variable
        Scalar of the dtype of `terms`.  It has first and second derivatives with respect to its parameters, where the
        terms have them, but none with respect to the rows.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong; the message names it.

    Notes
    -----
    Inputs of `terms` that do not depend on rows are parameters: the surrounding function computes them, and they are
    broadcast at each evaluation.  Constants are sent once.

    The rows are scattered at the first evaluation, and again after `synkhronos.fork` or after a shared variable's
    ``set_value``.  An array that is changed in place is scattered again if an evaluation finds the change.  Of an array
    with more than 32,768 elements, an evaluation compares only a sample.

    The sum over no rows is 0.

    Value and gradient are computed in one call and cached for the last point.  Threads evaluate one after another.
    Only the process that called `synkhronos.fork` can evaluate the sum.

    Examples
    --------
    >>> import numpy as np, pytensor, pytensor.tensor as pt, synkhronos as synk
    >>> n = synk.fork(2, use_gpu=False)
    >>> x, y, w = pt.dmatrix("x"), pt.dvector("y"), pt.dvector("w")
    >>> loss = sum_over_rows((y - x @ w) ** 2, {x: np.eye(3), y: np.ones(3)})
    >>> f = pytensor.function([w], [loss, pytensor.grad(loss, w)])
    >>> value, gradient = f(np.array([1.0, 2.0, 3.0]))
    >>> float(value), gradient.tolist()
    (5.0, [0.0, 2.0, 4.0])
    >>> synk.close()
    """
    distributed_sum = DistributedSum(terms, rows, name)
    return SumOverRows(distributed_sum)(*distributed_sum.params)


class DistributedSum:
    """A sum over rows that the ranks evaluate: its functions of the rows, and the results at the last point.

    The Ops of a sum share it.

    Parameters
    ----------
    terms, rows, name
        As in `sum_over_rows`.
    gradient_order : sequence of variable, optional
        Variables in whose order the surrounding function has its gradients.  PyTensor's rewrites depend on this order,
        and with them which gradients are finite far from the data: the parameters have the same order.

    Attributes
    ----------
    rows : DistributedRows
    params : list of variables
        The parameters: inputs of the terms other than rows and constants.
    float_positions : list of int
        Positions of the parameters that the sum can be differentiated by.
    max_chain_ranks : int or None
        Maximal number of ranks of a chain with a process of its own; None for its share.
    remote_evaluator : ChainServers or None
        Evaluates for threads that a sampler started, in other processes.
    """

    def __init__(
        self, terms: Variable, rows: Mapping[Any, Any], name: str | None, gradient_order: Sequence[Variable] = ()
    ):
        self._key = os.getpid(), next(_numbers)
        self.name = name or f"sum_over_rows_{self._key[1]}"
        terms = _check_terms(terms)
        self.rows = DistributedRows(rows)
        nodes = select_rank_nodes(terms, self.rows.variables)
        self.params = sort_params(find_params(nodes, self.rows.variables), gradient_order)
        self.float_positions = [i for i, param in enumerate(self.params) if param.dtype in float_dtypes]
        self._inputs = [param.type(f"{param.name or 'parameter'}_{i}") for i, param in enumerate(self.params)]
        replacements = dict(zip([*self.params, *self.rows.variables], [*self._inputs, *self.rows.shareds], strict=True))
        terms = replace_variables(terms, nodes, replacements)
        self.total = pt.sum(terms, dtype=terms.dtype)
        self.max_chain_ranks: int | None = None
        self.remote_evaluator: Any = None
        self._lock = threading.RLock()
        self._prepared_sums: dict[Function, PreparedSum] = {}
        self._evaluates_gradients = False
        self._last_point: Any = None
        self._last_results: list[np.ndarray] = []
        _sums[self._key] = self

    def __reduce__(self) -> Any:
        return _get_sum, (self._key, self.name)

    def rewrite_before_gradient(self, total: Any) -> Variable:
        """Rewrite the sum before its gradient is built."""
        return rewrite_graph(total, include=("canonicalize", "stabilize"))

    def handle_worker_error(self, error: ranks.WorkerError) -> None:
        """Handle a worker's error before it is raised.  The base class does nothing."""

    # -- functions on the ranks ------------------------------------------------------------------------------

    @cached_property
    def gradient_op(self) -> ValueAndGradients:
        """The Op of value and gradients.  It is a single instance, so that PyTensor merges equal nodes."""
        self._evaluates_gradients = True
        return ValueAndGradients(self)

    @cached_property
    def hessian_product_op(self) -> HessianProduct:
        """The Op of the Hessian's product with a direction."""
        return HessianProduct(self)

    @cached_property
    def _value_and_gradients(self) -> list[Variable]:
        # Rewrite before differentiating, as PyMC does: otherwise gradients far from the data are less exact.  Rewrites
        # change a graph in place, so a clone is rewritten.
        total = self.rewrite_before_gradient(clone_replace(self.total))
        return [total, *grad(total, [self._inputs[i] for i in self.float_positions], disconnected_inputs="ignore")]

    @cached_property
    def _value_function(self) -> tuple[Function, list[Any]]:
        return self._compile("value", self._inputs, [self.total])

    @cached_property
    def _gradient_function(self) -> tuple[Function, list[Any]]:
        return self._compile("gradient", self._inputs, self._value_and_gradients)

    @cached_property
    def _product_function(self) -> tuple[Function, list[Any]]:
        directions = [self._inputs[i].type(f"direction_{i}") for i in self.float_positions]
        wrt = [self._inputs[i] for i in self.float_positions]
        directional_derivative = pt.add(
            0,
            *[
                pt.sum(gradient * direction)
                for gradient, direction in zip(self._value_and_gradients[1:], directions, strict=True)
            ],
        )
        products = grad(directional_derivative, wrt, disconnected_inputs="ignore")
        return self._compile("product", [*self._inputs, *directions], list(products))

    def _compile(self, quantity: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Function, list[Any]]:
        """Compile a function of the rows.  Return it, and the checks of parameters that depend on rows.

        A check fails for all rows if it fails for one, as in PyMC.  The additional input ``checks_hold`` has a flag for
        each of these checks: whether it holds for all rows.  At the end of the output are the numbers of ranks or
        slices on which each check has failed.
        """
        checks_hold = pt.vector("checks_hold", dtype="bool")
        checks: list[Any] = []
        failures: list[Any] = []

        def replace_check(check: Any, value: Any, *conditions: Any) -> Variable:
            condition = reduce(pt.and_, conditions)
            if not set(self.rows.shareds).isdisjoint(ancestors([condition])):
                checks.append(check)
                failures.append(pt.switch(condition, 0, 1).astype(self.total.dtype))
                condition = pt.and_(condition, checks_hold[len(failures) - 1])
            elif not check.can_be_replaced_by_ninf:
                return check(value, *conditions)
            return pt.switch(condition, value, -np.inf)

        outputs = [*replace_checks(outputs, replace_check), *failures]
        # One output needs one reduction.
        is_scalar = len(outputs) == 1 and outputs[0].ndim == 0
        joined = outputs[0] if is_scalar else pt.concatenate([output.ravel() for output in outputs])
        compiled = function(
            [],
            (joined, "sum"),
            bcast_inputs=[*inputs, checks_hold] if failures else list(inputs),
            sliceable_shareds=self.rows.shareds,
            name=f"{self.name}_{quantity}",
            on_unused_input="ignore",
        )
        return compiled, checks

    def make_local_graph(self) -> tuple[list[Any], Any, list[Any]]:
        """Return the graph of the sum of one rank's rows, for a program in JAX: inputs, sum, and variables of the rows.

        The inputs are the parameters, then the rows.  The shared variables hold the rows on each rank.  Checks of
        parameters are left out, as in PyMC's functions in JAX.
        """
        rows = [shared.type() for shared in self.rows.shareds]
        (total,) = replace_checks([self.total], lambda check, value, *conditions: value)
        (total,) = clone_replace([total], dict(zip(self.rows.shareds, rows, strict=True)))
        return [*self._inputs, *rows], total, self.rows.shareds

    # -- evaluations -----------------------------------------------------------------------------------------

    def compute_value(self, params: Sequence[np.ndarray]) -> np.ndarray:
        """Return the sum at a point."""
        return self.evaluate(params, self._evaluates_gradients)[0]

    def compute_hessian_product(
        self, params: Sequence[np.ndarray], directions: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Return the product of the Hessian at a point with a direction, one array for each float parameter."""
        with warn_of_ignored_errors(), self._lock:
            self.scatter_rows()
            return self._call_ranks(self._product_function, [*params, *directions], directions)

    def evaluate(self, params: Sequence[np.ndarray], with_gradients: bool) -> list[np.ndarray]:
        """Return the sum at a point and, optionally, its gradient with respect to each float parameter.

        At the last point, the results come from a cache.
        """
        with warn_of_ignored_errors():
            if self.remote_evaluator is None or not is_foreign_thread():
                return self._evaluate_in_this_process(params, with_gradients)
            try:
                results: list[np.ndarray] = self.remote_evaluator.evaluate(self, params, with_gradients)
                return results
            except ranks.WorkerError as error:
                stop_sampler(error, self.remote_evaluator)

    def _evaluate_in_this_process(self, params: Sequence[np.ndarray], with_gradients: bool) -> list[np.ndarray]:
        with self._lock:
            self.scatter_rows()
            point = [(param.shape, param.tobytes()) for param in map(np.asarray, params)]
            if point != self._last_point or with_gradients and len(self._last_results) == 1:
                self._last_point = None  # an interrupt may leave the results incomplete
                value = np.empty((), self.total.dtype)
                if with_gradients:
                    templates = [value, *(params[i] for i in self.float_positions)]
                    self._last_results = self._call_ranks(self._gradient_function, params, templates)
                else:
                    self._last_results = self._call_ranks(self._value_function, params, [value])
                self._last_point = point
            # Compiled functions may overwrite their inputs.
            return [result.copy() for result in self._last_results]

    def _call_ranks(
        self, compiled: tuple[Function, list[Any]], arguments: Sequence[np.ndarray], templates: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Call a function on the ranks, and split its result into arrays of the shapes and dtypes of `templates`."""
        if not self.rows.n_rows:
            return [np.zeros_like(template) for template in templates]
        function, checks = compiled
        result_size = sum(template.size for template in templates) + len(checks)
        call = partial(self._call_function, function, result_size, *arguments)
        try:
            joined = call(*[np.ones(len(checks), bool)] if checks else [])
            holds_everywhere = joined[joined.size - len(checks) :] == 0
            if not holds_everywhere.all():
                for check in itertools.compress(checks, ~holds_everywhere):
                    if not check.can_be_replaced_by_ninf:
                        raise check.exc_type(check.msg)
                joined = call(holds_everywhere)
        except ranks.WorkerError as error:
            self.handle_worker_error(error)
            raise
        except NotImplementedError as error:
            raise NotImplementedError(
                f"{self.name}: JAX mode, which GPUs need, lacks an operation: {textwrap.shorten(str(error), 150)}. "
                "Ranks on CPU cores have it: synkhronos.fork(use_gpu=False)"
            ) from error
        results, offset = [], 0
        for template in templates:  # numpy.split is slow
            part = joined[offset : offset + template.size].reshape(template.shape)
            results.append(part.astype(template.dtype, copy=False))
            offset += template.size
        return results

    def _call_function(self, function: Function, result_size: int, *arguments: np.ndarray) -> np.ndarray:
        """Return the joined results of a function of the rows, as a vector."""
        dispatcher, session = get_dispatcher(function), ranks.get_session()
        if self.rows.slice_bounds:
            with session.call_lock:
                session.wait_until_idle()
                dispatcher.ensure_distributed(session)
                if dispatcher.has_compiled_default:
                    prepared = self._prepared_sums.get(function)
                    if prepared is None or not prepared.can_compute(arguments):
                        prepared = PreparedSum(session, dispatcher, arguments, result_size, self)
                        self._prepared_sums[function] = prepared
                    return np.ravel(prepared.compute(arguments))
        return np.ravel(dispatcher.call(*arguments)[0])

    def scatter_rows(self) -> None:
        """Scatter the rows if the session or the rows have changed since the last evaluation."""
        session = self.ensure_session()
        device = get_dispatcher(self._value_function[0]).computation.device  # registers the variables on the ranks
        if self.rows.ensure_scattered(session, device, self):
            self._last_point = None
            self._prepared_sums.clear()

    def ensure_session(self) -> Any:
        """Return the running session.  In the process of a chain, the first call starts the chain's ranks.

        Raise RuntimeError if there are no ranks, or if another process has them.
        """
        try:
            return ranks.get_session()
        except RuntimeError as error:
            if ranks.get_inherited_session() is None:
                raise
            for distributed_sum in list(_sums.values()):
                distributed_sum.rows.keep_for_fork()
            if not start_chain_ranks(self.max_chain_ranks):
                raise RuntimeError(_WRONG_PROCESS_MESSAGE) from error
            return ranks.get_session()


def _get_sum(key: tuple[int, int], name: str) -> Any:
    """Unpickle a sum: return this process's sum of a key, or a placeholder that raises when it is used."""
    return _sums.get(key) or _MissingSum(name)


class _MissingSum:
    """Placeholder for a sum that another process has made."""

    def __init__(self, name: str):
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(_WRONG_PROCESS_MESSAGE)


_WRONG_PROCESS_MESSAGE = (
    "a sum over rows can be evaluated only by the process that called synkhronos.fork(), and by processes that PyMC "
    'forks for chains while the ranks are on CPU cores: pass mp_ctx="fork" to pm.sample, or cores=1: chains then run '
    "one after another, each on all ranks. For the paths of pymc-extras' pathfinder, pass concurrent=None"
)


# -- the Ops -----------------------------------------------------------------------------------------------------


class _DistributedSumOp(Op):
    """Base class of the Ops of a `DistributedSum`.  Each instance is equal to itself only."""

    def __init__(self, distributed_sum: DistributedSum):
        self.sum = distributed_sum

    def __str__(self) -> str:
        return f"SumOverRows{{{type(self).__name__}, {self.sum.name}}}"

    def do_constant_folding(self, fgraph: FunctionGraph, node: Node) -> bool:
        """Return False: there may be no ranks when a function is compiled."""
        return False

    def connection_pattern(self, node: Node) -> list[list[bool]]:
        """Return, for each input, whether the outputs are differentiable with respect to it."""
        return [[variable.dtype in float_dtypes] * len(node.outputs) for variable in node.inputs]

    def L_op(self, inputs: Variables, outputs: Variables, output_grads: Variables) -> list[Variable]:  # noqa: N802 - PyTensor's name
        """Return the gradients: PyTensor before 3.0 calls this method, newer versions `pullback`."""
        return self.pullback(inputs, outputs, output_grads)

    def infer_shape(self, *arguments: Any) -> list[Any]:
        """Return the outputs' shapes, which are the parameters' shapes."""
        return [arguments[-1][i] for i in self.sum.float_positions]

    def pullback(self, inputs: Variables, outputs: Variables, cotangents: Variables) -> list[Variable]:
        """Return the gradients with respect to the inputs."""
        raise NotImplementedError

    def _make_apply(self, inputs: Sequence[Any], input_types: Sequence[Any], output_types: Sequence[Any]) -> Apply:
        converted = [input_type.filter_variable(x) for input_type, x in zip(input_types, inputs, strict=True)]
        return Apply(self, converted, [output_type() for output_type in output_types])

    def _align_with_params(self, gradients: Sequence[Any]) -> list[Variable]:
        """Return one gradient for each parameter: disconnected ones for those that are not floats."""
        gradient_by_position = dict(zip(self.sum.float_positions, gradients, strict=True))
        positions = range(len(self.sum.params))
        return [gradient_by_position[i] if i in gradient_by_position else DisconnectedType()() for i in positions]


class SumOverRows(_DistributedSumOp):
    """The value of a sum."""

    def make_node(self, *params: Any) -> Apply:
        """Return a node for these parameters."""
        return self._make_apply(params, [p.type for p in self.sum.params], [self.sum.total.type])

    def perform(self, node: Node, inputs: Sequence[Array], output_storage: list[list[Any]]) -> None:
        """Compute the value on the ranks."""
        output_storage[0][0] = self.sum.compute_value(inputs)

    def infer_shape(self, *arguments: Any) -> list[Any]:
        """Return the outputs' shapes."""
        return [()]

    def pullback(self, inputs: Variables, outputs: Variables, cotangents: Variables) -> list[Variable]:
        """Return the gradients with respect to the parameters."""
        _, *gradients = self.sum.gradient_op(*inputs, return_list=True)
        return self._align_with_params([cotangents[0] * gradient for gradient in gradients])


class ValueAndGradients(_DistributedSumOp):
    """The value of a sum, and its gradients with respect to its float parameters."""

    def make_node(self, *params: Any) -> Apply:
        """Return a node for these parameters."""
        types = [p.type for p in self.sum.params]
        return self._make_apply(params, types, [self.sum.total.type, *[types[i] for i in self.sum.float_positions]])

    def perform(self, node: Node, inputs: Sequence[Array], output_storage: list[list[Any]]) -> None:
        """Compute value and gradients on the ranks."""
        for storage, result in zip(output_storage, self.sum.evaluate(inputs, with_gradients=True), strict=True):
            storage[0] = result

    def infer_shape(self, *arguments: Any) -> list[Any]:
        """Return the outputs' shapes."""
        return [(), *super().infer_shape(*arguments)]

    def pullback(self, inputs: Variables, outputs: Variables, cotangents: Variables) -> list[Variable]:
        """Return the products of the Hessian with the gradients' cotangents; the value's cotangent adds gradients."""
        value_cotangent, *directions = [
            output.zeros_like() if isinstance(cotangent.type, DisconnectedType) else cotangent
            for output, cotangent in zip(outputs, cotangents, strict=True)
        ]
        products = self.sum.hessian_product_op(*inputs, *directions, return_list=True)
        if not isinstance(cotangents[0].type, DisconnectedType):
            products = [
                product + value_cotangent * gradient for product, gradient in zip(products, outputs[1:], strict=True)
            ]
        return self._align_with_params(products)


class HessianProduct(_DistributedSumOp):
    """The product of a sum's Hessian with a direction."""

    def make_node(self, *inputs: Any) -> Apply:
        """Return a node for the parameters, followed by one direction for each float parameter."""
        types = [p.type for p in self.sum.params]
        outputs = [types[i] for i in self.sum.float_positions]
        return self._make_apply(inputs, types + outputs, outputs)

    def perform(self, node: Node, inputs: Sequence[Array], output_storage: list[list[Any]]) -> None:
        """Compute the products on the ranks."""
        n = len(self.sum.params)
        products = self.sum.compute_hessian_product(inputs[:n], inputs[n:])
        for storage, product in zip(output_storage, products, strict=True):
            storage[0] = product

    def pullback(self, inputs: Variables, outputs: Variables, cotangents: Variables) -> list[Variable]:
        """Raise when evaluated: third derivatives are not implemented."""
        reason = "third derivatives of a sum over rows are not implemented"
        return [grad_not_implemented(self, i, variable, reason) for i, variable in enumerate(inputs)]


@register_canonicalize
@node_rewriter([SumOverRows])
def _merge_value_with_gradients(fgraph: FunctionGraph, node: Node) -> list[Any] | None:
    """Replace a sum by the value output of a `ValueAndGradients` node with equal parameters, which computes both."""
    if not node.inputs:
        return None
    for client, _ in fgraph.clients[node.inputs[0]]:
        is_same_sum = isinstance(client.op, ValueAndGradients) and client.op.sum is node.op.sum
        if is_same_sum and client.inputs == node.inputs:
            return [client.outputs[0]]
    return None


def _check_terms(terms: Variable) -> Any:
    if not isinstance(terms, Variable) or not isinstance(terms.type, TensorType):
        raise TypeError(f"terms: expected a variable of PyTensor, got {terms!r}")
    if terms.dtype not in float_dtypes:
        raise TypeError(f"terms: expected floats, got {terms.dtype}")
    is_sum = terms.owner is not None and isinstance(terms.owner.op, Sum)
    if not (terms.owner.inputs[0] if is_sum else terms).ndim:
        raise ValueError(
            "terms: expected an element or more for each row, or their sum, got another scalar: each rank would add it "
            "for its own rows. Pass the rows' terms, divide by the number of rows outside, and add other terms there"
        )
    return terms
