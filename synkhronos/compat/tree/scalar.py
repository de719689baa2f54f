"""The module ``theano.scalar``, on PyTensor."""

from pytensor.scalar import *  # noqa: F403
from pytensor.scalar.basic import (  # noqa: F401
    BinaryScalarOp,
    Composite,
    ScalarOp,
    UnaryScalarOp,
    same_out,
    upcast,
    upgrade_to_float,
)
