"""Whose variables are these?

A graph library is PyTensor or Theano: the one that made the variables that the user passes in.  Both descend from the
same code, so that one description (`family.GraphLibrary`) serves them, and `pytensor` and `theano` say where they
differ.  Neither is imported before a variable of its own has been seen.

`library_of`
    The graph library of some variables.
`GraphLibrary`
    What the rooms above ask of it.
`mirror`
    Copies graphs to all ranks, each shared variable once.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from synkhronos.graphs.family import GraphLibrary

__all__ = ["GraphLibrary", "is_variable", "library_named", "library_of", "loaded_libraries"]

#: Import name of each library, and the module here that describes it.
_LIBRARIES = {"pytensor": "synkhronos.graphs.pytensor", "theano": "synkhronos.graphs.theano"}

_known: dict[str, GraphLibrary] = {}
#: The library of each class of variables that was seen.
_by_class: dict[type, GraphLibrary] = {}


def loaded_libraries() -> list[GraphLibrary]:
    """Return the graph libraries that this process has imported."""
    for name, module in _LIBRARIES.items():
        # `synkhronos.compat` serves a `theano` whose variables are PyTensor's.
        served = hasattr(sys.modules.get(name), "__served_on__")
        if name not in _known and not served and hasattr(sys.modules.get(name), "shared"):
            _known[name] = importlib.import_module(module).LIBRARY
    return list(_known.values())


def is_variable(value: Any) -> bool:
    """Whether a value is a variable of a graph library."""
    return any(library.is_variable(value) for library in loaded_libraries())


def library_named(name: str) -> GraphLibrary:
    """Return a graph library by its import name, importing it if need be."""
    importlib.import_module(name)
    loaded_libraries()
    return _known[name]


def library_of(*variables: Any) -> GraphLibrary:
    """Return the graph library that made the variables, symbolic or shared ones.

    Raises
    ------
    TypeError
        If one of them is no variable of PyTensor or Theano, or if they come from both.

    Examples
    --------
    >>> import pytensor.tensor as pt
    >>> library_of(pt.matrix("x")).name
    'pytensor'
    """
    found: GraphLibrary | None = None
    if len(variables) == 1 and (found := _by_class.get(type(variables[0]))) is not None:
        return found
    for variable in variables:
        for library in loaded_libraries():
            if library.is_variable(variable):
                break
        else:
            raise TypeError(
                f"expected a variable of PyTensor or Theano, got {variable!r} of type "
                f"{type(variable).__module__}.{type(variable).__qualname__}"
            )
        if found is not None and library is not found:
            raise TypeError(f"variables of {found.name} and of {library.name} can't be used together: {variable!r}")
        found = _by_class[type(variable)] = library
    if found is None:
        raise TypeError("no variable was given to tell PyTensor from Theano")
    return found
