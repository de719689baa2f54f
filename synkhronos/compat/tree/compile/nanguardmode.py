"""The module ``theano.compile.nanguardmode``, on PyTensor."""

from pytensor.compile.debug.nanguardmode import (
    NanGuardMode,
)

__all__ = [
    "NanGuardMode",
]
