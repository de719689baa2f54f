"""Theano and Lasagne 0.1, ready for each other.

`theano`, `T`
    Theano and its ``tensor``.  Where Theano is not installed, `synkhronos.compat` serves PyTensor under its name.
`lasagne`
    Lasagne 0.1, which was written for older versions of Theano; `synkhronos.compat` gives it what it misses.
`title`
    Names and versions, for the first line that a script prints.
"""

from __future__ import annotations

from importlib.metadata import version

import synkhronos.compat

# isort: split
import lasagne
import theano
import theano.tensor as T

__all__ = ["T", "lasagne", "theano", "title"]

# What GPUs are fast at.
theano.config.floatX = "float32"


def title() -> str:
    """Return the names and versions of the graph library and of Lasagne."""
    library = "Theano" if synkhronos.compat.chosen == "theano" else "PyTensor"
    # What stands under Theano's name may give Theano's version, for programs that ask for it.
    return f"{library} {version(library)}, Lasagne {version('Lasagne')}"
