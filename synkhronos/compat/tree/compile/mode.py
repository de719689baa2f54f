"""The module ``theano.compile.mode``, on PyTensor: how functions are compiled."""

from pytensor import config
from pytensor.compile.mode import (
    FAST_COMPILE,
    Mode,
    get_default_mode,
    get_mode,
    optdb,
    predefined_linkers,
    predefined_modes,
    predefined_optimizers,
    register_linker,
    register_mode,
    register_optimizer,
)

__all__ = [
    "FAST_COMPILE",
    "FAST_RUN",
    "Mode",
    "get_default_mode",
    "get_mode",
    "optdb",
    "predefined_linkers",
    "predefined_modes",
    "predefined_optimizers",
    "register_linker",
    "register_mode",
    "register_optimizer",
]

# PyTensor's knows only the linkers that it takes by itself, not Python's, say.
_of_pytensor = config.linker in ("auto", "cvm", "numba", "vm")
FAST_RUN = get_mode("FAST_RUN") if _of_pytensor else Mode(config.linker, "fast_run")
