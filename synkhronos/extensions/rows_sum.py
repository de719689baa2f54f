"""A sum over rows as an expression, computed on all ranks.

`sum_over_rows`
    The expression: any PyTensor function, gradient or optimizer may contain it.

The rows are shared out among the ranks once, and stay there.  An evaluation sends the parameters to the ranks, in one
command, and gets the ranks' sums.  Needs PyTensor; nothing here knows of PyMC.

.. code-block:: text

   graph of the user's function              what the ranks compute, each from its own rows
     priors ... ──┐
     parameters ──┼─▶ SumOverRows ─▶ value        value
                  ├─▶ Gradient ─▶ one each        value and gradients, in one call
                  └─▶ HessianProduct              the gradients' change in a direction
"""

from __future__ import annotations

import _thread
import contextlib
import itertools
import math
import os
import textwrap
import threading
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile import SharedVariable
from pytensor.gradient import DisconnectedType, grad, grad_not_implemented
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.tensor import TensorType
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.type import float_dtypes

import synkhronos as synk
from synkhronos import ranks
from synkhronos.checks import describe
from synkhronos.data.read_only import ReadOnlyData
from synkhronos.devices import HOST
from synkhronos.graphs import library_of

__all__ = ["sum_over_rows"]

# Compiled outer functions have Python call the ranks, which is what they should do.
warnings.filterwarnings("ignore", "Numba will use object mode to run SumOverRows")

#: Elements up to which ranks may compute anew what is computed from a constant alone.
_SMALL = 1000

#: Bytes of rows that a rank of the host computes at once.  They fit into a core's caches, with what is computed from
#: them: the gradient finds there what the value was computed from, and memory is read once.
_BLOCK = 4 << 20

#: Elements of each array of rows that an evaluation compares with those of the one before: with at most so many all of
#: them, else those of rows at equal distances.
_SAMPLE = 1 << 15

#: Seconds in which a sampler stops its threads.
_TO_STOP = 1.0

_numbers = itertools.count()
#: The sums of this process by number: a pickle made here finds the same one again.
_known: weakref.WeakValueDictionary[tuple[int, int], RowsSum] = weakref.WeakValueDictionary()


def sum_over_rows(terms: Any, rows: Mapping[Any, Any], name: str | None = None) -> Any:
    """Return the sum of terms over all rows, as an expression that the ranks compute.

    Parameters
    ----------
    terms : variable
        Float, of any shape: all its elements are added.  A row's terms may depend on that row and on whatever is not a
        row, but not on other rows.
    rows : dict of variable to array_like, Data or shared variable
        The data of the rows: for each symbolic input of `terms` its values, with the rows on axis 0.  All inputs have
        the same number of rows.
    name : str, optional
        Its name in error messages, and of the functions on the ranks.

    Returns
    -------
    variable
        A scalar of the dtype of `terms`.  It can be differentiated, twice where the terms can, with respect to
        everything but the rows.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong; the message names it.

    Notes
    -----
    Everything that `terms` is computed from and that does not depend on a row is a parameter: it is computed by the
    function that contains the sum, and sent to the ranks whole, at each evaluation.  Constants are sent once.

    The rows are shared out at the first evaluation, and again after `synkhronos.fork` and when one of the shared
    variables has got a new value.  Each evaluation also compares the arrays with what was shared out, and shares them
    out again if they were changed in place.  Of an array with more than 32,768 elements it compares some rows only, at
    equal distances: a change of other rows is not noticed.  ``set_value`` is noticed always.

    The sum over no rows is 0.

    Value and gradient come from one call, and are kept for the last point, so that asking for them again needs no rank.
    Threads take turns.  Only the process that called `synkhronos.fork` can evaluate it.

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
    made = RowsSum(terms, rows, name)
    return SumOverRows(made)(*made.params)


class DeathInterrupt(synk.WorkerError, KeyboardInterrupt):
    """A worker died in the middle of what can be interrupted, and returns what it has by then."""


class RowsSum:
    """What the Ops of one sum share: the terms, the rows, and the last point's values.

    Attributes
    ----------
    params : list of variables
        What the terms are computed from beside the rows and constants.
    floats : list of int
        The positions of those that the sum can be differentiated by.
    deaths_interrupt : bool
        Whether the death of a worker is a `DeathInterrupt`.
    """

    def __init__(self, terms: Any, rows: Mapping[Any, Any], name: str | None):
        self._key = os.getpid(), next(_numbers)
        self.name = name or f"sum_over_rows_{self._key[1]}"
        terms = _checked_terms(terms)
        self._variables, self._sources = _checked_rows(rows)
        inside = _inside(terms, self._variables)
        self.params = _params(inside, self._variables)
        self.floats = [i for i, param in enumerate(self.params) if param.dtype in float_dtypes]
        self._inputs = [param.type(f"{param.name or 'parameter'}_{i}") for i, param in enumerate(self.params)]
        self._held = [_holder(variable) for variable in self._variables]
        replaced = dict(zip([*self.params, *self._variables], [*self._inputs, *self._held], strict=True))
        terms = rebuilt(terms, inside, replaced)
        self.total = pt.sum(terms, dtype=terms.dtype)
        self.deaths_interrupt = False
        self._lock = threading.RLock()
        self._shared_out: list[Any] = []
        self._samples: list[Any] = []
        self._num_slices = 1
        self._session: weakref.ref[Any] | None = None
        self._wants_gradient = False
        self._point: Any = None
        self._results: list[np.ndarray] = []
        _known[self._key] = self

    def __reduce__(self) -> Any:
        return _found, (self._key, self.name)

    # -- what the ranks compute ------------------------------------------------------------------------------

    @cached_property
    def gradient(self) -> Gradient:
        """The Op that computes the gradient: one, so that equal nodes are merged."""
        self._wants_gradient = True
        return Gradient(self)

    @cached_property
    def hessian_product(self) -> HessianProduct:
        """The Op that computes the gradient's change in a direction."""
        return HessianProduct(self)

    @cached_property
    def _gradients(self) -> list[Any]:
        wrt = [self._inputs[i] for i in self.floats]
        return list(grad(self.total, wrt, disconnected_inputs="ignore"))

    @cached_property
    def _value_function(self) -> synk.Function:
        return self._function("value", self._inputs, [self.total])

    @cached_property
    def _gradient_function(self) -> synk.Function:
        return self._function("gradient", self._inputs, [self.total, *self._gradients])

    @cached_property
    def _product_function(self) -> synk.Function:
        directions = [self._inputs[i].type(f"direction_{i}") for i in self.floats]
        wrt = [self._inputs[i] for i in self.floats]
        along = pt.add(0, *[pt.sum(g * v) for g, v in zip(self._gradients, directions, strict=True)])
        products = grad(along, wrt, disconnected_inputs="ignore")
        return self._function("product", [*self._inputs, *directions], list(products))

    def _function(self, what: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> synk.Function:
        # As one vector: the ranks combine it, and the master reads it, at once.
        joined = outputs[0] if len(outputs) == 1 else pt.concatenate([output.ravel() for output in outputs])
        return synk.function(
            [],
            (joined, "sum"),
            bcast_inputs=list(inputs),
            sliceable_shareds=self._held,
            name=f"{self.name}_{what}",
            on_unused_input="ignore",
        )

    # -- evaluations -----------------------------------------------------------------------------------------

    def value(self, params: Sequence[np.ndarray]) -> np.ndarray:
        """Return the sum at a point."""
        return self._at(params, self._wants_gradient)[0]

    def gradients(self, params: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the sum's gradients at a point, one for each of the float parameters."""
        return self._at(params, gradient=True)[1:]

    def products(self, params: Sequence[np.ndarray], directions: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return how the gradients change in a direction."""
        with _errors_said(), self._lock:
            self._share_out()
            return self._call(self._product_function, [*params, *directions], directions)

    def _at(self, params: Sequence[np.ndarray], gradient: bool) -> list[np.ndarray]:
        with _errors_said(), self._lock:
            self._share_out()
            point = [(param.shape, param.tobytes()) for param in map(np.asarray, params)]
            if point != self._point or gradient and len(self._results) == 1:
                self._point = None  # until all is there: an interrupt may come in between
                value = np.empty((), self.total.dtype)
                if gradient:
                    likes = [value, *(params[i] for i in self.floats)]
                    self._results = self._call(self._gradient_function, params, likes)
                else:
                    self._results = self._call(self._value_function, params, [value])
                self._point = point
            # Copies: what is compiled may write into what it is given.
            return [result.copy() for result in self._results]

    def _call(
        self, function: synk.Function, arguments: Sequence[np.ndarray], likes: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Call a function, and return its results, of the shapes and dtypes of other arrays."""
        if not len(self._shared_out[0]):
            return [np.zeros_like(like) for like in likes]
        try:
            joined = np.ravel(function._call_and_read(*arguments, num_slices=self._num_slices))
        except synk.WorkerError as error:
            session = None if self._session is None else self._session()
            if not self.deaths_interrupt or session is not None and session.closed is None:
                raise
            warnings.warn(f"stopped early, with the results so far: {error}", RuntimeWarning, stacklevel=2)
            if _is_foreign():
                # Who waits for the threads in Python gets the interrupt, and stops them.  Until then they wait here
                # for their turn: a draw without a density would be a wrong one.
                _thread.interrupt_main()
                time.sleep(_TO_STOP)
            raise DeathInterrupt(str(error), error.rank, error.worker_traceback, error.failures) from error
        except NotImplementedError as error:
            raise NotImplementedError(
                f"{self.name}: the ranks lack an operation of it: {textwrap.shorten(str(error), 150)}. JAX mode, which "
                "GPUs need, has not all that the cores have: synkhronos.fork(use_gpu=False)"
            ) from error
        results, at = [], 0
        for like in likes:  # numpy.split takes as long as all else here
            results.append(joined[at : at + like.size].reshape(like.shape).astype(like.dtype))
            at += like.size
        return results

    def _share_out(self) -> None:
        """Give each rank its rows, if the ranks or the rows are not those of the last evaluation."""
        session = self.check_ranks()
        now = [_now(source) for source in self._sources]
        samples = [_sample(values) for values in now]
        is_known = self._session is not None and self._session() is session and samples == self._samples
        if is_known and all(new is old for new, old in zip(now, self._shared_out, strict=True)):
            return
        num_rows = _check_lengths(self._variables, now)
        self._point = None
        self._session = None
        self._num_slices = 1
        if num_rows:
            _ = self._value_function  # or the ranks would not know the variables
            synk.scatter(self._held, now)
            if session.rank.device is HOST:  # a GPU works best on all rows at once
                nbytes = sum(np.dtype(values.dtype).itemsize * math.prod(values.shape) for values in now)
                self._num_slices = min(max(1, nbytes // (session.rank.size * _BLOCK)), num_rows)
        self._shared_out, self._samples, self._session = now, samples, weakref.ref(session)

    def check_ranks(self) -> Any:
        """Return the session; raise RuntimeError if no ranks are running, or not this process' own."""
        try:
            return ranks.session()
        except RuntimeError as error:
            if os.getpid() == self._key[0]:
                raise
            raise RuntimeError(_NOT_HERE) from error


def _is_foreign() -> bool:
    """Whether Python did not start this thread, as those of nutpie, which is Rust."""
    return isinstance(threading.current_thread(), threading._DummyThread)


@contextlib.contextmanager
def _errors_said() -> Iterator[None]:
    """Say what went wrong where nobody else would: to nutpie any error is a point without a density."""
    try:
        yield
    except Exception as error:
        if _is_foreign() and not isinstance(error, DeathInterrupt):
            warnings.warn(f"no density: {error}", RuntimeWarning, stacklevel=3)
        raise


def _found(key: tuple[int, int], name: str) -> Any:
    """Return what a pickle stands for: the same sum in the same process."""
    return _known.get(key) or _Elsewhere(name)


class _Elsewhere:
    """Stands for a sum in a process that has not made it."""

    def __init__(self, name: str):
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(_NOT_HERE)


_NOT_HERE = (
    "a sum over rows can be evaluated only by the process that called synkhronos.fork(), and this is another one. "
    "If PyMC started it for a chain, pass cores=1 to pm.sample: chains then run one after another, each on all ranks. "
    "For the paths of pymc-extras' pathfinder, pass concurrent=None"
)


# -- the Ops -----------------------------------------------------------------------------------------------------


class _OverRows(Op):
    """What the Ops have in common.  They are equal to nothing but themselves."""

    def __init__(self, rows: RowsSum):
        self.rows = rows

    def __str__(self) -> str:
        return f"SumOverRows{{{type(self).__name__}, {self.rows.name}}}"

    def do_constant_folding(self, fgraph: Any, node: Any) -> bool:
        """Not when functions are compiled: ranks may not be there."""
        return False

    def connection_pattern(self, node: Any) -> list[list[bool]]:
        """Return which outputs change continuously with which inputs."""
        return [[variable.dtype in float_dtypes] * len(node.outputs) for variable in node.inputs]

    def L_op(self, inputs: Any, outputs: Any, output_grads: Any) -> list[Any]:  # noqa: N802 - PyTensor's word
        """Return the gradients, under the name that PyTensor before 3.0 calls."""
        return self.pullback(inputs, outputs, output_grads)

    def infer_shape(self, *arguments: Any) -> list[Any]:
        """Return the outputs' shapes: those of the parameters."""
        return [arguments[-1][i] for i in self.rows.floats]

    def pullback(self, inputs: Any, outputs: Any, cotangents: Any) -> list[Any]:
        """Return the gradients with respect to the inputs."""
        raise NotImplementedError

    def _node(self, inputs: Sequence[Any], types: Sequence[Any], outputs: Sequence[Any]) -> Apply:
        inputs = [kind.filter_variable(variable) for kind, variable in zip(types, inputs, strict=True)]
        return Apply(self, inputs, [kind() for kind in outputs])

    def _each(self, of_floats: Sequence[Any]) -> list[Any]:
        """Return what belongs to the float parameters, and what says that there is nothing for the others."""
        found = dict(zip(self.rows.floats, of_floats, strict=True))
        return [found[i] if i in found else DisconnectedType()() for i in range(len(self.rows.params))]


class SumOverRows(_OverRows):
    """The value of a sum."""

    def make_node(self, *params: Any) -> Apply:
        """Return the node for these parameters."""
        return self._node(params, [p.type for p in self.rows.params], [self.rows.total.type])

    def perform(self, node: Any, inputs: Any, output_storage: Any) -> None:
        """Have the ranks compute it."""
        output_storage[0][0] = self.rows.value(inputs)

    def infer_shape(self, *arguments: Any) -> list[Any]:
        """Return the outputs' shapes."""
        return [()]

    def pullback(self, inputs: Any, outputs: Any, cotangents: Any) -> list[Any]:
        """Return the gradients, which come with the value."""
        if not self.rows.floats:
            return self._each([])
        gradients = self.rows.gradient(*inputs, return_list=True)
        return self._each([cotangents[0] * gradient for gradient in gradients])


class Gradient(_OverRows):
    """The gradients of a sum with respect to its float parameters."""

    def make_node(self, *params: Any) -> Apply:
        """Return the node for these parameters."""
        types = [p.type for p in self.rows.params]
        return self._node(params, types, [types[i] for i in self.rows.floats])

    def perform(self, node: Any, inputs: Any, output_storage: Any) -> None:
        """Have the ranks compute them."""
        for storage, gradient in zip(output_storage, self.rows.gradients(inputs), strict=True):
            storage[0] = gradient

    def pullback(self, inputs: Any, outputs: Any, cotangents: Any) -> list[Any]:
        """Return the products of the second derivatives with a direction."""
        directions = [
            output.zeros_like() if isinstance(cotangent.type, DisconnectedType) else cotangent
            for output, cotangent in zip(outputs, cotangents, strict=True)
        ]
        return self._each(self.rows.hessian_product(*inputs, *directions, return_list=True))


class HessianProduct(_OverRows):
    """The products of a sum's second derivatives with a direction."""

    def make_node(self, *inputs: Any) -> Apply:
        """Return the node for these parameters and, behind them, the direction."""
        types = [p.type for p in self.rows.params]
        outputs = [types[i] for i in self.rows.floats]
        return self._node(inputs, types + outputs, outputs)

    def perform(self, node: Any, inputs: Any, output_storage: Any) -> None:
        """Have the ranks compute them."""
        n = len(self.rows.params)
        for storage, product in zip(output_storage, self.rows.products(inputs[:n], inputs[n:]), strict=True):
            storage[0] = product

    def pullback(self, inputs: Any, outputs: Any, cotangents: Any) -> list[Any]:
        """Refuse: third derivatives are not computed."""
        why = "third derivatives of a sum over rows are not computed"
        return [grad_not_implemented(self, i, variable, why) for i, variable in enumerate(inputs)]


# -- checks ------------------------------------------------------------------------------------------------------


def _checked_terms(terms: Any) -> Any:
    if not isinstance(terms, Variable) or not isinstance(terms.type, TensorType):
        raise TypeError(f"terms: expected a variable of PyTensor, got {terms!r}")
    if terms.dtype not in float_dtypes:
        raise TypeError(f"terms: expected floats, got {terms.dtype}")
    return terms


def _checked_rows(rows: Any) -> tuple[list[Any], list[Any]]:
    """Return the variables that stand for rows, and where each one's values are."""
    if not isinstance(rows, Mapping) or not rows:
        raise TypeError(f"rows: expected a dict of at least one variable and its values, got {rows!r}")
    sources = []
    for variable, value in rows.items():
        if not isinstance(variable, Variable) or not isinstance(variable.type, TensorType):
            raise TypeError(f"rows: expected variables of PyTensor as keys, got {variable!r}")
        if variable.owner is not None or isinstance(variable, Constant | SharedVariable):
            raise TypeError(f"rows: expected a symbolic input as key, got {describe(variable)}")
        if variable.ndim == 0 or variable.type.shape[0] is not None:
            raise ValueError(f"rows: {describe(variable)} of type {variable.type} has no rows to share out")
        sources.append(_checked_source(variable, value))
    _check_lengths(rows, [_now(source) for source in sources])
    return list(rows), sources


def _checked_source(variable: Any, value: Any) -> Any:
    if isinstance(value, SharedVariable | synk.Data):
        kind = value.type if isinstance(value, SharedVariable) else value
        if (kind.dtype, kind.ndim) != (variable.dtype, variable.ndim):
            raise TypeError(
                f"rows: {describe(variable)} needs values of {variable.dtype} and {variable.ndim} dimensions, got "
                f"{value!r} of {kind.dtype} and {kind.ndim}"
            )
        return value
    try:
        return library_of(variable).filter(variable.type, value)
    except (TypeError, ValueError) as error:
        wrong = ValueError if isinstance(error, ValueError) else TypeError
        raise wrong(f"rows: {describe(variable)} of type {variable.type} can't take the values: {error}") from None


def _check_lengths(variables: Iterable[Any], values: Sequence[Any]) -> int:
    """Return the number of rows; raise ValueError if it differs between the values."""
    lengths = {describe(variable): len(each) for variable, each in zip(variables, values, strict=True)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"rows: expected equally many of each, got {lengths}")
    return min(lengths.values())


def _now(source: Any) -> Any:
    """Return the present values of rows; the same object as long as nobody has set others."""
    return source.get_value(borrow=True) if isinstance(source, SharedVariable) else source


def _sample(values: Any) -> Any:
    """Return the shape of rows and some of their bytes, to be compared with others'."""
    if isinstance(values, ReadOnlyData):
        return None
    array = np.asarray(values)
    return array.shape, array[:: -(-array.size // _SAMPLE) or 1].tobytes()


def _holder(variable: Any) -> Any:
    """Return a shared variable in which each rank will have its rows."""
    shape = [0, *(length or 0 for length in variable.type.shape[1:])]
    return pytensor.shared(np.zeros(shape, variable.dtype), variable.name, shape=variable.type.shape)


# -- which part of the graph the ranks compute -------------------------------------------------------------------


def _inside(terms: Any, rows: Sequence[Any]) -> list[Apply]:
    """Return the nodes of the terms that the ranks compute, in the graph's order.

    Those that depend on rows, and behind these what costs less to compute than to send.
    """
    nodes = library_of(terms).sort_nodes([terms])
    read = {terms, *(variable for node in nodes for variable in node.inputs)}
    unused = [describe(variable) for variable in rows if variable not in read]
    if unused:
        raise ValueError(f"rows: the terms are not computed from {', '.join(unused)}")
    depends = set(rows)
    fixed = {variable for variable in read if isinstance(variable, Constant) and _is_small(variable)}
    for node in nodes:
        if not depends.isdisjoint(node.inputs):
            depends.update(node.outputs)
        if fixed.issuperset(node.inputs):
            fixed.update(node.outputs)
    needed = {terms}
    inside = []
    for node in reversed(nodes):
        wanted = needed.intersection(node.outputs)
        if wanted and (
            not wanted.isdisjoint(depends | fixed)
            or not all(map(_is_array, wanted))
            or isinstance(node.op, DimShuffle)
            or isinstance(node.op, Elemwise | CAReduce)
            and all(map(_is_number, node.inputs))
        ):
            inside.append(node)
            needed.update(node.inputs)
    return inside[::-1]


def _params(inside: Sequence[Apply], rows: Sequence[Any]) -> list[Any]:
    """Return what these nodes are computed from beside the rows and constants."""
    computed = {variable for node in inside for variable in node.outputs}
    params: dict[Any, None] = {}
    for variable in (variable for node in inside for variable in node.inputs):
        if variable in computed or variable in rows or isinstance(variable, Constant):
            continue
        if not _is_array(variable):
            raise TypeError(f"terms: computed from {describe(variable)} of type {variable.type}, which can't be sent")
        params[variable] = None
    return list(params)


def rebuilt(variable: Any, nodes: Sequence[Apply], replaced: Mapping[Any, Any]) -> Any:
    """Return a variable as it is when others take the places of some; ``nodes`` are those between, in order."""
    made = dict(replaced)
    for node in nodes:
        if not made.keys().isdisjoint(node.inputs):
            new = node.clone_with_new_inputs([made.get(v, v) for v in node.inputs], strict=False)
            made.update((old, v) for old, v in zip(node.outputs, new.outputs, strict=True) if old not in replaced)
    return made.get(variable, variable)


def _is_array(variable: Any) -> bool:
    return isinstance(variable.type, TensorType)


def _is_number(variable: Any) -> bool:
    return all(length == 1 for length in variable.type.shape)


def _is_small(constant: Any) -> bool:
    """Whether a constant may be sent to the ranks with the graph, rather than what is computed from it."""
    return np.size(constant.data) <= _SMALL
