"""A worker's connection to its controller."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import threading
import time
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

from synkhronos.platoon.channel import sockets
from synkhronos.platoon.channel.sockets import POLL_SECONDS
from synkhronos.platoon.channel.worker_group import WorkerFailure
from synkhronos.platoon.util import PlatoonError
from synkhronos.programs import RankContext
from synkhronos.programs.rank_context import get_rank

#: Maximal number of seconds for connecting to the controller.
_CONNECT_TIMEOUT = 60.0


class ControllerConnection:
    """Connection of a worker, a rank, to the controller of its host.

    ``log_path`` is the path of the controller's standard error, for messages.  ``on_poll`` is called while this process
    waits for the controller; it may raise.
    """

    def __init__(self, context: RankContext, address: str, log_path: str, on_poll: Callable[[], None]):
        self.context, self.address, self._log_path = context, address, log_path
        local_ranks = get_rank(context).local_ranks
        self.local_rank, self.local_size = context.number - local_ranks.start, len(local_ranks)
        self._send_lock = threading.Lock()
        connection = sockets.connect(address, on_poll, _CONNECT_TIMEOUT)
        if connection is None:
            raise PlatoonError("the controller can't be reached")
        self._connection = connection
        self._send([self.local_rank, os.getpid()])

    def _send(self, message: Any) -> None:
        text = json.dumps(message)
        try:
            with self._send_lock:
                self._connection.send_bytes(text.encode())
        except OSError as error:
            raise PlatoonError(f"the controller has ended; see {self._log_path}", error) from error

    def send_request(self, request: dict[str, Any], timeout: float) -> Any:
        """Send a request, and return the controller's answer; raise PlatoonError if there is none in time."""
        self._send(request)
        return json.loads(self.receive_from(self._connection, timeout, "answer of the controller"))

    def receive_from(self, connection: Any, timeout: float, description: str) -> bytes:
        """Wait for a message on a connection and return it; raise if another worker fails meanwhile.

        ``description`` names the message in the error after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        try:
            while not connection.poll(POLL_SECONDS):
                self.context.report_progress()
                if time.monotonic() > deadline:
                    raise PlatoonError(f"timeout: no {description} in {timeout:g} seconds")
            message: bytes = connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise PlatoonError(f"no {description}: its process has ended; see {self._log_path}", error) from error
        self.context.report_progress()
        return message

    def map_memory(self, name: str, nbytes: int, timeout: float) -> tuple[mmap.mmap, bool]:
        """Map the shared memory of this name; return it, and whether this worker is the first to request it."""
        answer = self.send_request({"memory": {"name": name, "nbytes": nbytes}}, timeout)
        if "error" in answer:
            raise PlatoonError(answer["error"])
        file_descriptor = reduction.recv_handle(self._connection)
        try:
            return mmap.mmap(file_descriptor, max(1, nbytes)), answer["is_new"]
        finally:
            os.close(file_descriptor)

    def report_failure(self, failure: WorkerFailure) -> None:
        """Send a failure to the controller; do nothing if the controller has ended."""
        with contextlib.suppress(PlatoonError):
            self._send({"failure": dataclasses.asdict(failure)})

    def report_end(self) -> None:
        """Tell the controller that this worker ends; do nothing if the controller has ended."""
        with contextlib.suppress(PlatoonError):
            self._send({"end": True})


#: Connection of this process; None before it is a worker of an experiment.
current_connection: ControllerConnection | None = None
