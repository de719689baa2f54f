"""Which modules do Lasagne 0.1 and other programs of its time import, that newer packages no longer have?

`install`
    Puts the finder last in ``sys.meta_path``, where it is asked only for what is nowhere else.
`GapFinder`
    Finds ``theano.tensor.signal.downsample`` and ``theano.compat.python2x``, which Theano 1.0 lacks, and
    ``pkg_resources``, which setuptools 82 lacks.
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
    "pkg_resources": _HERE / "lost" / "pkg_resources.py",
    "theano.compat.python2x": _HERE / "tree" / "compat" / "python2x.py",
    "theano.tensor.signal.downsample": _HERE / "tree" / "tensor" / "signal" / "downsample.py",
}


def install() -> None:
    """Give the modules back from now on."""
    if not any(isinstance(finder, GapFinder) for finder in sys.meta_path):
        sys.meta_path.append(GapFinder())


class GapFinder(importlib.abc.MetaPathFinder):
    """Finds the modules beside this file."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of one of them."""
        file = _MODULES.get(fullname)
        return None if file is None else importlib.util.spec_from_file_location(fullname, file)
