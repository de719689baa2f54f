"""The command line ``python -m synkhronos``, also installed as ``synkhronos``.

Besides its commands it runs a script written for Theano, on Theano or PyTensor: as ``python`` would, with
``import synkhronos.compat`` before the first line.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys

import synkhronos
from synkhronos.checks import format_similar

#: Commands: their argument, their description, and the module whose ``main(arguments)`` runs them.
_COMMANDS = {
    "train": (" SESSION", "train a class on all ranks, with the settings of a session file", "launcher.train"),
    "check": (" MODEL:CLASS", "list missing methods of a class, and train it for three steps", "launcher.check_model"),
    "show": (" RUN...", "draw the curves of recorded runs, or a timeline", "training.monitoring.show_command"),
    "doctor": ("", "list cores, GPUs and packages, and how to install missing ones", "launcher.doctor"),
    "platoon": (" NAME", "run a controller and workers written for Platoon", "platoon.launcher"),
}
_COMMAND_LINE = "python -m synkhronos"


def run_console_script() -> None:
    """Run the console script ``synkhronos``."""
    main(sys.argv[1:])


def main(arguments: list[str]) -> None:
    """Run a command, or a script written for Theano, with the arguments of the command line."""
    if arguments and arguments[0] in _COMMANDS:
        *_, module = _COMMANDS[arguments[0]]
        if status := importlib.import_module(f"synkhronos.{module}").main(arguments[1:]):
            sys.exit(status)
        return
    parser = _make_parser()
    if not arguments:
        parser.error("expected a command or a script; see --help")
    options = parser.parse_args(arguments)
    if not options.is_module and not os.path.exists(options.script):
        similar = format_similar(options.script, _COMMANDS)
        parser.error(f"{options.script!r} is neither a command nor a script{similar}; see --help")
    if options.is_module and importlib.util.find_spec(options.script.partition(".")[0]) is None:
        parser.error(f"there is no module {options.script!r}; see --help")
    if options.theano:
        os.environ["SYNKHRONOS_THEANO"] = options.theano

    import synkhronos.compat  # noqa: F401 - it reads the variable

    sys.argv = [options.script, *options.arguments]
    if options.is_module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        return
    # Like Python, find modules in the script's folder first.
    sys.path[0] = os.path.dirname(os.path.abspath(options.script))
    runpy.run_path(options.script, run_name="__main__")


def _make_parser() -> argparse.ArgumentParser:
    """Make the parser of the arguments of a script written for Theano, with the help on all commands."""
    usages = [f"{_COMMAND_LINE} {name}{argument}" for name, (argument, *_) in _COMMANDS.items()]
    commands = [f"  {name:9} {description}" for name, (_, description, _) in _COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog=_COMMAND_LINE,
        usage="\n       ".join([*usages, f"{_COMMAND_LINE} [--theano LIBRARY] [-m] SCRIPT [ARGUMENT...]"]),
        description="\n".join(
            [
                "Commands, each with its own --help:",
                *commands,
                "",
                "SCRIPT is a script written for Theano. It runs on PyTensor if Theano is not installed.",
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--theano",
        choices=("theano", "pytensor"),
        metavar="LIBRARY",
        help="theano or pytensor: the library that `import theano` imports; overrides SYNKHRONOS_THEANO",
    )
    parser.add_argument("--version", action="version", version=f"synkhronos {synkhronos.__version__}")
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="a file, or with -m a module")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="arguments of SCRIPT")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
