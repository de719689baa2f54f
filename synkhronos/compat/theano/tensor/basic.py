"""The module ``theano.tensor.basic``, on PyTensor: functions whose names or arguments differ from Theano's.

All other names come from ``pytensor.tensor``.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.basic import (
    Alloc,
    AllocEmpty,
    ARange,
    Eye,
    Join,
    MakeVector,
    ScalarFromTensor,
    Split,
    TensorFromScalar,
    get_scalar_constant_value,
)
from pytensor.tensor.exceptions import NotScalarConstantError, ShapeError
from pytensor.tensor.math import Argmax, Dot, Sum
from pytensor.tensor.shape import Reshape, Shape, SpecifyShape
from pytensor.tensor.type import (
    TensorType,
    all_dtypes,
    complex_dtypes,
    continuous_dtypes,
    discrete_dtypes,
    float_dtypes,
    int_dtypes,
    integer_dtypes,
    uint_dtypes,
)
from theano.gradient import (
    DisconnectedType,
    Lop,
    Rop,
    consider_constant,
    grad,
    grad_not_implemented,
    grad_undefined,
    hessian,
    jacobian,
    numeric_grad,
    verify_grad,
)
from theano.tensor.var import TensorConstant, TensorVariable


def __getattr__(name: str) -> Any:
    return getattr(pt, name)


# -- other names -----------------------------------------------------------------------------------------------------

abs_ = pt.abs
inv = pt.reciprocal


def hashtype(self: Any) -> int:
    """Return a hash of an object's class, for ``__hash__`` of Ops that are equal if their classes are."""
    return hash(type(self))


def _get_constant(x: Any) -> Any:
    """Return the value of a constant scalar, or the variable itself."""
    try:
        return get_scalar_constant_value(x)
    except NotScalarConstantError:
        return x


def alloc(value: Any, *shape: Any) -> Any:
    """Fill an array with a value.

    As in Theano, the type has the lengths that are constants or simple expressions of them.  `pytensor.tensor.alloc`
    would simplify the graphs of all lengths, which include a network's layers, and dominate the time to build it.
    """
    lengths = [pt.as_tensor_variable(n, ndim=0) for n in shape]
    values = [_get_constant(n) for n in lengths]
    node = pt.alloc(value, *(n.type() if n is k else k for n, k in zip(lengths, values, strict=True))).owner
    return Apply(node.op, [node.inputs[0], *lengths], [node.outputs[0].type()]).outputs[0]


def zeros(shape: Any, dtype: Any = None) -> Any:
    """Fill an array with zeros of a dtype, floatX by default."""
    return _fill(0, shape, dtype)


def ones(shape: Any, dtype: Any = None) -> Any:
    """Fill an array with ones of a dtype, floatX by default."""
    return _fill(1, shape, dtype)


def _fill(value: int, shape: Any, dtype: Any) -> Any:
    if isinstance(shape, Variable) and shape.type.ndim:
        shape = tuple(shape)
    elif not isinstance(shape, list | tuple | np.ndarray):
        shape = (shape,)
    return alloc(np.array(value, dtype or pytensor.config.floatX), *shape)


def addbroadcast(x: Any, *axes: int) -> Any:
    """Make dimensions of length 1 broadcastable."""
    return pt.specify_broadcastable(x, *axes) if axes else x


def unbroadcast(x: Any, *axes: int) -> Any:
    """Return the variable unchanged: a known length of 1 does not restrict its use in PyTensor."""
    return x


def patternbroadcast(x: Any, broadcastable: Sequence[bool]) -> Any:
    """Make the dimensions broadcastable for which the pattern is true."""
    return addbroadcast(x, *(axis for axis, b in enumerate(broadcastable) if b))


# -- symbolic variables ----------------------------------------------------------------------------------------------


def _make_constructor(name: str) -> Callable[..., Any]:
    """Return a constructor of variables that takes the dtype as a positional argument, unlike PyTensor's."""
    make = getattr(pt, name)

    def construct(name: str | None = None, dtype: Any = None, **kwargs: Any) -> Any:
        return make(name, dtype=dtype, **kwargs)

    construct.__name__ = construct.__qualname__ = name
    construct.__doc__ = f"Return a symbolic {name} of a name and a dtype, by default floatX."
    return construct


scalar, vector, matrix, row, col = map(_make_constructor, ("scalar", "vector", "matrix", "row", "col"))
tensor3, tensor4, tensor5, tensor6, tensor7 = (_make_constructor(f"tensor{n}") for n in range(3, 8))


def tensor(dtype: Any = None, broadcastable: Iterable[bool] | None = None, name: Any = None, **kwargs: Any) -> Any:
    """Return a symbolic variable.  The arguments are Theano's or, without ``broadcastable``, PyTensor's.

    Examples
    --------
    >>> T.tensor("float32", (False, True), "x").type.shape
    (None, 1)
    """
    if broadcastable is None:
        return pt.tensor(name, dtype=dtype, **kwargs)
    return TensorType(dtype, shape=tuple(1 if b else None for b in broadcastable))(name)


# -- other arguments -------------------------------------------------------------------------------------------------


def dot(a: Any, b: Any) -> Any:
    """Return the dot product, over the last axis of ``a`` and the last but one of ``b``."""
    return pt.dot(a, b)


def flatten(x: Any, ndim: int | None = None, outdim: int | None = None) -> Any:
    """Flatten the last dimensions to have ``ndim`` in all, by default 1.  ``outdim`` is the old name."""
    return pt.flatten(x, ndim=ndim or outdim or 1)


def stack(*tensors: Any, **kwargs: Any) -> Any:
    """Stack tensors along a new axis.  They are passed as a list or, in old scripts, as separate arguments."""
    if "tensors" in kwargs:
        tensors = (kwargs.pop("tensors"), *tensors)
    axis = kwargs.get("axis", 0)
    if isinstance(tensors[0], list | tuple):
        return pt.stack(list(tensors[0]), axis=tensors[1] if len(tensors) > 1 else axis)
    return pt.stack(list(tensors), axis=axis)


def mean(
    input: Any, axis: Any = None, dtype: Any = None, op: bool = False, keepdims: bool = False, **kwargs: Any
) -> Any:
    """Return the mean over axes."""
    return pt.mean(input, axis=axis, dtype=dtype, keepdims=keepdims, **kwargs)


def reshape(x: Any, newshape: Any, ndim: int | None = None) -> Any:
    """Reshape an array.  ``ndim`` is the length of ``newshape``, where that is unknown."""
    return pt.reshape(x, newshape, ndim=ndim)


def tile(x: Any, reps: Any, ndim: int | None = None) -> Any:
    """Repeat an array along each dimension."""
    if ndim is not None:
        reps = list(reps) if isinstance(reps, list | tuple) else [reps]
        reps = [1] * (ndim - len(reps)) + reps
    return pt.tile(x, reps)


def repeat(x: Any, repeats: Any, axis: int | None = None) -> Any:
    """Repeat each element."""
    return pt.repeat(x, repeats, axis=axis)


def split(x: Any, splits_size: Any, n_splits: int, axis: int = 0) -> Any:
    """Split an array into ``n_splits`` parts of lengths ``splits_size``."""
    return pt.split(x, splits_size, n_splits=n_splits, axis=axis)


def choose(a: Any, choices: Any, out: Any = None, mode: str = "raise") -> Any:
    """Choose each element from one of several arrays."""
    return pt.choose(a, choices, mode=mode)


# -- functions that PyTensor lacks -----------------------------------------------------------------------------------


def batched_dot(a: Any, b: Any) -> Any:
    """Return the dot products of pairs along the first axis."""
    a, b = pt.as_tensor_variable(a), pt.as_tensor_variable(b)
    if a.ndim == 0 or b.ndim == 0:
        raise TypeError("a and b must have at least one dimension each")
    if a.ndim == 1 or b.ndim == 1:
        return a.dimshuffle(0, *["x"] * (b.ndim - 1)) * b if a.ndim == 1 else a * b.dimshuffle(0, *["x"] * (a.ndim - 1))
    if a.ndim > 3 or b.ndim > 3:
        return batched_tensordot(a, b, [[a.ndim - 1], [max(b.ndim - 2, 1)]])
    batch_left = a[:, None, :] if a.ndim == 2 else a
    batch_right = b[:, :, None] if b.ndim == 2 else b
    product = pt.matmul(batch_left, batch_right)
    if b.ndim == 2:
        product = product[:, :, 0]
    return product[:, 0] if a.ndim == 2 else product


def batched_tensordot(x: Any, y: Any, axes: Any = 2) -> Any:
    """Return the tensor products of pairs along the first axis, summed over some axes.

    ``axes`` is two lists with the summed axes of ``x`` and of ``y``.  A number n stands for the last n axes of ``x``,
    and for the first n axes of ``y`` after the axis of pairs.
    """
    x, y = pt.as_tensor_variable(x), pt.as_tensor_variable(y)
    if isinstance(axes, int):
        x_axes, y_axes = list(range(x.ndim - axes, x.ndim)), list(range(1, axes + 1))
    else:
        x_axes, y_axes = ([a] if isinstance(a, int) else list(a) for a in axes)
    x_rest = [a for a in range(1, x.ndim) if a not in x_axes]
    y_rest = [a for a in range(1, y.ndim) if a not in y_axes]
    n = x.shape[0]
    summed = pt.prod(pt.stack([x.shape[a] for a in x_axes])) if x_axes else 1
    left = x.dimshuffle(0, *x_rest, *x_axes).reshape((n, -1, summed))
    right = y.dimshuffle(0, *y_axes, *y_rest).reshape((n, summed, -1))
    shape = [n, *(x.shape[a] for a in x_rest), *(y.shape[a] for a in y_rest)]
    return pt.matmul(left, right).reshape(shape, ndim=len(shape))


def topk_and_argtopk(
    x: Any, kth: Any, axis: int | None = -1, sorted: bool = True, idx_dtype: str = "int64"
) -> list[Any]:
    """Return the k largest elements along an axis, or with a negative k the smallest, and their indexes."""
    x = pt.as_tensor_variable(x)
    if axis is None:
        x, axis = x.flatten(), 0
    order, n = pt.argsort(x, axis=axis), x.shape[axis]
    check = CheckAndRaise(ValueError, "topk: expected kth between 1 and the length of the axis, or its negative")
    kth = check(kth, pt.neq(kth, 0), pt.le(abs(pt.as_tensor_variable(kth)), n))
    selected = slice(pt.switch(pt.lt(kth, 0), 0, n - kth), pt.switch(pt.lt(kth, 0), -kth, n))
    indexes = order[(slice(None),) * (axis % x.ndim) + (selected,)]
    return [pt.take_along_axis(x, indexes, axis=axis), indexes.astype(idx_dtype)]


def topk(x: Any, kth: Any, axis: int = -1, sorted: bool = True, idx_dtype: str = "int64") -> Any:
    """Return the k largest elements along an axis, or with a negative k the smallest."""
    return topk_and_argtopk(x, kth, axis)[0]


def argtopk(x: Any, kth: Any, axis: int = -1, sorted: bool = True, idx_dtype: str = "int64") -> Any:
    """Return the indexes of the k largest elements along an axis, or with a negative k the smallest."""
    return topk_and_argtopk(x, kth, axis, idx_dtype=idx_dtype)[1]
