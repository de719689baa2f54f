"""Run a program written for Theano as it is, on Theano or on PyTensor.

    python -m synkhronos script.py arguments...
    python -m synkhronos -m module arguments...

And draw what recorders have written:

    python -m synkhronos show RUN...

Train a class on all ranks, look whether it can be, and see what the machine has:

    python -m synkhronos train SESSION
    python -m synkhronos check MODEL:CLASS
    python -m synkhronos doctor

Run a controller and workers that were written for Platoon:

    python -m synkhronos platoon NAME

The program runs as if it were started by Python itself, with ``import synkhronos.compat`` before its first line.
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
       python -m synkhronos [--theano {theano,pytensor}] [-m] PROGRAM [ARGUMENT...]"""


def script() -> None:
    """Run what the command line says: the command ``synkhronos``."""
    main(sys.argv[1:])


def main(arguments: list[str]) -> None:
    """Run the program that the arguments name.

    Parameters
    ----------
    arguments : list of str
        Those of the command line, without the program's name.
    """
    if arguments[:1] == ["show"]:
        from synkhronos.training import show

        show.main(arguments[1:])
        return
    if arguments[:1] == ["platoon"]:
        from synkhronos.compat.platoon import launcher

        sys.exit(launcher.main(arguments[1:]))
    if arguments[:1] and arguments[0] in ("train", "check", "doctor"):
        from synkhronos.launch import command

        sys.exit(command.main(arguments))
    parser = argparse.ArgumentParser(
        prog="python -m synkhronos",
        usage=_USAGE,
        description="Train a class on all ranks (train), look whether it can be (check), draw what recorders have "
        "written (show), say what the machine has and what is missing (doctor), run Platoon's controllers and "
        "workers (platoon): each has a --help of its own. Or run a program written for Theano: where Theano is not "
        "installed, PyTensor takes its place.",
    )
    parser.add_argument(
        "--theano",
        choices=("theano", "pytensor"),
        help="which of them answers to `import theano`; also set by SYNKHRONOS_THEANO",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module's name")
    parser.add_argument("program", metavar="PROGRAM", help="a script, or with -m a module")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="the program's own")
    options = parser.parse_args(arguments)
    if not options.module and not os.path.exists(options.program):
        parser.error(f"there is neither a command nor a program {options.program!r}")
    if options.theano:
        os.environ["SYNKHRONOS_THEANO"] = options.theano

    import synkhronos.compat  # noqa: F401 - it reads the variable

    sys.argv = [options.program, *options.arguments]
    if options.module:
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
        return
    # As Python does: modules beside the script are found first.
    sys.path[0] = os.path.dirname(os.path.abspath(options.program))
    runpy.run_path(options.program, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
