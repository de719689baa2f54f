"""The commands ``train``, ``check`` and ``doctor`` of ``python -m synkhronos``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from synkhronos.launch.configuration.settings import Settings


def main(arguments: list[str]) -> int:
    """Run the command that the first argument names.

    Returns
    -------
    int
        The exit status: 0, 2 if an argument or setting is wrong, or that of the run.
    """
    # Imported here, so that a command imports only the modules that it needs.
    from synkhronos.launch.configuration.settings import SettingsError
    from synkhronos.launch.supervision.process_environment import open_standard_streams

    open_standard_streams()
    options = _make_parser().parse_args(arguments)
    try:
        if options.command == "train":
            return _train(options, arguments)
        if options.command == "check":
            from synkhronos.launch.check_model import check_class

            return check_class(options.model, _parse_set_options(options))
        from synkhronos.launch.doctor import make_report

        sys.stdout.write(make_report())
        return 0
    except SettingsError as error:
        sys.stderr.write(f"synkhronos {options.command}: {error}\n")
        return 2


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m synkhronos")
    commands = parser.add_subparsers(dest="command", required=True)
    sets = argparse.ArgumentParser(add_help=False)
    sets.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting; overrides the environment and the session file",
    )
    train = commands.add_parser(
        "train",
        parents=[sets],
        help="train a class on all ranks",
        description="Train a class with the interface of Theano-MPI's models on all ranks. Settings are read from the "
        "session file, the environment and the command line. The last one wins.",
        epilog="Example: python -m synkhronos train --set model=models/mlp.py:MLP --ranks 2",
        allow_abbrev=False,
    )
    train.add_argument(
        "session",
        nargs="?",
        metavar="SESSION",
        help="a session file: TOML, or Theano-MPI's KEY=VALUE; default: all settings are given by --set",
    )
    train.add_argument(
        "--ranks", type=int, metavar="N", help="number of ranks; default: one per GPU, or one per core without GPUs"
    )
    train.add_argument("--devices", help="the device of each rank: cuda0,cuda1 or cpu,cpu; or cpu with --ranks N")
    train.add_argument(
        "--hosts",
        help="machines, this one first: a,b or, with the number of ranks on b, a,b:3; or all, for the machines of the "
        "batch job",
    )
    train.add_argument("--folder", help="folder of the run; default: a new one in runs/")
    train.add_argument("--bind", action=argparse.BooleanOptionalAction, help="bind ranks to cores (default: on)")
    train.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="PATH",
        help="resume from the latest checkpoint in --folder, or from the one at PATH",
    )
    train.add_argument(
        "--restarts",
        type=int,
        metavar="N",
        help="after a failure, start the ranks again from the newest checkpoint, at most N times (default: 0)",
    )
    train.add_argument(
        "--on-death",
        choices=("stop", "continue"),
        help="after the death of a process, stop (default), or start the ranks again from a copy in memory, which is "
        "about a second old; at most max_deaths times (default: 100)",
    )
    train.add_argument("--dry-run", action="store_true", help="print all settings, and start nothing")
    check = commands.add_parser(
        "check",
        parents=[sets],
        help="list what a class lacks, and run three iterations of it",
        description="List the methods and attributes that a class lacks for `train`. If it has all of them, run three "
        "iterations as one rank, then as two, in this process, and report problems.",
        epilog="Example: python -m synkhronos check models/mlp.py:MLP",
    )
    check.add_argument("model", metavar="MODEL:CLASS", help="a file or a module, and a class in it")
    doctor = "list what this machine has, and how to install what is missing"
    commands.add_parser("doctor", help=doctor, description=f"{doctor.capitalize()}.")
    return parser


def _parse_set_options(options: argparse.Namespace) -> dict[str, Any]:
    from synkhronos.launch.configuration.sources import merge_tables, parse_set_option

    return merge_tables(map(parse_set_option, options.set))


def _train(options: argparse.Namespace, arguments: list[str]) -> int:
    from synkhronos.launch.configuration.resolve import resolve_settings
    from synkhronos.launch.configuration.sources import merge_tables, read_environment, read_session_file
    from synkhronos.launch.supervision.run_folder import find_versions

    named = ("ranks", "devices", "hosts", "folder", "bind", "resume", "restarts", "on_death")
    options_given = {name: getattr(options, name) for name in named if getattr(options, name) is not None}
    sources = [merge_tables([_parse_set_options(options), options_given]), read_environment(os.environ)]
    if options.session is not None:
        sources.append(read_session_file(options.session))
    settings = resolve_settings(sources, options.session)
    if options.dry_run:
        printed = {**dataclasses.asdict(settings), **find_versions(settings.pythonpath)}
        sys.stdout.write(json.dumps(printed, indent=1) + "\n")
        return 0
    return run_training(settings, [sys.executable, "-m", "synkhronos", *arguments])


def run_training(settings: Settings, command: list[str]) -> int:
    """Run the training that the settings describe, and return its exit status.

    ``command`` is recorded in ``run.json``.
    """
    from synkhronos.launch.supervision.run_folder import create_run_folder
    from synkhronos.launch.supervision.supervisor import Supervisor

    with create_run_folder(settings, command):
        return Supervisor(settings).run()
