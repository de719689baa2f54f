"""The module ``theano.compile.mode``, on PyTensor."""

from pytensor import config
from pytensor.compile.mode import *
from pytensor.compile.mode import Mode, get_mode

# PyTensor registers FAST_RUN for its default linkers only.
_is_default = config.linker in ("auto", "cvm", "numba", "vm")
FAST_RUN = get_mode("FAST_RUN") if _is_default else Mode(config.linker, "fast_run")
