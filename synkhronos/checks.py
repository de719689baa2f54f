"""Checks of arguments and of installed packages.

For an invalid argument, a ``check_`` function raises an error with the argument's name, the expected values and the
given value.  Most of these functions return a valid argument, as a built-in type.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

CallableT = TypeVar("CallableT", bound=Callable[..., Any])


def format_similar(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the end of an error message for an unknown name: the names that are similar to it, or "".

    Examples
    --------
    >>> format_similar("colour", ["color", "shape"])
    '; similar: color'
    """
    similar = difflib.get_close_matches(name, names, cutoff=cutoff)
    return f"; similar: {', '.join(similar)}" if similar else ""


def suggest_keywords(function: CallableT) -> CallableT:
    """Decorate a function: its TypeError for an unknown keyword lists similar keywords, or all if none is similar.

    Examples
    --------
    >>> @suggest_keywords
    ... def draw(colour="red"): ...
    >>> draw(color="blue")
    Traceback (most recent call last):
    TypeError: color: unknown argument of draw(); similar: colour
    """
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    function_name = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in names:
                similar = format_similar(name, names) or f"; arguments are {', '.join(names)}"
                raise TypeError(f"{name}: unknown argument of {function_name}(){similar}")
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]  # it has the signature of the function


def check_integer(value: Any, name: str, expected: str = "an integer") -> int:
    """Return an integer.  All types that Python accepts as an index are valid, except for booleans.

    ``name`` is the argument's name in errors, and ``expected`` the description of valid values there.

    Examples
    --------
    >>> check_integer(3, "n"), check_at_least(3, "n", 1), check_index(3, "rank", 4)
    (3, 3, 3)
    >>> check_integer(3.5, "n")
    Traceback (most recent call last):
    TypeError: n: expected an integer, got 3.5
    """
    if not isinstance(value, bool | np.bool_):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name}: expected {expected}, got {value!r}")


def check_at_least(value: object, name: str, minimum: int, expected: str = "an integer") -> int:
    """Return an integer that is not below ``minimum``; raise TypeError or ValueError."""
    number = check_integer(value, name, expected)
    if number < minimum:
        raise ValueError(f"{name}: expected {f'at least {minimum}' if minimum else 'no negative number'}, got {number}")
    return number


def check_index(value: object, name: str, size: int, error_class: type[Exception] = IndexError) -> int:
    """Return an integer from 0 to ``size - 1``, such as a rank; raise TypeError or ``error_class``."""
    number = check_integer(value, name)
    if not 0 <= number < size:
        raise error_class(f"{name}: expected 0 to {size - 1}, got {number}")
    return number


def is_number(value: object) -> bool:
    """Whether the value is a real number: no boolean, complex number, array, string, or integer beyond 64 bits."""
    return type(value) is float or (  # fast path: a training step calls this
        isinstance(value, int | float | np.number | np.ndarray)
        and not isinstance(value, bool)
        and np.ndim(value) == 0
        and np.asarray(value).dtype.kind in "iuf"
    )


def check_number(value: Any, name: str, expected: str = "a number") -> float:
    """Return a real number; raise TypeError."""
    if not is_number(value):
        raise TypeError(f"{name}: expected {expected}, got {value!r}")
    return float(value)


def check_positive(value: object, name: str) -> float:
    """Return a finite real number above 0; raise TypeError or ValueError."""
    checked = check_number(value, name, "a positive number")
    if not 0 < checked < math.inf:
        raise ValueError(f"{name}: expected a positive number, got {value!r}")
    return checked


def check_flag(value: object, name: str) -> bool:
    """Return a boolean; raise TypeError for anything but True and False."""
    if value is True or value is False:
        return value
    if not isinstance(value, np.bool_):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return bool(value)


def check_choice(value: object, name: str, choices: Iterable[str]) -> str:
    """Return a string that is one of ``choices``; raise TypeError or ValueError."""
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        error_class = ValueError if isinstance(value, str) else TypeError
        raise error_class(f"{name}: expected one of {choices}, got {value!r}")
    return value


def check_list(value: object, name: str, length: int, items: str) -> list[Any]:
    """Return a list or tuple of ``length`` items as a list; raise TypeError or ValueError.

    ``items`` is the description of the items in errors, in the plural.
    """
    expected = f"{name}: expected a list of {length} {items}, got"
    if not isinstance(value, list | tuple):
        raise TypeError(f"{expected} {type(value).__name__}")
    if len(value) != length:
        raise ValueError(f"{expected} {len(value)} of them")
    return list(value)


def check_distinct(variables: Sequence[Any], name: str) -> None:
    """Raise ValueError if a shared variable is given twice."""
    if len({id(variable) for variable in variables}) != len(variables):
        raise ValueError(f"{name}: a shared variable is given twice")


def check_name(value: object) -> None:
    """Raise TypeError if the argument ``name`` is neither a string nor None."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"name: expected a string, got {value!r}")


def describe(variable: Any) -> str:
    """Return a variable's name or, if it has none, its expression, for an error message."""
    return repr(variable.name) if getattr(variable, "name", None) else str(variable)


def import_package(module: str, requirement: str, extra: str) -> Any:
    """Import an optional package; raise ImportError if it is not installed.

    ``requirement`` is the beginning of the message, such as "HDF5 files need h5py", and ``extra`` the extra of
    Synkhronos that installs the package.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ImportError(f"{requirement}: pip install 'synkhronos[{extra}]'") from None


def list_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages that are installed, by name."""
    from importlib import metadata  # here, since it imports much of the standard library

    versions = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
