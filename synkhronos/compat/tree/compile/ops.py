"""The module ``theano.compile.ops``, on PyTensor."""

from pytensor.compile.ops import *
from pytensor.tensor.shape import Shape, Shape_i, SpecifyShape, shape, specify_shape
