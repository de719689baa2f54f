"""Stand-ins for modules that Lasagne 0.1, Theano-MPI's models and other programs of their time import.

Theano 1.0 lacks ``theano.tensor.signal.downsample`` and ``theano.compat.python2x``, setuptools 82 lacks
``pkg_resources``, and ``hickle`` is often not installed.  The finder is the last in ``sys.meta_path``, so that it is
asked only for modules that no other finder has.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).parent
_MODULES = {
    "hickle": _HERE / "lost" / "hickle.py",
    "pkg_resources": _HERE / "lost" / "pkg_resources.py",
    "theano.compat.python2x": _HERE / "tree" / "compat" / "python2x.py",
    "theano.tensor.signal.downsample": _HERE / "tree" / "tensor" / "signal" / "downsample.py",
}


def install() -> None:
    """Provide these modules from now on."""
    if not any(isinstance(finder, GapFinder) for finder in sys.meta_path):
        sys.meta_path.append(GapFinder())


class GapFinder(importlib.abc.MetaPathFinder):
    """Finder of the stand-ins."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a stand-in; None for any other module."""
        file = _MODULES.get(fullname)
        return None if file is None else importlib.util.spec_from_file_location(fullname, file)
