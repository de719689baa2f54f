"""Runs a controller's or a worker's file as Python would, with ``import platoon`` served by this package."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from synkhronos.compat import hook

#: Environment variable with the arguments of `Controller` for programs that read no command line, as JSON.
LAUNCH = "SYNKHRONOS_PLATOON"
#: Environment variable with the `Hosts` of an experiment on several hosts, as JSON.
_HOSTS = "SYNKHRONOS_PLATOON_HOSTS"


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The hosts of an experiment, as the controller of one of them sees them.

    Attributes
    ----------
    devices : dict of str to list of str
        Devices of each host; workers are numbered host by host.
    controller : list of str
        The controller's file and arguments, the same on all hosts.
    index : int
        Position of this controller's host.
    address : str
        Address of this controller; empty for one of its own choice.
    """

    devices: dict[str, list[str]]
    controller: list[str]
    index: int = 0
    address: str = ""

    @classmethod
    def from_environment(cls) -> Hosts | None:
        """Return the hosts of this controller's experiment; None on one machine."""
        text = os.environ.get(_HOSTS)
        return None if text is None else cls(**json.loads(text))

    def host_of(self, worker: int) -> int:
        """Return the position of a worker's host."""
        return [i for i, devices in enumerate(self.devices.values()) for _ in devices][worker]


def start_controller(
    command: Sequence[str], log: str, launch: dict[str, object] | None, hosts: Hosts | None
) -> subprocess.Popen[bytes]:
    """Start a controller, which ends with this process, in a session of its own: Ctrl-C reaches this process alone.

    Parameters
    ----------
    command : list of str
        The controller's file and arguments.
    log : str
        Path of its output, without ``.out`` and ``.err``.
    launch : dict or None
        Arguments of `Controller`, for `LAUNCH`; None for those of this process.
    hosts : Hosts or None
    """
    code = (
        "from synkhronos.ranks.child_process import exit_with_parent; "
        f"exit_with_parent({os.getpid()}, True); from synkhronos.compat.platoon import program; program.main()"
    )
    package = str(Path(__file__).resolve().parents[3])  # children run this very library
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path}
    if launch is not None:
        environment[LAUNCH] = json.dumps(launch)
    environment.pop(_HOSTS, None)
    if hosts is not None:
        environment[_HOSTS] = json.dumps(dataclasses.asdict(hosts))
    with open(f"{log}.out", "wb") as out, open(f"{log}.err", "wb") as err:
        return subprocess.Popen(
            [sys.executable, "-u", "-c", code, *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            start_new_session=True,
        )


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
