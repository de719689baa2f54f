"""Is an argument what it should be?  An error names the argument, what was expected and what came.

`integer`, `at_least`, `index`
    Integers: any, from some number on, and numbers of ranks.
`number`, `positive`, `is_number`
    Real numbers: any, and those above 0.
`flag`
    True or False.
`one_of`
    A name out of some.
`listed`
    A list of a certain length.
`called`
    What errors call a graph's variable.
`package`, `versions`
    Packages that not everybody has.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import math
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np


def integer(value: Any, name: str, expected: str = "an integer") -> int:
    """Return an integer: what Python takes as an index, but no boolean.

    ``expected`` says what it is to be, for the error.

    Examples
    --------
    >>> integer(3, "n"), at_least(3, "n", 1), index(3, "rank", 4)
    (3, 3, 3)
    >>> integer(3.5, "n")
    Traceback (most recent call last):
    TypeError: n: expected an integer, got 3.5
    """
    if not isinstance(value, bool | np.bool_):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name}: expected {expected}, got {value!r}")


def at_least(value: Any, name: str, least: int, expected: str = "an integer") -> int:
    """Return an integer that is no smaller than ``least``; raise TypeError or ValueError."""
    number = integer(value, name, expected)
    if number < least:
        raise ValueError(f"{name}: expected {f'at least {least}' if least else 'no negative number'}, got {number}")
    return number


def index(value: Any, name: str, size: int, error: type[Exception] = IndexError) -> int:
    """Return an integer from 0 to ``size - 1``; raise TypeError or ``error``."""
    number = integer(value, name)
    if not 0 <= number < size:
        raise error(f"{name}: expected 0 to {size - 1}, got {number}")
    return number


def is_number(value: Any) -> bool:
    """Whether a plain real number: no flag, nothing complex, no text."""
    return (
        isinstance(value, int | float | np.number | np.ndarray)
        and not isinstance(value, bool)
        and np.ndim(value) == 0
        and np.asarray(value).dtype.kind in "iuf"
    )


def number(value: Any, name: str, expected: str = "a number") -> float:
    """Return a real number; raise TypeError."""
    if not is_number(value):
        raise TypeError(f"{name}: expected {expected}, got {value!r}")
    return float(value)


def positive(value: Any, name: str) -> float:
    """Return a finite real number above 0; raise TypeError or ValueError."""
    checked = number(value, name, "a positive number")
    if not 0 < checked < math.inf:
        raise ValueError(f"{name}: expected a positive number, got {value!r}")
    return checked


def flag(value: Any, name: str) -> bool:
    """Return True or False; raise TypeError."""
    if value is True or value is False:
        return value
    if not isinstance(value, np.bool_):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return bool(value)


def one_of(value: Any, name: str, words: Iterable[str]) -> str:
    """Return a name that is one of ``words``; raise TypeError or ValueError."""
    words = tuple(words)
    if not isinstance(value, str) or value not in words:
        error = ValueError if isinstance(value, str) else TypeError
        raise error(f"{name}: expected one of {words}, got {value!r}")
    return value


def listed(value: Any, name: str, length: int, of: str) -> list[Any]:
    """Return a list or tuple of a length as a list; raise TypeError or ValueError."""
    expected = f"{name}: expected a list of {length} {of}, got"
    if not isinstance(value, list | tuple):
        raise TypeError(f"{expected} {type(value).__name__}")
    if len(value) != length:
        raise ValueError(f"{expected} {len(value)} of them")
    return list(value)


def called(variable: Any) -> str:
    """Return what to call a variable of a graph in an error."""
    return repr(variable.name) if getattr(variable, "name", None) else str(variable)


def package(module: str, needs: str, extra: str) -> Any:
    """Return a module; where it is not installed, raise ImportError that says what needs it, and which extra has it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ImportError(f"{needs}: pip install 'synkhronos[{extra}]'") from None


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
