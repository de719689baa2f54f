"""Lengths stay numbers when JAX traces a function.

`tell_jax`
    Registers the lowerings with PyTensor.

XLA compiles for fixed shapes, so that while a function is traced each array's shape is a tuple of numbers.  PyTensor's
lowerings compute with them by JAX all the same, after which they are traced values, which neither a reshape nor a
slice takes; programs written for Theano reshape by what they compute from shapes all the time.  Here, Ops on integers
that are known as the function is traced are computed by NumPy then, and all others as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from pytensor.scalar.basic import AND, OR, Add, Mul, ScalarMaximum, ScalarMinimum, ScalarOp
from pytensor.tensor.basic import ARange, Join, MakeVector, ScalarFromTensor, Split, TensorFromScalar
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.shape import Reshape
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor

__all__ = ["tell_jax"]

#: What has more elements is data and no shape.
_MOST = 64

Compute = Callable[..., Any]


def tell_jax() -> None:
    """Put a computation by NumPy in front of PyTensor's lowerings of some Ops."""
    from pytensor.link.jax.dispatch import jax_funcify

    for base, by_numpy in (
        (ScalarOp, _scalar),
        (Elemwise, _elemwise),
        (CAReduce, _reduce),
        (MakeVector, _make_vector),
        (ScalarFromTensor, _same),
        (TensorFromScalar, _same),
        (DimShuffle, _dimshuffle),
        (Subtensor, _subtensor),
        (Join, _join),
    ):
        # Subclasses may have lowerings of their own.
        for op in [known for known in jax_funcify.registry if issubclass(known, base)]:
            jax_funcify.register(op)(_in_front(jax_funcify.dispatch(op), by_numpy))
    jax_funcify.register(Reshape)(_reshape)
    jax_funcify.register(ARange)(_arange)
    jax_funcify.register(Split)(_split)


def _in_front(lowering: Callable[..., Any], by_numpy: Callable[[Any, Any], Compute | None]) -> Callable[..., Any]:
    """Return a lowering that computes by NumPy what is known, if the outputs are integers of a shape's size."""

    def funcify(op: Any, node: Any = None, **kwargs: Any) -> Compute:
        traced = lowering(op, node=node, **kwargs)
        if node is None or not _may_be_shapes(node.outputs):
            return traced
        compute = by_numpy(op, node)
        if compute is None:
            return traced

        def run(*inputs: Any) -> Any:
            if not all(map(_is_known, inputs)):
                return traced(*inputs)
            computed = compute(*map(_number, inputs))
            if len(node.outputs) == 1:
                return _result(computed, node.outputs[0])
            return tuple(_result(*pair) for pair in zip(computed, node.outputs, strict=True))

        return run

    return funcify


def _may_be_shapes(variables: Sequence[Any]) -> bool:
    """Whether there are integers among some variables, and nothing large."""
    dtypes = [getattr(v.type, "dtype", "") for v in variables]
    small = all(getattr(v.type, "ndim", 0) <= 1 for v in variables)
    return small and any(dtype == "bool" or "int" in dtype for dtype in dtypes)


def _is_known(value: Any) -> bool:
    """Whether a value is an integer, or a few, and not traced."""
    import jax

    if isinstance(value, tuple | list):
        return all(map(_is_known, value))
    if isinstance(value, jax.core.Tracer):
        return False
    if isinstance(value, bool | int | np.integer | np.bool_):
        return True
    return isinstance(value, np.ndarray | jax.Array) and value.dtype.kind in "biu" and value.size <= _MOST


def _result(value: Any, variable: Any) -> Any:
    array = np.asarray(value, variable.type.dtype)
    # A float of Python's would take on other arrays' dtype.
    return array if array.dtype.kind == "f" else _number(array)


def _number(value: Any) -> Any:
    array = np.asarray(value)
    return array if array.ndim else array.item()


# -- by NumPy ------------------------------------------------------------------------------------------------------


def _elemwise(op: Any, node: Any) -> Compute:
    if not any(v.type.ndim for v in node.inputs):
        # What a network's lengths are fused to may have more operands than a function of NumPy's can.
        return op.scalar_op.impl
    return np.vectorize(op.scalar_op.impl, otypes=[v.type.dtype for v in node.outputs])


def _scalar(op: Any, node: Any) -> Compute | None:
    # Elemwise asks for its scalar Op's lowering with its own node.
    return op.impl if node.op is op else None


def _reduce(op: Any, node: Any) -> Compute | None:
    known: dict[type, Compute] = {
        Add: np.sum,
        Mul: np.prod,
        ScalarMaximum: np.max,
        ScalarMinimum: np.min,
        AND: np.all,
        OR: np.any,
    }
    return known.get(type(op.scalar_op))


def _make_vector(op: Any, node: Any) -> Compute:
    return lambda *x: np.array(x, op.dtype)


def _same(op: Any, node: Any) -> Compute:
    return lambda x: x


def _dimshuffle(op: Any, node: Any) -> Compute:
    return lambda x: np.reshape(x, (-1,) if node.outputs[0].type.ndim else ())


def _subtensor(op: Any, node: Any) -> Compute:
    return lambda x, *index: np.asarray(x)[tuple(indices_from_subtensor(index, op.idx_list))]


def _join(op: Any, node: Any) -> Compute:
    # In newer PyTensor the axis belongs to the Op; a shape has only one.
    first = 0 if hasattr(op, "axis") else 1
    return lambda *x: np.concatenate([np.atleast_1d(part) for part in x[first:]])


# -- what takes a shape --------------------------------------------------------------------------------------------


def _reshape(op: Any, node: Any = None, **kwargs: Any) -> Compute:
    """Reshape to any shape that is known when the function is traced."""
    import jax.numpy as jnp

    def reshape(x: Any, shape: Any) -> Any:
        _require_known(shape, node.inputs[1])
        return jnp.reshape(x, tuple(int(n) for n in np.ravel(shape)))

    return reshape


def _arange(op: Any, node: Any = None, **kwargs: Any) -> Compute:
    """Count to any length that is known when the function is traced."""
    import jax.numpy as jnp

    def arange(*limits: Any) -> Any:
        _require_known(limits, node.outputs[0])
        start, stop, step = map(_number, limits)
        return jnp.arange(start, stop, step, dtype=op.dtype)

    return arange


def _split(op: Any, node: Any = None, **kwargs: Any) -> Compute:
    """Cut into parts of any lengths that are known when the function is traced."""
    import jax.numpy as jnp

    def split(x: Any, *where: Any) -> Any:
        # In newer PyTensor the axis belongs to the Op.
        axis, lengths = where if len(where) == 2 else (op.axis, *where)
        _require_known((axis, lengths), node.inputs[-1])
        parts = jnp.split(x, np.cumsum(np.ravel(lengths))[:-1].tolist(), axis=int(axis))
        return parts if len(parts) > 1 else parts[0]

    return split


def _require_known(value: Any, variable: Any) -> None:
    if not _is_known(value):
        raise NotImplementedError(
            f"XLA compiles for fixed shapes, and this one depends on what arrays hold: {variable}"
        )
