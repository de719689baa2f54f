"""The command ``train``: trains a model class on all ranks.

python -m synkhronos train SESSION
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys

from synkhronos.launcher.configuration.resolve import resolve_settings
from synkhronos.launcher.configuration.settings import Settings, SettingsError, merge_tables
from synkhronos.launcher.configuration.sources import parse_set_options, read_environment, read_session_file
from synkhronos.launcher.supervision.rank_output import open_standard_streams
from synkhronos.launcher.supervision.run_folder import create_and_lock_run_folder, describe_software
from synkhronos.launcher.supervision.supervisor import Supervisor

#: Options of the command line that are settings.
_SETTING_OPTIONS = ("ranks", "devices", "hosts", "folder", "bind", "resume", "restarts", "on_death")


def main(arguments: list[str]) -> int:
    """Run the command, and return the run's exit status, or 2 if a setting is wrong."""
    open_standard_streams()
    options = _make_parser().parse_args(arguments)
    flag_settings = {name: getattr(options, name) for name in _SETTING_OPTIONS if getattr(options, name) is not None}
    try:
        session_settings = {} if options.session is None else read_session_file(options.session)
        command_line_settings = merge_tables([parse_set_options(options.set), flag_settings])
        sources = [session_settings, read_environment(os.environ), command_line_settings]
        settings = resolve_settings(sources, options.session)
        if not options.dry_run:
            return run_training(settings, [sys.executable, "-m", "synkhronos", "train", *arguments])
    except SettingsError as error:
        sys.stderr.write(f"synkhronos train: {error}\n")
        return 2
    settings_and_versions = {**dataclasses.asdict(settings), **describe_software(settings.pythonpath)}
    sys.stdout.write(json.dumps(settings_and_versions, indent=1) + "\n")
    return 0


def run_training(settings: Settings, command: list[str]) -> int:
    """Run training with these settings, and return the exit status.  ``command`` is written into ``run.json``."""
    with create_and_lock_run_folder(settings, command):
        return Supervisor(settings).run()


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m synkhronos train",
        description="Train a class with the interface of Theano-MPI's models on all ranks. Settings on the "
        "command line override the environment, and these the session file.",
        epilog="Examples: python -m synkhronos train session.toml --resume; python -m synkhronos train --set "
        "model=models/mlp.py:MLP --ranks 2. The page docs/launcher.rst lists all settings.",
        allow_abbrev=False,
    )
    add_set_option(parser)
    parser.add_argument(
        "session",
        nargs="?",
        metavar="SESSION",
        help="a session file: TOML, or Theano-MPI's KEY=VALUE; default: all settings are given by --set",
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="number of ranks; default: one per GPU, or one per core without GPUs"
    )
    parser.add_argument(
        "--devices", metavar="NAMES", help="the device of each rank: cuda0,cuda1 or cpu,cpu; or cpu with --ranks N"
    )
    parser.add_argument(
        "--hosts",
        metavar="NAMES",
        help="machines, this one first: a,b or, with the number of ranks on b, a,b:3; or all, for the machines of the "
        "batch job",
    )
    parser.add_argument("--folder", metavar="PATH", help="folder of the run; default: a new one in runs/")
    parser.add_argument("--bind", action=argparse.BooleanOptionalAction, help="bind ranks to cores (default: on)")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="PATH",
        help="resume from the latest checkpoint in --folder, or from the one at PATH",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        metavar="N",
        help="after a failure, start the ranks again from the newest checkpoint, at most N times (default: 0)",
    )
    parser.add_argument(
        "--on-death",
        choices=("stop", "continue"),
        help="after the death of a process, stop (default), or start the ranks again from a checkpoint in memory, "
        "which is about a second old; at most max_deaths times (default: 100)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print all settings, and start nothing")
    return parser


def add_set_option(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--set KEY=VALUE``."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting; overrides the environment and the session file",
    )
