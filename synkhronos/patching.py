"""Temporary changes of other libraries, and of the environment."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def replace_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or an object within the ``with`` block.

    ``unittest.mock`` does the same, but imports asyncio, which would slow the start of each rank.

    Examples
    --------
    >>> import math
    >>> with replace_attribute(math, "pi", 3):
    ...     math.pi
    3
    """
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def restore_jax_precision() -> Iterator[None]:
    """Restore JAX's precision after the ``with`` block, if JAX was imported before.  The library enables float64."""
    jax = sys.modules.get("jax")
    old_value = None if jax is None else jax.config.jax_enable_x64
    try:
        yield
    finally:
        if jax is not None and jax.config.jax_enable_x64 != old_value:
            jax.config.update("jax_enable_x64", old_value)


@contextlib.contextmanager
def set_environment(**variables: str | None) -> Iterator[None]:
    """Set environment variables within the ``with`` block, or remove those whose value is None."""
    originals = {name: os.environ.get(name) for name in variables}
    _assign_environment(variables)
    try:
        yield
    finally:
        _assign_environment(originals)


def _assign_environment(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
