"""Shim of ``hickle``, which Theano-MPI's model files import without always using it."""

from typing import Any, NoReturn


def load(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise ImportError."""
    raise ImportError("reading and writing .hkl files needs hickle: pip install hickle", name="hickle")


dump = load
