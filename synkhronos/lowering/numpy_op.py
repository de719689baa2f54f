"""Base class of Ops computed by NumPy or XLA, and their registration with JAX and Numba.

The method ``perform`` of an Op computes with NumPy, in all modes on the CPU; Numba calls it in object mode.  For JAX
mode, `register_lowering` adds a function of JAX arrays.

JAX may only be imported in the ranks, after the fork, and importing Numba takes a second.  The Ops are therefore
registered with PyTensor's dispatcher for JAX or Numba when the first graph is compiled for it, by a rewrite that
changes nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.compile import optdb
from pytensor.graph.op import Op
from pytensor.graph.rewriting.basic import GraphRewriter

from synkhronos.lowering import shapes
from synkhronos.variable_types import Array, FunctionGraph, Node

_lowerings: dict[type[Op], Callable[..., Any]] = {}


class NumpyOp(Op):
    """An Op that NumPy or XLA computes.  Subclasses define `compute` and `compute_output_shape`."""

    #: Function that maps the inputs' values to the output, or to a tuple of several outputs.
    compute: Callable[..., np.ndarray | tuple[np.ndarray, ...]]
    #: Function that maps the inputs' shapes to the output's shape.  Lengths are numbers or variables.
    compute_output_shape: Callable[..., tuple[Any, ...]]

    def perform(self, node: Node, inputs: Sequence[Array], output_storage: list[list[Any]], params: Any = None) -> None:
        """Compute with NumPy.  Outputs are contiguous, as Numba requires."""
        results = self.compute(*inputs)
        outputs = results if isinstance(results, tuple) else (results,)
        for storage, variable, output in zip(output_storage, node.outputs, outputs, strict=True):
            storage[0] = np.ascontiguousarray(output, dtype=variable.type.dtype)

    @staticmethod
    def broadcast_gradient(output_grad: Any, output: Any) -> Any:
        """Return an output's gradient in the output's shape: one of ``known_grads`` may be broadcast against it."""
        is_one = (True,) * (output.ndim - output_grad.ndim) + output_grad.type.broadcastable
        if any(a and not b for a, b in zip(is_one, output.type.broadcastable, strict=True)):
            return pt.second(output, output_grad)
        return output_grad

    # PyTensor 3.0 also passes a graph, before the node.
    def infer_shape(self, *args: Any) -> Any:
        """Return the output's shape."""
        node, shapes = args[-2:]
        return [self.compute_output_shape(*shapes)]


def register_lowering(op: type[Op]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the function that computes an Op with JAX: it takes the Op and its inputs, and returns the output.

    Examples
    --------
    >>> class Double(NumpyOp):
    ...     __props__ = ()
    >>> @register_lowering(Double)
    ... def double(op, x):
    ...     return 2 * x
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _lowerings[op] = function
        if _register_all_with_jax.cache_info().currsize:  # it has been called
            _register_op_with_jax(op, function)
        return function

    return register


def call_ordered_callback(function: Callable[..., np.ndarray], array: Any, *others: Any) -> Array:
    """Call a function of NumPy arrays from an XLA program, as ``io_callback(..., ordered=True)`` does.

    The result has the shape and dtype of ``array``.
    """
    import jax
    from jax.experimental import io_callback

    def call(*arrays: Any) -> np.ndarray:
        return function(*map(np.asarray, arrays))

    return io_callback(call, jax.ShapeDtypeStruct(array.shape, array.dtype), array, *others, ordered=True)


# -- registration --------------------------------------------------------------------------------------------------


@cache
def _register_all_with_jax() -> None:
    shapes.register_shape_lowerings()
    for op, lowering in _lowerings.items():
        _register_op_with_jax(op, lowering)


def _register_op_with_jax(op_class: type[Op], lowering: Callable[..., Any]) -> None:
    """Register the lowering of a class of Ops."""
    from pytensor.link.jax.dispatch import jax_funcify

    def funcify(op: Op, node: Node = None, **kwargs: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            return lowering(op, *inputs)

        run.__name__ = type(op).__name__
        return run

    jax_funcify.register(op_class)(funcify)


@cache
def _register_all_with_numba() -> None:
    """Register `NumpyOp` with Numba, which calls `perform` in object mode."""
    from pytensor.link.numba.dispatch.basic import generate_fallback_impl, numba_funcify

    # By Op and types, so that Numba compiles the call once for all layers of a network.
    functions: dict[Any, Any] = {}

    @numba_funcify.register(NumpyOp)
    def funcify(op: Op, node: Node = None, **kwargs: Any) -> Any:
        types = [(v.type.dtype, v.type.ndim) for v in (*node.inputs, *node.outputs)]
        key = (op, len(node.inputs), *types)
        if key not in functions:
            with warnings.catch_warnings():
                # Object mode is intended: these Ops spend their time in BLAS.
                warnings.filterwarnings("ignore", "Numba will use object mode")
                # A new node with new inputs, since the graph's node would keep the graph alive.
                detached_node = op.make_node(*(v.type() for v in node.inputs))
                functions[key] = generate_fallback_impl(op, detached_node, **kwargs)
        return functions[key]


class _RegistrationRewriter(GraphRewriter):
    """Rewrite that registers the Ops with a dispatcher before the first graph is compiled for it."""

    def __init__(self, register: Callable[[], None]):
        super().__init__()
        self._register = register

    def apply(self, fgraph: FunctionGraph) -> None:
        """Register the Ops, once in each process.  The graph is not changed."""
        self._register()


optdb.register("synkhronos_lowerings_jax", _RegistrationRewriter(_register_all_with_jax), "jax", position=0.01)
optdb.register("synkhronos_lowerings_numba", _RegistrationRewriter(_register_all_with_numba), "numba", position=0.01)
