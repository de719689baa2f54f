"""Serves the name ``theanompi``: rules from this library, and layers, models and data from the user's Theano-MPI."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_SERVED = Path(__file__).parent / "theanompi"


def install() -> None:
    """Serve the name from now on, before an installed Theano-MPI."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


class Finder(importlib.abc.MetaPathFinder):
    """Finds ``theanompi`` here, and modules in it that are not here in the user's copy."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of the package or of a module in it."""
        if fullname == "theanompi":
            return importlib.util.spec_from_file_location(
                fullname, _SERVED / "__init__.py", submodule_search_locations=[str(_SERVED)]
            )
        if fullname.startswith("theanompi.") and importlib.machinery.PathFinder.find_spec(fullname, path) is None:
            raise ModuleNotFoundError(
                f"{fullname}: layers, models and data are those of your copy of Theano-MPI: put the folder in which "
                f"its folder theanompi lies into PYTHONPATH, or give that folder as the setting root; searched in "
                f"{', '.join(map(str, path or ()))}",
                name=fullname,
            )
        return None
