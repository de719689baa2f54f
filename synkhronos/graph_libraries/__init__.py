"""The graph library of a variable: PyTensor or Theano.

`library.GraphLibrary` has the common part; `pytensor` and `theano` override the methods in which they differ.  Neither
library is imported here: a `GraphLibrary` is created after the user's script has imported the library.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from synkhronos.graph_libraries.library import GraphLibrary

__all__ = [
    "GraphLibrary",
    "apply_settings",
    "get_library",
    "is_variable",
    "list_loaded_libraries",
    "list_settings",
    "register_loaded_libraries",
]

#: Module of each library's subclass of `GraphLibrary`, by import name.
_LIBRARY_MODULES = {"pytensor": "synkhronos.graph_libraries.pytensor", "theano": "synkhronos.graph_libraries.theano"}

_libraries: dict[str, GraphLibrary] = {}
#: Cache of `get_library`, by class of variable.
_library_by_class: dict[type, GraphLibrary] = {}


def list_loaded_libraries() -> list[GraphLibrary]:
    """Return the graph libraries that this process has imported."""
    register_loaded_libraries()
    return list(_libraries.values())


def register_loaded_libraries() -> None:
    """Import this package's module for each graph library that this process has imported."""
    for name, module in _LIBRARY_MODULES.items():
        package = sys.modules.get(name)
        # The variables of the `theano` that `synkhronos.compat` provides are PyTensor's.
        is_compat = hasattr(package, "__served_on__")
        if name not in _libraries and not is_compat and hasattr(package, "shared"):
            _libraries[name] = importlib.import_module(module).LIBRARY


def list_settings() -> dict[str, dict[str, Any]]:
    """Return the settings of each loaded library, by import name; see `GraphLibrary.list_settings`."""
    return {library.name: library.list_settings() for library in list_loaded_libraries()}


def apply_settings(settings: dict[str, dict[str, Any]]) -> None:
    """Apply the settings that `list_settings` has returned in another process, and import the libraries."""
    for name, values in settings.items():
        library: GraphLibrary = importlib.import_module(_LIBRARY_MODULES[name]).LIBRARY
        library.apply_settings(values)


def is_variable(value: object) -> bool:
    """Whether a value is a variable of a graph library."""
    return any(library.is_variable(value) for library in list_loaded_libraries())


def get_library(*variables: Any) -> GraphLibrary:
    """Return the graph library of variables; raise TypeError for other values, and for variables of two libraries."""
    common: GraphLibrary | None = None
    if len(variables) == 1 and (common := _library_by_class.get(type(variables[0]))) is not None:
        return common
    for variable in variables:
        for library in list_loaded_libraries():
            if library.is_variable(variable):
                break
        else:
            raise TypeError(
                f"expected a variable of PyTensor or Theano, got {variable!r} of type "
                f"{type(variable).__module__}.{type(variable).__qualname__}"
            )
        if common is not None and library is not common:
            raise TypeError(f"variables of {common.name} and of {library.name} can't be used together: {variable!r}")
        common = _library_by_class[type(variable)] = library
    if common is None:
        raise TypeError("no variable was given to tell PyTensor from Theano")
    return common
