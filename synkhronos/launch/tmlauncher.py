"""Theano-MPI's launcher ``tmlauncher``: its options as settings of this library."""

from __future__ import annotations

import os
import sys

from synkhronos.launch import cli
from synkhronos.launch.configuration import theano_mpi_session
from synkhronos.launch.configuration.resolve import resolve_settings
from synkhronos.launch.configuration.settings import SettingsError
from synkhronos.launch.configuration.sources import merge_tables, read_environment, read_session_file
from synkhronos.launch.supervision.process_environment import open_standard_streams

#: The options of tmlauncher, and the keys for which they stand.
_OPTIONS = {
    **dict.fromkeys(("-cfg", "--config"), "config"),
    **dict.fromkeys(("-file", "--modelfile"), "MODELFILE"),
    **dict.fromkeys(("-class", "--modelclass"), "MODELCLASS"),
    **dict.fromkeys(("-r", "--rule"), "RULE"),
    **dict.fromkeys(("-s", "--size"), "SIZE"),
    "-bsp_sync_type": "BSP_SYNC_TYPE",
    "-bsp_exch_strategy": "BSP_EXCH_STRATEGY",
}
_USAGE = """usage: tmlauncher [-cfg=FILE] [-file=MODELFILE] [-class=MODELCLASS] [-r=RULE] [-s=SIZE]
                  [-bsp_sync_type=cdd|avg|swap] [-bsp_exch_strategy=nccl32|nccl16|ar] [-b]

Runs a session file of Theano-MPI; settings in the file override these options.
"""


def script() -> None:
    """Run the console script ``tmlauncher``."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: list[str]) -> int:
    """Start a run as tmlauncher does; return the exit status: that of the run, or 2 if an option is wrong."""
    open_standard_streams()
    if not arguments or set(arguments) & {"-h", "--help"}:
        (sys.stdout if arguments else sys.stderr).write(_USAGE)
        return 0 if arguments else 2
    try:
        options, config = parse_options(arguments)
        file = read_session_file(config) if config is not None else {}
        if "devices" not in file and os.environ.get("DEVICES"):
            options = {"DEVICES": os.environ["DEVICES"], **options}
        sources = [read_environment(os.environ), merge_tables([theano_mpi_session.to_settings(options), file])]
        command = [sys.executable, "-m", "synkhronos.launch.tmlauncher", *arguments]
        return cli.run_training(resolve_settings(sources, config), command)
    except (SettingsError, ValueError) as error:
        sys.stderr.write(f"tmlauncher: {error}\n")
        return 2


def parse_options(arguments: list[str]) -> tuple[dict[str, str | list[str]], str | None]:
    """Return the assignments for which options of the command line stand, and the session file's path.

    Raises
    ------
    ValueError
        If an option is unknown, or has no value.
    """
    assignments: dict[str, str | list[str]] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if argument in ("-b", "-bind"):
            assignments["BIND"] = "True"
        elif name not in _OPTIONS or not equals:
            raise ValueError(f"unknown option {argument}\n{_USAGE}")
        else:
            assignments[_OPTIONS[name]] = value
    config = assignments.pop("config", None)
    return assignments, None if config is None else str(config)


if __name__ == "__main__":
    script()
