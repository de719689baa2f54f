"""Imports of Theano and Lasagne 0.1, in the order that works.

`synkhronos.compat` comes first: it provides names that Lasagne 0.1 needs, and PyTensor as ``theano`` where Theano is
not installed.
"""

from __future__ import annotations

from importlib.metadata import version

import synkhronos.compat

# isort: split
import theano
import theano.tensor as T

try:
    import lasagne
except ModuleNotFoundError as error:
    raise SystemExit(f"this demo needs {error.name}: pip install 'synkhronos[lasagne]'") from None

__all__ = ["T", "describe_libraries", "lasagne", "theano"]

# GPUs are fast in float32 only.
theano.config.floatX = "float32"


def describe_libraries() -> str:
    """Return the names and versions of the graph library and of Lasagne."""
    library = "Theano" if synkhronos.compat.library == "theano" else "PyTensor"
    # theano.__version__ may be Theano's version even if PyTensor is used.
    return f"{library} {version(library)}, Lasagne {version('Lasagne')}"
