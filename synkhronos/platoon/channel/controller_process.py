"""Start of a controller's process, and the functions that run the user's file in it."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence

from synkhronos.compat import import_hooks
from synkhronos.ranks.child_process import make_python_path

#: Environment variable with the arguments of `Controller` as JSON, for scripts that parse no command line.
ARGUMENTS_VARIABLE = "SYNKHRONOS_PLATOON"
#: Environment variable with the `ExperimentHosts` of an experiment on several hosts, as JSON.
_HOSTS_VARIABLE = "SYNKHRONOS_PLATOON_HOSTS"


@dataclasses.dataclass(frozen=True)
class ExperimentHosts:
    """The hosts of an experiment, and the position of one controller's host among them."""

    #: Devices of each host, in the order of the workers' ranks.
    devices_by_host: dict[str, list[str]]
    #: The controller's file and arguments, the same on all hosts.
    controller_command: list[str]
    #: Position of this controller's host.
    index: int = 0
    #: Address of this controller; if empty, it chooses one.
    address: str = ""

    @classmethod
    def from_environment(cls) -> ExperimentHosts | None:
        """Return the hosts of this controller's experiment; None on one machine."""
        text = os.environ.get(_HOSTS_VARIABLE)
        return None if text is None else cls(**json.loads(text))

    def find_host_index(self, worker_rank: int) -> int:
        """Return the position of a worker's host among the hosts."""
        return [i for i, devices in enumerate(self.devices_by_host.values()) for _ in devices][worker_rank]


def start_controller(
    command: Sequence[str],
    output_path: str,
    controller_arguments: dict[str, object] | None,
    hosts: ExperimentHosts | None,
) -> subprocess.Popen[bytes]:
    """Start a controller, which ends with this process.

    The controller has its own session, so that a terminal sends Ctrl-C to this process only.  Its output goes to
    ``output_path`` with the suffixes ``.out`` and ``.err``.  ``controller_arguments`` are arguments of `Controller`,
    for the variable `ARGUMENTS_VARIABLE`; with None the controller inherits the variable of this process.
    """
    code = (
        "from synkhronos.ranks.child_process import exit_with_parent; "
        f"exit_with_parent({os.getpid()}, True); "
        "from synkhronos.platoon.channel import controller_process; controller_process.main()"
    )
    environment = {**os.environ, "PYTHONPATH": make_python_path()}
    if controller_arguments is not None:
        environment[ARGUMENTS_VARIABLE] = json.dumps(controller_arguments)
    environment.pop(_HOSTS_VARIABLE, None)
    if hosts is not None:
        environment[_HOSTS_VARIABLE] = json.dumps(dataclasses.asdict(hosts))
    with open(f"{output_path}.out", "wb") as out, open(f"{output_path}.err", "wb") as err:
        return subprocess.Popen(
            [sys.executable, "-u", "-c", code, *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            start_new_session=True,
        )


def run_user_file(file: str, arguments: Sequence[str]) -> None:
    """Run a file as the main script, with its folder first in ``sys.path``, and this package as ``platoon``."""
    import_hooks.override_platoon()
    path = os.path.abspath(file)
    sys.argv = [file, *arguments]
    sys.path.insert(0, os.path.dirname(path))
    runpy.run_path(path, run_name="__main__")


def main() -> None:
    """Run the controller's file that is the first argument."""
    # A controller runs its methods in further processes.  They are forks, so it need not be pickled.
    multiprocessing.set_start_method("fork")
    run_user_file(sys.argv[1], sys.argv[2:])
