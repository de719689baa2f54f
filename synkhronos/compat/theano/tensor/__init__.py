"""The module ``theano.tensor``, on PyTensor: the names of ``pytensor.tensor``, overridden by those of ``basic``."""

from types import ModuleType

import pytensor.tensor as _pytensor
import theano.tensor.sort  # precedes functions with the modules' names, which override them
import theano.tensor.var

globals().update({n: v for n, v in vars(_pytensor).items() if not n.startswith("_") and not isinstance(v, ModuleType)})

from theano import config
from theano.tensor import elemwise, extra_ops, fft, nlinalg, sharedvar, slinalg, subtensor, type, xlogx
from theano.tensor.basic import *
from theano.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from theano.tensor.sharedvar import TensorSharedVariable
from theano.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedIncSubtensor1,
    AdvancedSubtensor,
    AdvancedSubtensor1,
    IncSubtensor,
    Subtensor,
)

from theano.tensor import basic, nnet, shared_randomstreams, signal  # isort: skip - their modules use the names above
from theano.tensor.shared_randomstreams import RandomStreams

Tensor = type.TensorType
