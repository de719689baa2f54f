"""Temporary changes of other libraries."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
