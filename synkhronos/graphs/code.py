"""Is the user's own code on the workers what it is in the master?

`UserCode`
    The classes and functions of the user's in a pickle, and whether they have changed since.
`outdated`
    Which of them differ in this process, or are missing.

A pickle says of a class or function where it is to be imported from.  A worker has what was there at the fork: the old
version of a class that was edited since (a notebook's cell that ran again, a module that was reloaded), or none.  So a
digest goes with each name.  Where a worker's differs, the code itself is sent.

Only code that users edit is looked at: not Python's own, nor what is installed in ``site-packages``.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

_MISSING = object()
_PACKAGE = Path(__file__).resolve().parent.parent
#: What Python itself, and its libraries, write into classes.
_NOT_CODE = {
    "__abstractmethods__",
    "__dict__",
    "__doc__",
    "__firstlineno__",
    "__module__",
    "__slotnames__",
    "__static_attributes__",
    "__weakref__",
    "_abc_impl",
}

#: A class or function by the module that it is in and its name there.
Name = tuple[str, str]


class UserCode:
    """The classes and functions of the user's in a pickle."""

    def __init__(self) -> None:
        self._named: dict[Name, Any] = {}
        self._whole: list[Any] = []
        self._bound: list[tuple[Mapping[str, Any], str, Any]] = []
        self._digests: list[bytes] = []

    def add(self, value: Any, by_name: bool) -> None:
        """Note a class or function, of which only the name is in the pickle or all."""
        if by_name:
            self._named[value.__module__, value.__qualname__] = value
        else:
            self._whole.append(value)

    def describe(self) -> None:
        """Note what all of them are now."""
        values = [*self._named.values(), *self._whole]
        self._digests = [digest(value) for value in values]
        self._bound = [one for value in values for one in _bindings(value, set())]

    def expected(self) -> tuple[tuple[Name, bytes], ...]:
        """Return what has to be found under each name: a digest of it, and of all of the user's that it uses."""
        return tuple(zip(self._named, self._digests, strict=False))

    def has_changed(self) -> bool:
        """Whether any of them is another now than it was when `describe` was called last."""
        # At each call: so first whether any name stands for another object, which takes a microsecond.
        if all(names.get(name, _MISSING) is value for names, name, value in self._bound):
            return False
        before = self._digests
        self.describe()
        return self._digests != before


def outdated(digests: Iterable[tuple[Name, bytes]]) -> tuple[str, ...]:
    """Return the modules whose code differs in this process from what these digests say, or is missing."""
    modules = set()
    for (module, qualname), expected in digests:
        try:
            value: Any = importlib.import_module(module)
            for part in qualname.split("."):
                value = getattr(value, part)
            same = digest(value) == expected
        except Exception:  # whatever a module of the user's raises when it is imported
            same = False
        if not same:
            modules.add(module)
    return tuple(sorted(modules))


def is_importable(value: Any) -> bool:
    """Whether a class or function is what its module has under its name."""
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


@functools.cache
def is_the_users(module: str | None) -> bool:
    """Whether a module is the user's own: one that may be edited while the program runs."""
    if module in ("__main__", "__mp_main__"):
        return True
    if module is None or module.partition(".")[0] in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:  # made by hand
        return module in sys.modules
    path = Path(file).resolve()
    if {"site-packages", "dist-packages"} & set(path.parts) or path.is_relative_to(_PACKAGE):
        return False
    # Packages may lie elsewhere too (`pip install --target`), and the graph library in a folder of sources.
    package = module.split(".")
    folder = path.parents[len(package) - (path.name != "__init__.py")]
    return package[0] not in ("pytensor", "theano") and not any(folder.glob("*.dist-info"))


def digest(value: Any) -> bytes:
    """Return a digest of what a class or function of the user's does."""
    made = hashlib.sha256()
    _digest(value, made.update, set())
    return made.digest()


def _digest(value: Any, update: Callable[[bytes], None], seen: set[int]) -> None:
    """Feed what a value is to a hash: code and all that it uses, numbers, strings, arrays.

    Other objects are left out: what they hold at a time, a cache or a connection, is no code.
    """
    if isinstance(value, type | types.FunctionType):
        update(f"{value.__module__}.{value.__qualname__}".encode())
        if not is_the_users(value.__module__) or id(value) in seen:
            return
        seen.add(id(value))
        parts: list[Any]
        if isinstance(value, types.FunctionType):
            _digest_code(value.__code__, update)
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
            parts = [value.__defaults__, tuple((value.__kwdefaults__ or {}).items()), tuple(cells)]
        else:
            parts = [value.__bases__]
        for part in parts:
            _digest(part, update, seen)
        for _, name, used in _names(value):
            update(name.encode())
            _digest(used, update, seen)
    elif isinstance(value, staticmethod | classmethod):
        _digest(value.__func__, update, seen)
    elif isinstance(value, property):
        for accessor in (value.fget, value.fset, value.fdel):
            _digest(accessor, update, seen)
    elif isinstance(value, types.ModuleType):
        update(value.__name__.encode())
    elif isinstance(value, types.CodeType):
        _digest_code(value, update)
    elif isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        update(repr(value).encode())
    elif isinstance(value, tuple):
        for part in value:
            _digest(part, update, seen)
    elif isinstance(value, np.ndarray) and value.dtype.kind != "O":
        update(f"{value.dtype} {value.shape}".encode())
        update(np.ascontiguousarray(value).tobytes())


def _digest_code(code: types.CodeType, update: Callable[[bytes], None]) -> None:
    update(code.co_code)
    update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _digest_code(constant, update)
        else:
            update(repr(constant).encode())


def _names(value: Any) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
    """Yield the names that the code of a class or function uses: where they are bound, and to what."""
    if isinstance(value, type):
        names = vars(value)
        yield from ((names, name, names[name]) for name in sorted(names) if name not in _NOT_CODE)
        return
    names = value.__globals__
    used = {name for code in _codes(value.__code__) for name in _globals(code, "LOAD_GLOBAL")}
    # What the module's code changes itself, such as a counter, is each rank's own business.
    yield from ((names, name, names[name]) for name in sorted(used - _written(names)) if name in names)


def _written(names: Mapping[str, Any]) -> set[str]:
    """Return the names of a module that its own functions and methods bind anew."""
    functions = [value for value in names.values() if isinstance(value, types.FunctionType)]
    for value in names.values():
        if isinstance(value, type) and value.__module__ == names.get("__name__"):
            functions += [method for method in vars(value).values() if isinstance(method, types.FunctionType)]
    return {
        name
        for function in functions
        if function.__globals__ is names
        for code in _codes(function.__code__)
        for name in _globals(code, "STORE_GLOBAL")
    }


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code, and that of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _globals(code: types.CodeType, instruction: str) -> Iterator[str]:
    """Yield the names of the module that an instruction of the code loads, or stores."""
    if dis.opmap[instruction] in code.co_code[::2]:  # quick, where there is none
        yield from (found.argval for found in dis.get_instructions(code) if found.opname == instruction)


def _bindings(value: Any, seen: set[int]) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
    """Yield all names that a class or function uses, and those that the user's code uses that it calls."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        for part in (value.fget, value.fset, value.fdel):
            yield from _bindings(part, seen)
    if not isinstance(value, type | types.FunctionType) or not is_the_users(value.__module__) or id(value) in seen:
        return
    seen.add(id(value))
    for names, name, used in _names(value):
        yield names, name, used
        yield from _bindings(used, seen)
    for base in getattr(value, "__bases__", ()):
        yield from _bindings(base, seen)
