"""The command line ``python -m synkhronos``, also installed as ``synkhronos``.

Commands:

    python -m synkhronos train SESSION        train a class on all ranks
    python -m synkhronos check MODEL:CLASS    check a class, and run three iterations of it
    python -m synkhronos show RUN...          draw recorded runs and timelines
    python -m synkhronos doctor               list cores, GPUs and packages, and how to install missing ones
    python -m synkhronos platoon NAME         run a controller and workers written for Platoon

A program written for Theano runs on Theano or PyTensor:

    python -m synkhronos script.py arguments...
    python -m synkhronos -m module arguments...

It runs as by ``python``, with ``import synkhronos.compat`` before its first line.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys

_USAGE = """python -m synkhronos train SESSION
       python -m synkhronos check MODEL:CLASS
       python -m synkhronos show RUN...
       python -m synkhronos doctor
       python -m synkhronos platoon NAME
       python -m synkhronos [--theano LIBRARY] [-m] PROGRAM [ARGUMENT...]"""
_DESCRIPTION = """Commands, each with its own --help:
  train     train a class on all ranks, with the settings of a session file
  check     list missing methods of a class, and train it for three steps
  show      draw the curves of recorded runs, or a timeline
  doctor    list cores, GPUs and packages, and how to install missing ones
  platoon   run a controller and workers written for Platoon

PROGRAM is a program written for Theano. It runs on PyTensor if Theano is not
installed."""


def script() -> None:
    """Run the console script ``synkhronos``."""
    main(sys.argv[1:])


def main(arguments: list[str]) -> None:
    """Run a command, or a program written for Theano.

    Parameters
    ----------
    arguments : list of str
        Arguments of the command line, without the program's name.
    """
    if arguments[:1] == ["show"]:
        from synkhronos.training import show

        show.main(arguments[1:])
        return
    if arguments[:1] == ["platoon"]:
        from synkhronos.compat.platoon import launcher

        sys.exit(launcher.main(arguments[1:]))
    if arguments[:1] and arguments[0] in ("train", "check", "doctor"):
        from synkhronos.launch import cli

        sys.exit(cli.main(arguments))
    parser = argparse.ArgumentParser(
        prog="python -m synkhronos",
        usage=_USAGE,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--theano",
        choices=("theano", "pytensor"),
        metavar="LIBRARY",
        help="theano or pytensor: the library that `import theano` imports; overrides SYNKHRONOS_THEANO",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is the name of a module")
    parser.add_argument("program", metavar="PROGRAM", help="a script, or with -m a module")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="arguments of PROGRAM")
    if not arguments:
        parser.error("expected a command or a program; see --help")
    options = parser.parse_args(arguments)
    if not options.module and not os.path.exists(options.program):
        parser.error(f"{options.program!r} is neither a command nor a program; see --help")
    if options.theano:
        os.environ["SYNKHRONOS_THEANO"] = options.theano

    import synkhronos.compat  # noqa: F401 - it reads the variable

    sys.argv = [options.program, *options.arguments]
    if options.module:
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
        return
    # Like Python, find modules in the script's folder first.
    sys.path[0] = os.path.dirname(os.path.abspath(options.program))
    runpy.run_path(options.program, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
