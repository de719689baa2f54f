"""Import hooks that provide modules under the names of other libraries.

- `find_theano`: ``theano`` on PyTensor.  ``theano.a.b`` is the file ``theano/a/b.py`` of this package, or an entry of
  `RE_EXPORTS`.  Missing modules and names raise errors whose message names them.
- `find_platoon`: ``platoon``, the package ``synkhronos.platoon``.
- `find_theanompi`: ``theanompi``, the package ``synkhronos.theanompi``.  Modules other than its rules are imported from
  the user's copy of Theano-MPI.
- `find_shim`: old modules that scripts for Theano import, and that are missing today.
"""

from __future__ import annotations

import dis
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from synkhronos.compat.flags import format_unsupported_message, to_pytensor_flags
from synkhronos.compat.re_exports import RE_EXPORTS

_FOLDER = Path(__file__).parent
_THEANO_FOLDER = _FOLDER / "theano"
#: Files of modules that Lasagne 0.1 and Theano-MPI's models import, but that may be missing.  Theano 1.0 lacks two
#: modules of its earlier versions, setuptools 82 lacks pkg_resources, and hickle is rarely installed.
_SHIMS = {
    "hickle": _FOLDER / "shims" / "hickle.py",
    "pkg_resources": _FOLDER / "shims" / "pkg_resources.py",
    "theano.compat.python2x": _THEANO_FOLDER / "compat" / "python2x.py",
    "theano.tensor.signal.downsample": _THEANO_FOLDER / "tensor" / "signal" / "downsample.py",
}
_PLATOON = "synkhronos.platoon"
_IMPORT_FROM_OPCODE = dis.opmap["IMPORT_FROM"]
#: Function of a module's full name and its package's path that returns the module's spec, or None for other modules.
ImportHook = Callable[[str, Sequence[str] | None], importlib.machinery.ModuleSpec | None]


class HookFinder(importlib.abc.MetaPathFinder):
    """Finder that calls ``hook`` for the spec of a module."""

    def __init__(self, hook: ImportHook):
        self.hook = hook

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that the hook returns, or None for modules of other finders.

        The hook's error for a missing module is raised in an import, but not if `importlib.util.find_spec` asks.
        """
        try:
            return self.hook(fullname, path)
        except ModuleNotFoundError:
            caller = sys._getframe(1).f_back
            if caller is not None and caller.f_code is importlib.util.find_spec.__code__:
                return None
            raise


def is_hook_installed(hook: ImportHook) -> bool:
    """Whether the import system calls a hook."""
    return any(isinstance(finder, HookFinder) and finder.hook is hook for finder in sys.meta_path)


def install_hook(hook: ImportHook, is_last: bool = False) -> None:
    """Make the import system call a hook before all finders, or after them if ``is_last``, unless it already does."""
    if not is_hook_installed(hook):
        sys.meta_path.insert(len(sys.meta_path) if is_last else 0, HookFinder(hook))


def find_theano(fullname: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of the module ``theano`` on PyTensor, or of a module below it.  Set PyTensor's flags.

    Raise ModuleNotFoundError for a module that is not provided.
    """
    head, *parts = fullname.split(".")
    if head != "theano":
        return None
    if not parts:
        _check_pytensor_is_installed()
        _translate_theano_flags()
    location = _THEANO_FOLDER.joinpath(*parts)
    file = location / "__init__.py" if location.is_dir() else location.with_suffix(".py")
    if fullname in RE_EXPORTS:
        return importlib.machinery.ModuleSpec(fullname, _ReExportLoader(), is_package=True)
    if not file.exists():
        # The error has no `name`: ``from package import module`` swallows a ModuleNotFoundError with the module's name.
        raise ModuleNotFoundError(format_unsupported_message(fullname))
    # Every module is a package, so that Python calls this function for submodules that do not exist.
    locations = [str(location)] if location.is_dir() else []
    return importlib.util.spec_from_file_location(
        fullname, file, loader=_FileLoader(fullname, str(file)), submodule_search_locations=locations
    )


class _FileLoader(importlib.machinery.SourceFileLoader):
    """Loader of the modules that are files."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code."""
        super().exec_module(module)
        _add_missing_name_errors(module)


class _ReExportLoader(importlib.abc.InspectLoader):
    """Loader of the modules in `RE_EXPORTS`."""

    def get_source(self, fullname: str) -> str:
        """Return the module's docstring and statements."""
        return "\n".join([f'"""The module ``{fullname}``, on PyTensor."""', *RE_EXPORTS[fullname]])

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's statements."""
        super().exec_module(module)
        _add_missing_name_errors(module)


def _add_missing_name_errors(module: ModuleType) -> None:
    """Add a ``__getattr__`` to a module.  For a missing name it raises an error that refers to the documentation."""
    module_getattr: Callable[[str], Any] | None = module.__dict__.get("__getattr__")

    def get_name_or_raise(name: str) -> Any:
        if module_getattr is not None:
            try:
                return module_getattr(name)
            except AttributeError:
                pass
        text = format_unsupported_message(f"{module.__name__}.{name}")
        if name.startswith("__"):
            raise AttributeError(text)
        # In `from module import name`, Python replaces the message of an AttributeError.
        caller = sys._getframe(1)
        if caller.f_code.co_code[caller.f_lasti] == _IMPORT_FROM_OPCODE:
            raise ImportError(text, name=module.__name__)
        raise AttributeError(text, name=name, obj=module)

    module.__getattr__ = get_name_or_raise  # type: ignore[method-assign]


def find_theanompi(fullname: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of ``theanompi``.  Raise ModuleNotFoundError for modules below it that the user's copy lacks."""
    if fullname == "theanompi":
        return importlib.util.spec_from_file_location(fullname, _FOLDER.parent / "theanompi" / "__init__.py")
    if fullname.startswith("theanompi.") and importlib.machinery.PathFinder.find_spec(fullname, path) is None:
        raise ModuleNotFoundError(
            f"{fullname}: layers, models and data are those of your copy of Theano-MPI: put the folder in which "
            f"its folder theanompi lies into PYTHONPATH, or set pythonpath to that folder; searched in "
            f"{', '.join(map(str, path or ()))}",
            name=fullname,
        )
    return None


def find_shim(fullname: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module in `_SHIMS`."""
    file = _SHIMS.get(fullname)
    return None if file is None else importlib.util.spec_from_file_location(fullname, file)


def find_platoon(fullname: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of ``platoon`` or of a module below it; None if Platoon itself is installed.

    Raise ModuleNotFoundError for a module that this library's version does not have.
    """
    head = fullname.partition(".")[0]
    if head != "platoon":
        return None
    if fullname == head:
        installed = importlib.machinery.PathFinder.find_spec(fullname)
        if installed is not None and installed.origin is not None:  # a folder of this name has no origin
            return None
    elif sys.modules[head] is not sys.modules.get(_PLATOON):
        return None
    target_spec = importlib.util.find_spec(f"synkhronos.{fullname}")
    if target_spec is None:
        raise ModuleNotFoundError(
            f"{fullname}: Synkhronos's version of Platoon has no such module: the page docs/from_platoon.rst lists "
            "those that it has",
            name=fullname,
        )
    is_package = target_spec.submodule_search_locations is not None
    return importlib.machinery.ModuleSpec(fullname, _AliasLoader(), is_package=is_package)


def override_platoon() -> None:
    """Import ``synkhronos.platoon`` as ``platoon`` from now on, even if Platoon is installed."""
    sys.modules["platoon"] = importlib.import_module(_PLATOON)


class _AliasLoader(importlib.abc.Loader):
    """Loader of a module of this library under another name.  Other loaders would load the module twice."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the module of this library, to which both names refer."""
        module = importlib.import_module(f"synkhronos.{spec.name}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which Python has replaced.  `create_module` has run the module's code."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def _check_pytensor_is_installed() -> None:
    if importlib.util.find_spec("pytensor") is None:
        raise ModuleNotFoundError(
            "neither Theano nor PyTensor is installed; PyTensor takes Theano's place with "
            "`pip install synkhronos[pytensor]`",
            name="theano",
        )


def _translate_theano_flags() -> None:
    """Set PYTENSOR_FLAGS from THEANO_FLAGS, unless PyTensor has already been imported and has read its flags."""
    if "pytensor" not in sys.modules and "THEANO_FLAGS" in os.environ:
        flags = to_pytensor_flags(os.environ["THEANO_FLAGS"], os.environ.get("PYTENSOR_FLAGS", ""))
        os.environ["PYTENSOR_FLAGS"] = flags
