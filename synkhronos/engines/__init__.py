"""What runs a compiled function?

The graph libraries describe and compile; an engine runs what they have compiled, on one rank.  A new engine is one
module here, with an object called ``ENGINE``.

`Engine`, `Runner`
    What the rooms above ask of it (`base`).
`host`, `xla`, `pygpu`
    The engines: NumPy arrays in and out, PyTensor's JAX mode, Theano on GPUs.
`lazy`
    Outputs that are read when somebody asks for them.
`kinds`
    All that are found here.
`engine_of`
    The one for a library's functions of some mode.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from synkhronos.engines import host
from synkhronos.engines.base import Combined, Engine, Runner
from synkhronos.graphs import GraphLibrary

__all__ = ["Combined", "Engine", "Runner", "engine_of", "kinds"]


@cache
def kinds() -> tuple[Engine, ...]:
    """Return the ``ENGINE`` of each module here that has one; last the host's, which runs what no other does."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    found = [module.ENGINE for module in modules if hasattr(module, "ENGINE")]
    return (*(engine for engine in found if engine is not host.ENGINE), host.ENGINE)


def engine_of(library: GraphLibrary, mode: Any) -> Engine:
    """Return what runs a library's functions of this mode, in this process."""
    return next(engine for engine in kinds() if engine.runs(library, mode))
