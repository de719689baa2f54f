"""What Theano 1.0.5 itself needs: a BLAS, scans without C code, and cuDNN's functions where there is no cuDNN."""

from __future__ import annotations

import configparser
import importlib.abc
import importlib.machinery
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

from synkhronos.compat import cudnn, sync

#: What is changed in a module of Theano's after it has been loaded.
_CHANGES = {
    "theano.compile.sharedvalue": lambda module: sync.install(module.Container, module.SharedVariable),
    "theano.gpuarray.dnn": cudnn.fall_back,
}


class Changer(importlib.abc.MetaPathFinder):
    """Finds the modules that are changed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a module's own spec, with a loader that changes the module."""
        if fullname not in _CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module, and changes it."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code, then make the change."""
        super().exec_module(module)
        _CHANGES[self.name](module)


def install() -> None:
    """Name a BLAS in THEANO_FLAGS, if need be, which Theano reads as it is imported; say that scans have no C."""
    if not any(isinstance(finder, Changer) for finder in sys.meta_path):
        sys.meta_path.insert(0, Changer())
        for name, change in _CHANGES.items():
            if name in sys.modules:
                change(sys.modules[name])
    # Theano's C code around a scan's steps was made by a Cython that knew no Python 3.11, and does not compile.  Where
    # its module can't be imported, Theano has Python code in its place.
    sys.modules["theano.scan_module.scan_perform_ext"] = None  # type: ignore[assignment]
    if "theano" not in sys.modules and not _blas_is_named() and not _theano_finds_blas():
        flags = os.environ.get("THEANO_FLAGS", "")
        os.environ["THEANO_FLAGS"] = f"{flags},blas.ldflags={usable_blas()}".lstrip(",")


def usable_blas() -> str:
    """Return the linker's flags for a BLAS that this machine can link: OpenBLAS, or none.

    Without one Theano computes products of matrices by NumPy's.

    Examples
    --------
    >>> usable_blas() in ("-lopenblas", "")
    True
    """
    try:
        # GCC prints the whole path of a library that it would link, and the bare name of one that it doesn't find.
        found = subprocess.run(
            ["g++", "-print-file-name=libopenblas.so"], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
    return "-lopenblas" if os.path.isabs(found) else ""


def _blas_is_named() -> bool:
    """Whether THEANO_FLAGS or a .theanorc file sets blas.ldflags; they are read as Theano reads them."""
    flags = os.environ.get("THEANO_FLAGS", "").split(",")
    if any(flag.split("=")[0].strip() == "blas.ldflags" for flag in flags):
        return True
    files = [os.path.expanduser(name) for name in os.environ.get("THEANORC", "~/.theanorc").split(os.pathsep)]
    parser = configparser.RawConfigParser()
    try:
        parser.read(files)
    except configparser.Error:
        return False  # Theano itself will say what is wrong with the file
    return parser.has_option("blas", "ldflags")


def _theano_finds_blas() -> bool:
    """Whether Theano's own search works, which reads what NumPy was built with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            import numpy.distutils.__config__ as built  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            return False
    return hasattr(built, "blas_opt_info")
