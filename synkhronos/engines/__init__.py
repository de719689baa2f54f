"""Engines, which launch compiled functions on a rank.

The graph libraries describe and compile functions; engines launch the compiled functions.  Engines are discovered: each
module of this package that defines ``ENGINE`` adds one.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from synkhronos.engines import numpy_engine
from synkhronos.engines.engine import Engine, GradientExchange, Runner, StepShards
from synkhronos.graph_libraries import GraphLibrary
from synkhronos.variable_types import Mode

__all__ = ["Engine", "GradientExchange", "StepShards", "Runner", "choose_engine", "list_engines"]


@cache
def list_engines() -> tuple[Engine, ...]:
    """Return the ``ENGINE`` of every module here; NumPy's is last, as it can launch every function."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    engines = [module.ENGINE for module in modules if hasattr(module, "ENGINE")]
    return (*(engine for engine in engines if engine is not numpy_engine.ENGINE), numpy_engine.ENGINE)


def choose_engine(library: GraphLibrary, mode: Mode) -> Engine:
    """Return the engine for a library's functions of this mode, in this process."""
    return next(engine for engine in list_engines() if engine.can_launch(library, mode))
