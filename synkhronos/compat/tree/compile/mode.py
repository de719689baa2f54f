"""The module ``theano.compile.mode``, on PyTensor: how functions are compiled."""

from pytensor import config
from pytensor.compile.mode import *
from pytensor.compile.mode import Mode, get_mode

# PyTensor's knows only the linkers that it takes by itself, not Python's, say.
_of_pytensor = config.linker in ("auto", "cvm", "numba", "vm")
FAST_RUN = get_mode("FAST_RUN") if _of_pytensor else Mode(config.linker, "fast_run")
