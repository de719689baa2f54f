"""The controller of an experiment, which starts its workers and answers their requests."""

from __future__ import annotations

import argparse
import atexit
import inspect
import json
import mmap
import os
import secrets
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

import numpy as np

from synkhronos.gpus import get_n_gpu
from synkhronos.platoon import configparser
from synkhronos.platoon.channel.batch_queue import BatchSender
from synkhronos.platoon.channel.controller_process import ARGUMENTS_VARIABLE, ExperimentHosts
from synkhronos.platoon.channel.worker_group import WorkerGroup
from synkhronos.platoon.util import PlatoonError

#: Exit status of an experiment if its controller fails, or a worker is killed.
CONTROLLER_FAILED_STATUS = 2


class Controller:
    """Base class of controllers: starts the workers of its host, and answers their requests.

    Parameters
    ----------
    control_port : int
        Passed to the workers if it is not the default.  It is not a network port: the launcher connects the workers.
    data_port : int, optional
        Name of the queue of mini-batches, for `send_mb` in this process; see `init_data`.
    data_hwm : int
        Maximal number of mini-batches in that queue.
    devices : list of str, optional
        A device for each worker: ``"cpu"``, ``"cuda0"``.  An empty list selects the devices in Platoon's
        environment variables and files, or else all GPUs.
    experiment_name : str
        The workers run ``<experiment_name>_worker.py`` of the working directory.  Without a name no worker is started.
    log_directory : str
        Folder of the workers' output.
    worker_args : str
        The workers' arguments, as a shell splits them.
    multi : bool
        Whether the experiment is on several hosts (``--multi``), which the launcher has to name.

    Attributes
    ----------
    _devices : list of str
        The workers' devices, in the order of their ranks.
    _workers : set of int
        Process IDs of the workers, which are the ``worker_id`` of their requests.
    """

    def __init__(
        self,
        control_port: int = 5567,
        data_port: int | None = None,
        data_hwm: int = 10,
        devices: Sequence[str] | None = None,
        experiment_name: str = "",
        log_directory: str = "",
        worker_args: str | None = "",
        multi: bool = False,
    ):
        hosts = ExperimentHosts.from_environment()
        if multi and hosts is None:
            raise PlatoonError(
                "multi: start an experiment on several hosts with `synkhronos platoon NAME -H HOST HOST`"
            )
        if hosts is not None:
            devices = list(hosts.devices_by_host.values())[hosts.index]
        self._devices = [] if devices is None else self.get_workers_devices(list(devices))
        self._local_size = self._global_size = len(self._devices)
        if hosts is not None:
            self._global_size = sum(map(len, hosts.devices_by_host.values()))
        self._pid = os.getpid()
        #: A byte shared with processes forked by this one: 1 after the end of the workers.
        self._workers_ended = mmap.mmap(-1, 1)
        self._address = (hosts and hosts.address) or f"synkhronos-platoon-{secrets.token_hex(8)}"
        self._group: WorkerGroup | None = None
        self._workers: set[int] = set()
        # This runs before multiprocessing waits for its processes, which may wait until workers receive mini-batches.
        atexit.register(self._close)
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signal_number, self._handle_force_close)
        if data_port:
            self.init_data(data_port, data_hwm)
        if experiment_name:
            ports = [
                f"--{name}={value}"
                for name, value, default in (
                    ("control-port", control_port, 5567),
                    ("data-port", data_port, None),
                    ("data-hwm", data_hwm, 10),
                )
                if value != default
            ]
            self._group = WorkerGroup(
                self._address, experiment_name, [worker_args or "", *ports], self._devices, log_directory, hosts
            )
            try:
                self._workers.update(self._group.start())
            except PlatoonError as error:
                sys.stderr.write(str(error))
                sys.exit(3)

    # -- requests ----------------------------------------------------------------------------------------------

    def handle_control(self, req: Any, worker_id: int, req_info: Any) -> Any:
        """Return the answer to a request of `Worker.send_req`; to be overridden.

        Requests and answers are encoded as JSON; ``worker_id`` is the worker's process ID.
        """
        raise NotImplementedError(f"{type(self).__name__} has no handle_control(), to answer the request {req!r}")

    def _answer_request(self, req: Any, worker_id: int, req_info: Any) -> Any:
        return self.handle_control(req, worker_id, req_info)

    def worker_is_done(self, worker_id: int) -> None:
        """Set `_should_stop`, as Platoon does; it has no effect."""
        self._should_stop = True

    def serve(self) -> int:
        """Answer requests until all workers have ended.

        Return 0 if all workers exited with 0, else the status of the first failure: 2 if a worker was killed, or if
        this controller raised an exception.
        """
        if self._group is None:
            return CONTROLLER_FAILED_STATUS
        try:
            failure = self._group.serve(self._answer_request)
        except Exception:
            sys.stderr.write(f"{PlatoonError('the controller has failed')}\n{traceback.format_exc()}")
            return CONTROLLER_FAILED_STATUS
        finally:
            self._close()
        if failure is None:
            return 0
        sys.stderr.write(f"{PlatoonError(failure.message)}\n")
        return failure.status

    def _close(self) -> None:
        """End the workers and the senders of mini-batches; do nothing in a process forked by this one."""
        if os.getpid() != self._pid:
            return
        self._workers_ended[0] = 1
        if self._group is not None:
            self._group.kill_workers()
        self._workers.clear()

    def _handle_force_close(self, signal_number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            sys.stderr.write(f"ended by {signal.Signals(signal_number).name}\n")
            self._close()
            sys.exit(1)
        os._exit(1)  # this process sends mini-batches

    # -- mini-batches --------------------------------------------------------------------------------------------

    def init_data(self, port: int, data_hwm: int = 10) -> None:
        """Open the queue ``port``, of at most ``data_hwm`` mini-batches, in this process or in one forked by it."""
        try:
            self.asocket = BatchSender(f"{self._address}-{port}", data_hwm, self._have_workers_ended)
        except OSError as error:
            raise PlatoonError(f"port: the queue {port} exists already", error) from error

    def _have_workers_ended(self) -> bool:
        return bool(self._workers_ended[0]) or self._pid not in (os.getpid(), os.getppid())

    def send_mb(self, arrays: Sequence[np.ndarray]) -> None:
        """Put a mini-batch, a list of arrays, into the queue for `Worker.recv_mb`; wait while it is full."""
        self.asocket.send(arrays)

    # -- arguments -----------------------------------------------------------------------------------------------

    @staticmethod
    def get_workers_devices(devices: list[str]) -> list[str]:
        """Return and print the workers' devices: those given, or Platoon's configuration, or all GPUs.

        Without any device, the process exits with status 4.
        """
        hostname = socket.gethostname()
        if not devices:
            try:
                devices = configparser.fetch_devices_for_host(hostname)
            except KeyError:
                devices = [f"cuda{i}" for i in range(get_n_gpu())]
        if not devices:
            sys.stderr.write(f"ERROR! no GPU on {hostname}: name devices, such as -D cpu cpu\n")
            sys.exit(4)
        sys.stdout.write(f"## On {hostname} using: {' '.join(devices)}\n")
        return devices

    @staticmethod
    def default_parser() -> argparse.ArgumentParser:
        """Return a parser of a controller's arguments, to which a script may add its own."""
        parser = argparse.ArgumentParser(description="A controller of Platoon's interface.")
        parser.add_argument("experiment_name", help="workers run EXPERIMENT_NAME_worker.py")
        parser.add_argument("log_directory", help="folder of the workers' output")
        hosts = parser.add_mutually_exclusive_group(required=True)
        hosts.add_argument("--single", action="store_true", help="all workers are on this machine")
        hosts.add_argument("--multi", action="store_true", help="workers are on several machines")
        parser.add_argument("-D", "--devices", nargs="+", default=[], metavar="DEVICE", help="one for each worker")
        parser.add_argument("-w", "--worker-args", help="arguments of the workers, in one string")
        add_port_arguments(parser)
        return parser

    @staticmethod
    def default_arguments(args: argparse.Namespace) -> dict[str, Any]:
        """Return the arguments of this class among those parsed by `default_parser`."""
        names = ("control_port", "data_port", "data_hwm", "devices", "experiment_name", "log_directory")
        return {name: value for name, value in vars(args).items() if name in (*names, "worker_args", "multi")}


class Lieutenant(Controller):
    """Controller of Platoon's first version, which gets its workers from the launcher, not from command-line arguments.

    ``port`` is the data port, and ``hwm`` the bound of the queue of mini-batches; ``cport`` is ignored.
    """

    def __init__(self, port: int | None = None, cport: int | None = None, hwm: int = 10):
        super().__init__(data_port=port, data_hwm=hwm, **json.loads(os.environ.get(ARGUMENTS_VARIABLE, "{}")))

    def init_control(self, port: int) -> None:
        """Do nothing: workers find their controller by themselves."""

    def serve(self) -> int:
        """Answer requests until all workers have ended; exit if one has failed."""
        status = super().serve()
        if status:
            sys.exit(status)
        return status

    def _answer_request(self, req: Any, worker_id: int, req_info: Any) -> Any:
        """Call ``handle_control(req)`` or ``handle_control(req, worker_id)``."""
        handle: Any = self.handle_control
        return handle(req, worker_id) if len(inspect.signature(handle).parameters) > 1 else handle(req)


def add_port_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that controllers and workers share."""
    parser.add_argument("--control-port", type=int, default=5567, help="of Platoon's network; not needed here")
    parser.add_argument("--data-port", type=int, help="name of the queue of mini-batches")
    parser.add_argument("--data-hwm", type=int, default=10, help="maximal number of mini-batches in the queue")


def main() -> None:
    """Run a controller without a `handle_control`."""
    args = Controller.default_parser().parse_args()
    sys.exit(Controller(**Controller.default_arguments(args)).serve())


if __name__ == "__main__":
    main()
