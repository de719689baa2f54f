"""Detection of user code that differs between the master and the workers.

A pickle contains the name of a class or function, which the worker imports.  A worker has the code of the time of the
fork.  The user may have edited code since, as by running a notebook's cell again or reloading a module.  The worker
then has an old version of it, or none.  Each name is therefore sent with a digest, as is each ``module.name`` in the
code.  What has another digest on a worker is sent by value: for graphs its whole module, for programs its code alone.

    master: UserCode.list_digests() --names, digests--> workers: find_outdated_names() --names--> send their code

The standard library and ``site-packages`` are not compared, since users don't edit them.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib
import itertools
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

_MISSING = object()
#: Type of functions that `functools.cache` has wrapped.
CACHED_FUNCTION_TYPE = type(functools.cache(len))
#: Attributes with the code that wrappers without ``__wrapped__`` call.
_WRAPPER_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    functools.cached_property: ("func",),
    functools.partial: ("func", "args", "keywords"),
    functools.partialmethod: ("func", "args", "keywords"),
    np.vectorize: ("pyfunc",),
}
_PACKAGE_FOLDER = Path(__file__).resolve().parent.parent
#: Class attributes that Python sets.
_GENERATED_ATTRIBUTES = frozenset(
    "__abstractmethods__ __dict__ __doc__ __firstlineno__ __module__ __slotnames__ __static_attributes__ __weakref__ "
    "_abc_impl".split()
)

#: Module and qualified name of a class or function.
QualifiedName = tuple[str, str]
#: Global variables, as ``("name",)``, and attributes of modules, as ``("module", "name")``.
_Paths = set[tuple[str, ...]]


class UserCode:
    """The user's classes and functions in a pickle, and their digests.

    Call `add` for each while pickling, then `update_digests`.  ``modules_by_value`` are pickled by value.
    ``covers_values`` is whether digests cover the values of global variables.
    """

    def __init__(self, modules_by_value: Collection[str] = (), covers_values: bool = True) -> None:
        self._modules_by_value = modules_by_value
        self._covers_values = covers_values
        self._by_name: dict[QualifiedName, Any] = {}
        self._by_value: list[Any] = []
        self._attributes: dict[QualifiedName, Any] = {}
        #: Namespace, name and value of each name that the code used at the last `update_digests`.
        self._used_bindings: list[tuple[Mapping[str, Any], str, Any]] = []
        self._digests: list[bytes] = []

    def add(self, value: Any, is_by_name: bool) -> None:
        """Record a class or function, or an Op that is made of a function, that was pickled by name, or by value."""
        if is_by_name:
            self._by_name[get_qualified_name(value)] = value
        else:
            self._by_value.append(value)

    def update_digests(self) -> None:
        """Compute the digests of the current code."""
        values = (*self._by_name.values(), *self._by_value)
        hashers = [_CodeHasher(value, self._covers_values) for value in values]
        self._digests = [hasher.digest() for hasher in hashers]
        self._used_bindings = [used for hasher in hashers for used in hasher.used_bindings]
        self._attributes = {
            name: value
            for hasher in hashers
            for name, value in hasher.used_attributes.items()
            if name[0] not in self._modules_by_value
        }

    def list_digests(self) -> tuple[tuple[QualifiedName, bytes], ...]:
        """Return the digest of each class and function that was pickled by name, and of each ``module.name``.

        A digest covers the user code that the class or function uses; see `_CodeHasher`.
        """
        attributes = tuple(
            (name, compute_digest(value, self._covers_values)) for name, value in self._attributes.items()
        )
        # `update_digests` puts the digests of these before those of code that was pickled by value.
        return (*zip(self._by_name, self._digests, strict=False), *attributes)

    def update_if_changed(self) -> bool:
        """Update the digests if a used binding has changed.  Return True if they differ."""
        # Each call of a function calls this.  Comparing identities takes a microsecond, digests take much longer.
        if all(namespace.get(name, _MISSING) is value for namespace, name, value in self._used_bindings):
            return False
        before = self._digests
        self.update_digests()
        return self._digests != before


def find_outdated_names(
    digests: Iterable[tuple[QualifiedName, bytes]], covers_values: bool = True
) -> tuple[QualifiedName, ...]:
    """Return the names of the code that is missing in this process, or has other digests."""
    outdated = []
    for (module, qualname), expected in digests:
        try:
            value: Any = importlib.import_module(module)
            for part in qualname.split("."):
                value = getattr(value, part)
            is_current = compute_digest(value, covers_values) == expected
        except Exception:  # a user's module may raise any exception when it is imported
            is_current = False
        if not is_current:
            outdated.append((module, qualname))
    return tuple(outdated)


def list_import_hook_modules() -> tuple[str, ...]:
    """Return the modules of this library whose finders are in `sys.meta_path`.

    The user's modules may need them: with `synkhronos.compat`, ``import theano`` imports PyTensor.  A worker that is a
    new process has none before it imports these modules.
    """
    modules = {type(finder).__module__ for finder in sys.meta_path}
    return tuple(sorted(module for module in modules if module.startswith("synkhronos.")))


def import_hook_modules(modules: Iterable[str]) -> None:
    """Import modules, which add their finders to `sys.meta_path`."""
    for module in modules:
        importlib.import_module(module)


def get_function_op_arguments(value: Any) -> tuple[Any, ...] | None:
    """Return the arguments of the constructor of an Op that ``wrap_py`` or ``as_op`` has made of a function.

    The first is the function.  Return None for other values.
    """
    if type(value).__name__ != "FromFunctionOp":
        return None
    attributes = vars(value)
    return tuple(
        attributes[name] for name in ("_FromFunctionOp__fn", "itypes", "otypes", "_FromFunctionOp__infer_shape")
    )


def get_qualified_name(value: Any) -> QualifiedName:
    """Return the name of a class or function, or of an Op that has replaced its function in a module."""
    if (arguments := get_function_op_arguments(value)) is not None:
        value = arguments[0]
    return value.__module__, value.__qualname__


def is_importable(value: Any) -> bool:
    """Whether a class or function, or an Op that is made of a function, can be imported by its module and name."""
    module, qualname = get_qualified_name(value)
    imported: Any = sys.modules.get(module)
    for part in qualname.split("."):
        imported = getattr(imported, part, None)
    return imported is value


@functools.cache
def is_user_module(module: str | None) -> bool:
    """Whether a module is the user's, so that it may be edited while the program runs."""
    if module in ("__main__", "__mp_main__"):
        return True
    if module is None or module.partition(".")[0] in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:  # the program has created the module object
        return module in sys.modules
    path = Path(file).resolve()
    if {"site-packages", "dist-packages"} & set(path.parts) or path.is_relative_to(_PACKAGE_FOLDER):
        return False
    # Packages may be installed elsewhere (`pip install --target`), and the graph library may be a source folder.
    package = module.split(".")
    folder = path.parents[len(package) - (path.name != "__init__.py")]
    return package[0] not in ("pytensor", "theano") and not any(folder.glob("*.dist-info"))


def compute_digest(value: object, covers_values: bool = True) -> bytes:
    """Return a digest of a user's class or function, including the user code that it uses."""
    return _CodeHasher(value, covers_values).digest()


class _CodeHasher:
    """Hash of a class or function with the user code that it uses, directly or through other user code.

    Code is used if a name refers to it, as global variable, default argument, closure or ``module.name``: a class, a
    function, a wrapper such as `functools.partial` or one with an attribute ``__wrapped__``, or the class of an object.
    Without ``covers_values``, global variables with other values are left out.

    Attributes
    ----------
    used_bindings : list
        Namespace, name and value of each name that this code uses.
    used_attributes : dict
        Value of each ``module.name`` in this code.
    """

    def __init__(self, value: object, covers_values: bool):
        self._covers_values = covers_values
        #: Namespace and name of variables that this code or functions of their module rebind, such as counters, and
        #: class and name of attributes.  They are state of a process: ranks may have other values.
        self._rebound: set[tuple[int, str]] = set()
        self._scanned_namespaces: set[int] = set()
        self._names_by_code: dict[types.CodeType, tuple[_Paths, _Paths]] = {}
        self._is_first_pass = True  # it finds `_rebound`
        self._add_all(value)
        self._is_first_pass = False
        self._add_all(value)

    def _add_all(self, value: object) -> None:
        self._hash = hashlib.sha256()
        self._seen: set[int] = set()
        self.used_bindings: list[tuple[Mapping[str, Any], str, Any]] = []
        self.used_attributes: dict[QualifiedName, Any] = {}
        self._add(value)

    def digest(self) -> bytes:
        """Return the SHA-256 digest of the value and of the code that it uses."""
        return self._hash.digest()

    def _add(self, value: object) -> None:
        """Add a value: a number, string, array, or code.

        Of other objects, such as caches and connections, only the class is added, since their state is not code.
        """
        update = self._hash.update
        if isinstance(value, type | types.FunctionType):
            update(f"{value.__module__}.{value.__qualname__}".encode())
            if is_user_module(value.__module__) and id(value) not in self._seen:
                self._seen.add(id(value))
                self._add_definition(value)
        elif isinstance(value, staticmethod | classmethod):
            self._add(value.__func__)
        elif isinstance(value, types.MethodType):
            self._add((value.__func__, value.__self__))
        elif isinstance(value, property):
            self._add((value.fget, value.fset, value.fdel))
        elif isinstance(value, types.ModuleType):
            update(value.__name__.encode())
        elif isinstance(value, types.CodeType):
            update(value.co_code)
            update(repr((value.co_names, value.co_varnames, value.co_freevars)).encode())
            for constant in value.co_consts:
                if isinstance(constant, types.CodeType):
                    self._add(constant)
                else:
                    update(_digest_constant(constant))
        elif isinstance(value, bool | int | float | complex | str | bytes | np.generic):
            update(repr(value).encode())
        elif isinstance(value, tuple):
            for part in value:
                self._add(part)
        elif isinstance(value, np.ndarray):
            if value.dtype.kind != "O" and not self._is_first_pass:
                update(f"{value.dtype} {value.shape}".encode())
                update(np.ascontiguousarray(value).tobytes())
        else:
            self._add(_list_wrapped(value))
            if is_user_module(type(value).__module__):
                self._add(type(value))

    def _add_definition(self, value: Any) -> None:
        """Add the code of a class or function, and the names that it uses."""
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
            kwdefaults = tuple((value.__kwdefaults__ or {}).items())
            self._add((value.__code__, value.__defaults__, kwdefaults, tuple(cells), vars(value).get("__wrapped__")))
            bindings = self._iterate_global_bindings(value)
        else:
            self._add(value.__bases__)
            attributes = vars(value)
            names = (name for name in sorted(attributes) if name not in _GENERATED_ATTRIBUTES)
            bindings = (
                (attributes, name, attributes[name]) for name in names if (id(value), name) not in self._rebound
            )
        for namespace, name, used in bindings:
            self.used_bindings.append((namespace, name, used))
            self._hash.update(name.encode())
            self._add(used)

    def _iterate_global_bindings(self, function: types.FunctionType) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
        """Yield namespace, name and value of each global variable, and ``module.name``, that a function uses."""
        code = function.__code__
        if code not in self._names_by_code:
            self._names_by_code[code] = _find_global_paths(code)
        loaded, stored = self._names_by_code[code]
        for path in stored:
            if (namespace := _find_namespace(function.__globals__, path)) is not None:
                self._rebound.add((id(namespace), path[-1]))
            elif len(path) == 2 and isinstance(rebound_class := function.__globals__.get(path[0]), type):
                self._rebound.add((id(rebound_class), path[1]))
        for path in sorted(loaded):
            namespace = _find_namespace(function.__globals__, path)
            if namespace is not None and id(namespace) not in self._scanned_namespaces:
                self._scanned_namespaces.add(id(namespace))
                self._rebound |= {(id(namespace), name) for name in _find_rebound_globals(namespace)}
            if namespace is not None and path[-1] in namespace and (id(namespace), path[-1]) not in self._rebound:
                value = namespace[path[-1]]
                is_code = isinstance(value, type | types.FunctionType) or _list_wrapped(value)
                if not (is_code or self._covers_values):
                    continue
                if len(path) > 1 and not isinstance(value, types.ModuleType):
                    self.used_attributes[namespace["__name__"], path[-1]] = value
                yield namespace, path[-1], value


def _list_wrapped(value: object) -> tuple[Any, ...]:
    """Return the code that a wrapper calls, with its other arguments.  Return an empty tuple for other values."""
    if attributes := _WRAPPER_ATTRIBUTES.get(type(value)):
        contents = (getattr(value, attribute) for attribute in attributes)
        return tuple(tuple(sorted(c.items())) if isinstance(c, dict) else c for c in contents)
    if (arguments := get_function_op_arguments(value)) is not None:
        function, itypes, otypes, infer_shape = arguments
        return function, repr((itypes, otypes)), infer_shape
    # Functions that Numba or JAX compiles have it.  Not `getattr`, since proxies have any attribute.
    wrapped = getattr(value, "__dict__", {}).get("__wrapped__")
    return () if wrapped is None else (wrapped,)


def _digest_constant(constant: object) -> bytes:
    """Return a digest of a constant of a code object, which is equal in processes with other hash seeds."""
    parts = [repr(constant).encode()]
    if isinstance(constant, tuple | frozenset):
        parts = [_digest_constant(part) for part in constant]
    if isinstance(constant, frozenset):  # its order depends on the hash seed
        parts.sort()
    return hashlib.sha256(b"".join([type(constant).__name__.encode(), *parts])).digest()


def _find_namespace(namespace: Mapping[str, Any], path: tuple[str, ...]) -> Mapping[str, Any] | None:
    """Return the namespace of the last name of a path such as ``("module", "name")``.

    Return None if the names before are not modules of the user.
    """
    for name in path[:-1]:
        module = namespace.get(name)
        if not isinstance(module, types.ModuleType) or not is_user_module(module.__name__):
            return None
        namespace = vars(module)
    return namespace


def _find_global_paths(code: types.CodeType) -> tuple[_Paths, _Paths]:
    """Return the global variables, as ``("name",)``, and their attributes that code loads, and those it rebinds.

    The code of nested functions is included.
    """
    loaded: _Paths = set()
    stored: _Paths = set()
    path: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    for step in itertools.chain.from_iterable(map(dis.get_instructions, _iterate_code_objects(code))):
        match step.opname:
            case "LOAD_GLOBAL":
                path = (step.argval,)
                loaded.add(path)
            case "LOAD_ATTR" | "LOAD_METHOD" if path:
                path = (*path, step.argval)
                loaded.add(path)
            case "STORE_GLOBAL":
                stored.add((step.argval,))
                path = ()
            case "STORE_ATTR" if path or copied:  # ``module.name += 1`` copies the module before it loads the name
                stored.add((*(path or copied), step.argval))
                path = copied = ()
            case "COPY":
                copied = path
            case "EXTENDED_ARG" | "CACHE" | "PUSH_NULL":
                pass
            case _:
                path = ()
    return loaded, stored


def _find_rebound_globals(namespace: Mapping[str, Any]) -> set[str]:
    """Return the names of a module's globals that its functions and methods rebind."""
    functions = [value for value in namespace.values() if isinstance(value, types.FunctionType)]
    for value in namespace.values():
        if isinstance(value, type) and value.__module__ == namespace.get("__name__"):
            functions += [method for method in vars(value).values() if isinstance(method, types.FunctionType)]
    store = dis.opmap["STORE_GLOBAL"]
    return {
        step.argval
        for function in functions
        if function.__globals__ is namespace
        for code in _iterate_code_objects(function.__code__)
        if store in code.co_code[::2]  # a quick check before the slow disassembly
        for step in dis.get_instructions(code)
        if step.opname == "STORE_GLOBAL"
    }


def _iterate_code_objects(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code object and those of its nested functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _iterate_code_objects(constant)
