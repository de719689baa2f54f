"""The command line: ``train``, ``check`` and ``doctor``.

`main`
    Runs one of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from synkhronos.launch.settings import Settings


def main(arguments: list[str]) -> int:
    """Run a command, whose name is the first argument.

    Returns its exit status: 0, 2 where the command itself is wrong, or that of the run.
    """
    # Not before: what a command needs is imported when it runs.
    from synkhronos.launch.settings import SettingsError
    from synkhronos.launch.supervisor import open_standard_streams

    open_standard_streams()
    options = _parser().parse_args(arguments)
    try:
        if options.command == "train":
            return _train(options, arguments)
        if options.command == "check":
            from synkhronos.launch.check import check

            return check(options.model, _sets(options))
        from synkhronos.launch.doctor import report

        sys.stdout.write(report())
        return 0
    except SettingsError as error:
        sys.stderr.write(f"synkhronos {options.command}: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m synkhronos")
    commands = parser.add_subparsers(dest="command", required=True)
    sets = argparse.ArgumentParser(add_help=False)
    sets.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting, before environment and file"
    )
    train = commands.add_parser("train", parents=[sets], help="train a class on all ranks", allow_abbrev=False)
    train.add_argument("session", nargs="?", help="a session file: TOML, or Theano-MPI's KEY=VALUE")
    train.add_argument("--ranks", type=int, metavar="N", help="how many; by default one for each GPU, or else core")
    train.add_argument(
        "--devices", help="one for each rank: cuda0,cuda1 or cpu,cpu; or cpu, with --ranks to say how many if not one"
    )
    train.add_argument(
        "--hosts", help="a,b:3: machines with ranks, this one first; all: those of the batch system's job"
    )
    train.add_argument("--folder", help="the run's; by default a new one in runs/")
    train.add_argument("--bind", action=argparse.BooleanOptionalAction, help="bind ranks to cores (as by default)")
    train.add_argument(
        "--resume", nargs="?", const="latest", metavar="PATH", help="go on from the latest checkpoint, or from a path"
    )
    train.add_argument("--dry-run", action="store_true", help="say what would run, and start nothing")
    check = commands.add_parser("check", parents=[sets], help="say what a class lacks, and run three iterations of it")
    check.add_argument("model", metavar="MODEL:CLASS", help="a file, or a module's name, and a class in it")
    commands.add_parser("doctor", help="say what this machine has, and what is missing for what")
    return parser


def _sets(options: argparse.Namespace) -> dict[str, Any]:
    from synkhronos.launch.settings import joined, parse_set

    return joined(map(parse_set, options.set))


def _train(options: argparse.Namespace, arguments: list[str]) -> int:
    from synkhronos.launch.settings import from_environment, joined, read, resolve
    from synkhronos.launch.supervisor import versions

    named = ("ranks", "devices", "hosts", "folder", "bind", "resume")
    given = {name: getattr(options, name) for name in named if getattr(options, name) is not None}
    sources = [joined([_sets(options), given]), from_environment(os.environ)]
    if options.session is not None:
        sources.append(read(options.session))
    settings = resolve(sources, options.session)
    if options.dry_run:
        shown = {**dataclasses.asdict(settings), **versions(settings.root)}
        sys.stdout.write(json.dumps(shown, indent=1) + "\n")
        return 0
    return start(settings, [sys.executable, "-m", "synkhronos", *arguments])


def start(settings: Settings, command: list[str]) -> int:
    """Run a session that ``command`` asks for; return its exit status."""
    from synkhronos.launch.supervisor import Supervisor, prepare

    with prepare(settings, command):
        return Supervisor(settings).run()
