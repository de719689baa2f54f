"""What do the Ops of this package have in common?

`NumpyOp`
    An Op whose ``perform`` is NumPy, with a lowering to XLA by its side.
`lowers`
    Says how an Op is computed by JAX.

Each Op is defined once.  ``perform`` serves the modes that run on the CPU: PyTensor's C mode as it is, Numba as a call
back to Python.  For JAX mode a function of JAX arrays stands beside it.  JAX may only be imported in the ranks, after
the fork, and Numba takes a second to import: PyTensor's dispatchers hear of these Ops when a function is compiled for
one of them, by a rewrite that rewrites nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from pytensor.compile import optdb
from pytensor.graph.op import Op
from pytensor.graph.rewriting.basic import GraphRewriter

from synkhronos.lowering import shapes

__all__ = ["NumpyOp", "lowers"]

_lowerings: dict[type[Op], Callable[..., Any]] = {}
#: Which dispatchers have heard of the Ops in this process.
_told: set[Callable[[], None]] = set()


class NumpyOp(Op):
    """An Op computed by NumPy or by XLA.

    Subclasses define `compute` and `output_shape`.
    """

    #: Computes the output from the inputs' values.
    compute: Callable[..., np.ndarray]
    #: Returns the output's shape for those of the inputs: numbers, or variables of them.
    output_shape: Callable[..., tuple[Any, ...]]

    def perform(self, node: Any, inputs: Any, output_storage: Any, params: Any = None) -> None:
        """Compute with NumPy; the output is contiguous, as Numba is told."""
        output = self.compute(*inputs)
        output_storage[0][0] = np.ascontiguousarray(output, dtype=node.outputs[0].type.dtype)

    # PyTensor 3.0 passes a graph before the node, later versions do not.
    def infer_shape(self, *args: Any) -> Any:
        """Return the output's shape."""
        node, shapes = args[-2:]
        return [self.output_shape(*shapes)]


def lowers(op: type[Op]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that computes an Op with JAX: it takes the Op and its inputs, and returns its output.

    Examples
    --------
    >>> class Double(NumpyOp):
    ...     __props__ = ()
    >>> @lowers(Double)
    ... def double(op, x):
    ...     return 2 * x
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _lowerings[op] = function
        if _tell_jax in _told:
            _register(op, function)
        return function

    return register


# -- telling the dispatchers ---------------------------------------------------------------------------------------


def _tell_jax() -> None:
    shapes.register_lowerings()
    for op, lowering in _lowerings.items():
        _register(op, lowering)


def _register(op_class: type[Op], lowering: Callable[..., Any]) -> None:
    from pytensor.link.jax.dispatch import jax_funcify

    def funcify(op: Any, node: Any = None, **kwargs: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            return lowering(op, *inputs)

        run.__name__ = type(op).__name__
        return run

    jax_funcify.register(op_class)(funcify)


def _tell_numba() -> None:
    from pytensor.link.numba.dispatch.basic import generate_fallback_impl, numba_funcify

    # A network has the same Op in many layers: Numba compiles the call back to Python once for each, not for each node.
    functions: dict[Any, Any] = {}

    @numba_funcify.register(NumpyOp)
    def funcify(op: Any, node: Any = None, **kwargs: Any) -> Any:
        kinds = [(v.type.dtype, v.type.ndim) for v in (*node.inputs, *node.outputs)]
        key = (op, len(node.inputs), *kinds)
        if key not in functions:
            with warnings.catch_warnings():
                # That it calls Python is as it should be: these Ops spend their time in BLAS.
                warnings.filterwarnings("ignore", "Numba will use object mode")
                # A node by itself: that of the graph would keep all that it was computed from.
                alone = op.make_node(*(v.type() for v in node.inputs))
                functions[key] = generate_fallback_impl(op, alone, **kwargs)
        return functions[key]


class _Tell(GraphRewriter):
    """Registers the Ops with a dispatcher before the first graph is compiled for it."""

    def __init__(self, tell: Callable[[], None]):
        super().__init__()
        self._tell = tell

    def apply(self, fgraph: Any) -> None:
        """Change nothing."""
        if self._tell not in _told:
            self._tell()
            _told.add(self._tell)

    def add_requirements(self, fgraph: Any) -> None:
        """Require nothing."""


optdb.register("synkhronos_lowerings_jax", _Tell(_tell_jax), "jax", position=0.01)
optdb.register("synkhronos_lowerings_numba", _Tell(_tell_numba), "numba", position=0.01)
