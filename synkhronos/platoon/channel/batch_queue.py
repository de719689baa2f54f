"""Mini-batches from a controller's process to its workers.

The sender has a bounded queue, filled by ``send_mb`` and emptied by a thread for each worker.  Workers request each
mini-batch, so that a fast worker gets more of them::

    send_mb ──▶ queue of at most `max_batches` mini-batches ──▶ thread ◀── request ─── recv_mb of worker 0
                                                      └─▶ thread ◀── request ─── recv_mb of worker 1
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import numpy as np

from synkhronos.casts import check_dense
from synkhronos.platoon.channel import sockets
from synkhronos.platoon.channel.sockets import POLL_SECONDS
from synkhronos.platoon.util import PlatoonError

#: Header that ends the stream.
_END_HEADER = b"null"


class BatchSender:
    """Sender of mini-batches, with its queue of at most ``max_batches``."""

    def __init__(self, address: str, max_batches: int, have_workers_ended: Callable[[], bool]):
        self._listener = sockets.listen(address)
        self._max_batches, self._have_workers_ended = max(1, max_batches), have_workers_ended
        self._changed = threading.Condition()
        self._queue: deque[list[np.ndarray]] = deque()
        self._connections: list[Connection] = []
        self._is_closed = False
        #: Number of mini-batches that threads have taken from the queue and not sent yet.
        self._n_in_flight = 0
        threading.Thread(target=self._accept_workers, daemon=True).start()
        threading.Thread(target=self._keep_process_alive).start()

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        """Append a mini-batch to the queue; wait while the queue is full."""
        check_dense(list(arrays), "arrays")
        batch = [np.array(array, order="C") for array in arrays]  # the caller may overwrite its own
        for array in batch:
            if array.dtype.kind not in "biufcSUmM":
                raise TypeError(f"arrays: expected arrays of numbers or strings, got one of {array.dtype}")
        with self._changed:
            self._wait_until_or_workers_ended(lambda: len(self._queue) < self._max_batches or self._is_closed)
            if self._is_closed or self._have_workers_ended():
                reason = "the sender is closed" if self._is_closed else "the workers have ended"
                raise PlatoonError(f"send_mb: {reason}")
            self._queue.append(batch)
            self._changed.notify_all()

    def close(self) -> None:
        """Close the queue without waiting: threads send its content, then the end of the stream."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _wait_until_or_workers_ended(self, condition: Callable[[], bool]) -> None:
        """Wait, with the lock held, until ``condition()`` is true or the workers end; the caller checks which."""
        while not (condition() or self._have_workers_ended()):
            self._changed.wait(POLL_SECONDS)

    def _keep_process_alive(self) -> None:
        """Keep the process alive after the end of its main thread until the queue is empty."""
        threading.main_thread().join()
        self.close()
        with self._changed:
            self._wait_until_or_workers_ended(lambda: not self._queue and not self._n_in_flight)
        self._send_end_headers()

    def _send_end_headers(self) -> None:
        """Send the end of the stream to all workers, in reply to their next requests."""
        with self._changed:
            connections = tuple(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(_END_HEADER)

    def _accept_workers(self) -> None:
        while True:
            connection = sockets.accept(self._listener)
            if connection is not None:
                with self._changed:
                    self._connections.append(connection)
                threading.Thread(target=self._serve_worker, args=(connection,), daemon=True).start()

    def _serve_worker(self, connection: Connection) -> None:
        """Send mini-batches to one worker, one for each of its requests."""
        try:
            while True:
                connection.recv_bytes()
                with self._changed:
                    self._wait_until_or_workers_ended(lambda: bool(self._queue) or self._is_closed)
                    batch = self._queue.popleft() if self._queue else None
                    self._n_in_flight += batch is not None
                    self._changed.notify_all()
                if batch is None:
                    connection.send_bytes(_END_HEADER)
                    continue
                try:
                    send_arrays(connection, batch)
                finally:
                    with self._changed:
                        self._n_in_flight -= 1
                        self._changed.notify_all()
        except (EOFError, OSError):  # the worker has ended
            with self._changed:
                self._connections.remove(connection)
            connection.close()


def send_arrays(connection: Connection, arrays: Sequence[np.ndarray]) -> None:
    """Send arrays: a header with their dtypes and shapes, then the bytes of each."""
    connection.send_bytes(json.dumps([(array.dtype.str, array.shape) for array in arrays]).encode())
    for array in arrays:
        connection.send_bytes(array.reshape(-1).view(np.uint8).data if array.size else b"")


def receive_arrays(receive: Callable[[], bytes]) -> list[np.ndarray] | None:
    """Return arrays sent by `send_arrays`, from successive messages of ``receive()``; None at the end of the stream."""
    headers = json.loads(receive())
    if headers is None:
        return None
    return [np.frombuffer(bytearray(receive()), np.dtype(dtype)).reshape(shape) for dtype, shape in headers]
