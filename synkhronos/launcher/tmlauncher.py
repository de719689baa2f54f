"""Theano-MPI's launcher ``tmlauncher``: its options as settings of this library."""

from __future__ import annotations

import argparse
import os
import sys

from synkhronos.launcher.configuration import theano_mpi_session
from synkhronos.launcher.configuration.resolve import resolve_settings
from synkhronos.launcher.configuration.settings import SettingsError, convert_to_settings_error, merge_tables
from synkhronos.launcher.configuration.sources import read_environment, read_session_file
from synkhronos.launcher.supervision.rank_output import open_standard_streams
from synkhronos.launcher.train import run_training

#: The options of tmlauncher by their flags: a key of session files, and a description of its values.
_OPTIONS = {
    ("-file", "--modelfile"): ("MODELFILE", "a file or a module"),
    ("-class", "--modelclass"): ("MODELCLASS", "a class in it"),
    ("-r", "--rule"): ("RULE", "an exchange rule, such as BSP, EASGD or GOSGD"),
    ("-s", "--size"): ("SIZE", "the number of ranks, without devices"),
    ("-bsp_sync_type",): ("BSP_SYNC_TYPE", "cdd, avg or swap"),
    ("-bsp_exch_strategy",): ("BSP_EXCH_STRATEGY", "nccl32, nccl16 or ar"),
}


def run_tmlauncher() -> None:
    """Run the console script ``tmlauncher``."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: list[str]) -> int:
    """Start a run as tmlauncher does.  Return the run's exit status, or 2 if a setting is wrong."""
    open_standard_streams()
    options = parse_options(arguments)
    config = options.pop("config", None)
    try:
        session_table = read_session_file(config) if config is not None else {}
        if "devices" not in session_table and os.environ.get("DEVICES"):
            options = {"DEVICES": os.environ["DEVICES"], **options}
        with convert_to_settings_error():
            option_table = theano_mpi_session.to_settings(options)
        sources = [merge_tables([option_table, session_table]), read_environment(os.environ)]
        command = [sys.executable, "-m", "synkhronos.launcher.tmlauncher", *arguments]
        return run_training(resolve_settings(sources, config), command)
    except SettingsError as error:
        sys.stderr.write(f"tmlauncher: {error}\n")
        return 2


def parse_options(arguments: list[str]) -> dict[str, str]:
    """Parse the command line.  Return the values of the options that are given, by keys of session files."""
    parser = argparse.ArgumentParser(
        prog="tmlauncher",
        description="Run a session file of Theano-MPI. Settings in the file override these options.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("-cfg", "--config", metavar="FILE", help="a session file")
    for flags, (key, description) in _OPTIONS.items():
        parser.add_argument(*flags, dest=key, metavar=key, help=description)
    parser.add_argument("-b", "-bind", dest="BIND", action="store_const", const="True", help="bind ranks to cores")
    if not arguments:
        parser.error("expected an option; see --help")
    return vars(parser.parse_args(arguments))


if __name__ == "__main__":
    run_tmlauncher()
