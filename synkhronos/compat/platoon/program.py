"""Runs a controller's or a worker's file as Python would, with ``import platoon`` served by this package."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Sequence

from synkhronos.compat import hook

#: Environment variable with the arguments of `Controller` for programs that read no command line, as JSON.
LAUNCH = "SYNKHRONOS_PLATOON"


def run_file(file: str, arguments: Sequence[str]) -> None:
    """Run a file as the main program.

    Parameters
    ----------
    file : str
        Path of the file; modules beside it are found first.
    arguments : list of str
        The program's arguments.
    """
    hook.serve_alias("platoon", always=True)
    path = os.path.abspath(file)
    sys.argv = [file, *arguments]
    sys.path.insert(0, os.path.dirname(path))
    runpy.run_path(path, run_name="__main__")


def main() -> None:
    """Run a controller's file, which the first argument names."""
    # Controllers start methods of their own as processes; a controller can't be pickled for any other way.
    multiprocessing.set_start_method("fork")
    run_file(sys.argv[1], sys.argv[2:])
