"""The command line: ``synkhronos platoon NAME``, and ``platoon-launcher NAME``."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from synkhronos.hosts.host_list import is_this_machine, parse_hosts
from synkhronos.platoon import configparser
from synkhronos.platoon.channel.controller_process import ExperimentHosts, start_controller
from synkhronos.ranks.errors import describe_exit

#: Exit status if the controller or a worker failed.
EXIT_PROCESS_FAILED = 1
#: Exit status for wrong arguments.
EXIT_WRONG_ARGUMENTS = 2
#: Exit status if a process could not be started or was killed, or the experiment was interrupted.
EXIT_EXPERIMENT_ABORTED = 3
#: Seconds that the controller has to end the workers after Ctrl-C.
_GRACE_SECONDS = 10.0
#: Maximal bytes of the controller's errors that are printed.
_MAX_PRINTED_NBYTES = 8000


def run_platoon_launcher() -> None:
    """Run the command ``platoon-launcher``."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Start a controller and its workers, wait for them, and return the exit status.

    It is 0 if the controller and all workers exited with 0, 1 if one of them failed, and 2 for wrong arguments.  It is
    3 if a process could not be started or was killed, or the experiment was interrupted.
    """
    options = _make_parser().parse_args(arguments)
    name = options.experiment_name
    _print_line(f"### Launching experiment: {name}")
    if not Path(f"{name}_worker.py").is_file():
        return _fail(f"there is no {name}_worker.py in {os.getcwd()}", EXIT_WRONG_ARGUMENTS)
    hostname = socket.gethostname()
    hosts = options.hosts or ([] if options.devices else _read_hosts())
    if hosts and not is_this_machine(hosts[0]):
        return _fail(
            f"hosts: the first has to be this machine, {hostname}, got {', '.join(hosts)}", EXIT_WRONG_ARGUMENTS
        )
    try:
        devices_by_host = _read_devices_by_host(hosts) if len(hosts) > 1 else None
    except ValueError as error:
        return _fail(str(error), EXIT_WRONG_ARGUMENTS)
    try:
        folder = _make_log_folder(name)
        process = _start_controller(options, folder, devices_by_host)
    except OSError as error:
        return _fail(str(error), EXIT_EXPERIMENT_ABORTED)
    _print_line(f"### Logs folder: {folder}\n### Waiting for the experiment to finish ...")
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        return _fail("interrupted", EXIT_EXPERIMENT_ABORTED)
    if status == 0:
        _print_line("SUCCESS! The experiment has finished.")
        return 0
    errors = (folder / "controller_cpu.err").read_bytes()[-_MAX_PRINTED_NBYTES:].decode(errors="replace")
    if status < 0:
        return _fail(f"{errors}the controller {describe_exit(status)}", EXIT_EXPERIMENT_ABORTED)
    return _fail(f"{errors}the controller exited with status {status}; see {folder}", EXIT_PROCESS_FAILED)


def _start_controller(
    options: argparse.Namespace, folder: Path, devices_by_host: dict[str, list[str]] | None
) -> subprocess.Popen[bytes]:
    """Start the controller of this host: the user's file, if it exists, or else the default one."""
    name, devices = options.experiment_name, options.devices or []
    arguments = [name, str(folder), "--multi" if devices_by_host else "--single"]
    arguments += ["-D", *devices] if devices else []
    arguments += shlex.split(options.controller_args or "")
    if options.worker_args:
        arguments.append(f"-w={options.worker_args}")
    user_file = Path(f"{name}_controller.py")
    controller_file = user_file if user_file.is_file() else Path(__file__).parent / "channel" / "controller.py"
    command = [str(controller_file), *arguments]
    controller_arguments = {
        "experiment_name": name,
        "log_directory": str(folder),
        "devices": devices,
        "worker_args": options.worker_args or "",
    }
    hosts = None if devices_by_host is None else ExperimentHosts(devices_by_host, command)
    return start_controller(command, str(folder / "controller_cpu"), controller_arguments, hosts)


def _read_devices_by_host(hosts: Sequence[str]) -> dict[str, list[str]]:
    """Return the configured devices of each host; raise ValueError unless all are cores, or GPUs in order."""
    devices_by_host = {}
    for host in hosts:
        try:
            devices_by_host[host] = configparser.fetch_devices_for_host(host)
        except KeyError:
            raise ValueError(f"devices: name those of {host} in PLATOON_DEVICES or in a platoonrc file") from None
    parse_hosts([f"{host}:{len(devices_by_host[host])}" for host in hosts])
    for kind in ("cpu", "cuda", "gpu"):
        if all(
            devices == [kind if kind == "cpu" else f"{kind}{i}" for i in range(len(devices))]
            for devices in devices_by_host.values()
        ):
            return devices_by_host
    raise ValueError(f"devices: on several hosts all are cpu, or on each cuda0, cuda1 and so on, got {devices_by_host}")


def _read_hosts() -> list[str]:
    """Return the hosts named in PLATOON_HOSTS or a platoonrc file; an empty list if there are none."""
    try:
        return configparser.fetch_hosts()
    except KeyError:
        return []


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m synkhronos platoon",
        description="Run NAME_controller.py, and NAME_worker.py on each device: scripts written for Platoon.",
    )
    parser.add_argument(
        "experiment_name",
        metavar="NAME",
        help="name of the experiment: NAME_worker.py has to exist, NAME_controller.py may",
    )
    placement = parser.add_mutually_exclusive_group()
    placement.add_argument(
        "-D", "--devices", nargs="+", metavar="DEVICE", help="a device for each worker: cuda0 cuda1, or cpu cpu"
    )
    placement.add_argument("-H", "--hosts", nargs="+", metavar="HOST", help="hosts; the first is this machine")
    parser.add_argument("-c", "--controller-args", help='arguments of the controller: -c="--patience 3"')
    parser.add_argument("-w", "--worker-args", help='arguments of the workers: -w="--rate 0.1"')
    return parser


def _make_log_folder(name: str) -> Path:
    """Create a folder for the logs of an experiment, named by the time, and by a number if that folder exists."""
    folder = base_folder = Path("PLATOON_LOGS", name, time.strftime("%Y-%m-%d_%H-%M-%S"))
    number = 0
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:  # another experiment started in the same second
            number += 1
            folder = base_folder.with_name(f"{base_folder.name}_{number}")


def _fail(text: str, exit_status: int) -> int:
    """Print an error, and return the exit status, for `main` to return."""
    sys.stderr.write(f"ERROR! {text}\n")
    return exit_status


def _print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
