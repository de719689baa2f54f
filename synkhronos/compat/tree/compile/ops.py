"""The module ``theano.compile.ops``, on PyTensor."""

from pytensor.compile.ops import DeepCopyOp, FromFunctionOp, ViewOp, as_op, deep_copy_op, view_op
from pytensor.tensor.shape import Shape, Shape_i, SpecifyShape, shape, specify_shape

__all__ = [
    "DeepCopyOp",
    "FromFunctionOp",
    "Shape",
    "Shape_i",
    "SpecifyShape",
    "ViewOp",
    "as_op",
    "deep_copy_op",
    "shape",
    "specify_shape",
    "view_op",
]
