"""The module ``hickle`` where it is not installed: Theano-MPI's model files import it, and not all of them use it."""

from typing import Any, NoReturn


def load(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise ImportError."""
    raise ImportError("reading and writing .hkl files needs hickle: pip install hickle", name="hickle")


dump = load
