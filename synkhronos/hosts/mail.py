"""Messages between agents, over MPI.

Messages are pickled tuples of a kind and its content; `synkhronos.hosts.agent` lists the kinds.  Bytes of shared memory
follow a message that announces them, without being pickled.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

#: Kinds of messages.
(
    COMMAND,
    ANNOUNCE,
    PAGES,
    DROP,
    STEP,
    FAILED,
    DONE,
    REMOTE_FAILURE,
    BEAT,
    END,
    ENDED,
    CHANNEL_UPDATE,
    STOP,
    LOCK_REQUEST,
    LOCK_REPLY,
    LOCK_ROWS,
) = range(16)

#: Seconds that a host has for its first message, in addition to `host_timeout`.
_FIRST_BEAT_SECONDS = 10.0
#: Maximal number of bytes of rows or pages in one message: few enough that later messages do not wait long for it.
CHUNK_NBYTES = 1 << 22
#: Number of unsent messages up to which an agent sends another chunk.
MAX_PENDING = 16


class Mail:
    """A non-blocking mailbox of an agent.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    world : mpi4py.MPI.Comm
        Communicator of all agents; the rank in it is the number of the host.

    Attributes
    ----------
    last_received : dict of int to float
        Time of the last message of each other host, by the monotonic clock.
    """

    def __init__(self, mpi: Any, world: Any):
        self._mpi, self._world = mpi, world
        self.host, self.size = world.rank, world.size
        self._unsent: list[Any] = []
        self._arriving: list[deque[tuple[Any, bytearray]]] = [deque() for _ in range(self.size)]
        self._status = mpi.Status()
        self.last_received = dict.fromkeys(self.other_hosts, time.monotonic() + _FIRST_BEAT_SECONDS)

    @property
    def other_hosts(self) -> list[int]:
        """Numbers of all other hosts."""
        return [host for host in range(self.size) if host != self.host]

    def send(self, host: int, kind: int, *arguments: Any) -> None:
        """Send a message to a host without waiting."""
        self.send_all([host], kind, *arguments)

    def send_all(self, hosts: Iterable[int], kind: int, *arguments: Any) -> None:
        """Send a message to several hosts without waiting."""
        payload = pickle.dumps((kind, arguments), pickle.HIGHEST_PROTOCOL)
        for host in hosts:
            self._unsent.append((self._world.Isend([payload, self._mpi.BYTE], host, 0), payload))

    def send_bytes(self, host: int, content: memoryview) -> None:
        """Send memory, which must not change until it is sent; a message before announces it."""
        self._unsent.append((self._world.Isend([content, self._mpi.BYTE], host, 1), content))

    def receive_bytes(self, source: int, buffer: Any) -> Any:
        """Start receiving the bytes of a `send_bytes`, in the order of the announcing messages; return the request."""
        return self._world.Irecv([buffer, self._mpi.BYTE], source, 1)

    def has_pending(self, limit: int) -> bool:
        """Whether more than ``limit`` messages are not sent yet."""
        self._unsent = [message for message in self._unsent if not message[0].Test()]
        return len(self._unsent) > limit

    def receive(self) -> Iterator[tuple[int, int, tuple[Any, ...]]]:
        """Yield source, kind and content of each message that has arrived; those of one host in order."""
        self.has_pending(0)  # frees messages that are sent
        self.accept(MAX_PENDING)
        for source, messages in enumerate(self._arriving):
            while messages and messages[0][0].Test():
                kind, arguments = pickle.loads(messages.popleft()[1])
                yield source, kind, arguments

    def accept(self, limit: int) -> None:
        """Start receiving messages that have arrived, up to ``limit``, without delivering them."""
        status = self._status
        while sum(map(len, self._arriving)) < limit and self._world.Iprobe(self._mpi.ANY_SOURCE, 0, status):
            source = status.source
            buffer = bytearray(status.Get_count(self._mpi.BYTE))
            self._arriving[source].append((self._world.Irecv([buffer, self._mpi.BYTE], source, 0), buffer))
            self.last_received[source] = time.monotonic()
