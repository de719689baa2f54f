"""Messages between agents, over MPI.

Messages are pickled tuples of a type and its content.  Bytes of shared memory follow a message that announces them,
without being pickled.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

#: Seconds, in addition to `host_timeout`, within which a host's first message has to arrive.
_FIRST_MESSAGE_SECONDS = 10.0
#: Maximal number of bytes of rows or pages in a message: small, so that it does not delay the next messages for long.
CHUNK_NBYTES = 1 << 22
#: Maximal number of unsent messages at which an agent sends another chunk.
MAX_UNSENT_MESSAGES = 16


class MessageType:
    """Types of messages; the docstring of `synkhronos.hosts.agent` describes them."""

    COMMAND, NEW_SEGMENT, PAGES, DROP_SEGMENTS, BARRIER, FAILED, DONE, PEER_FAILURE = range(8)
    HEARTBEAT, END, ENDED, CHANNEL_UPDATE, LOCK_REQUEST, LOCK_REPLY, LOCK_BYTES = range(8, 15)


class Messenger:
    """Sends and receives an agent's messages, without blocking.

    The rank in ``comm``, a communicator of all agents, is the number of the host.  ``last_received`` has the time of
    the last message of each host in ``other_hosts``, by the monotonic clock.
    """

    def __init__(self, mpi: Any, comm: Any):
        self._mpi, self._comm = mpi, comm
        self.host, self.n_hosts = comm.rank, comm.size
        self.other_hosts = [host for host in range(self.n_hosts) if host != self.host]
        self._unsent: list[Any] = []
        self._incoming: list[deque[tuple[Any, bytearray]]] = [deque() for _ in range(self.n_hosts)]
        self._status = mpi.Status()
        self.last_received = dict.fromkeys(self.other_hosts, time.monotonic() + _FIRST_MESSAGE_SECONDS)

    def send(self, host: int, message_type: int, *arguments: Any) -> None:
        """Send a message to a host without waiting."""
        self.send_all([host], message_type, *arguments)

    def send_all(self, hosts: Iterable[int], message_type: int, *arguments: Any) -> None:
        """Send a message to several hosts without waiting."""
        payload = pickle.dumps((message_type, arguments), pickle.HIGHEST_PROTOCOL)
        for host in hosts:
            self._unsent.append((self._comm.Isend([payload, self._mpi.BYTE], host, 0), payload))

    def send_bytes(self, host: int, content: memoryview) -> None:
        """Send memory, which must not change until it is sent.  A message that announces it has to precede it."""
        self._unsent.append((self._comm.Isend([content, self._mpi.BYTE], host, 1), content))

    def receive_bytes(self, source: int, buffer: Any) -> Any:
        """Post the receive of a `send_bytes`, and return its request.  Call it in the order of the announcements."""
        return self._comm.Irecv([buffer, self._mpi.BYTE], source, 1)

    def complete_sends(self) -> int:
        """Complete the sends that MPI has finished, to free their memory.  Return the number of unfinished ones."""
        self._unsent = [message for message in self._unsent if not message[0].Test()]
        return len(self._unsent)

    def receive(self) -> Iterator[tuple[int, int, tuple[Any, ...]]]:
        """Yield source, type and content of each message that has arrived; messages of a host stay in order."""
        self.complete_sends()
        self.post_receives(MAX_UNSENT_MESSAGES)
        for source, messages in enumerate(self._incoming):
            while messages and messages[0][0].Test():
                message_type, arguments = pickle.loads(messages.popleft()[1])
                yield source, message_type, arguments

    def post_receives(self, limit: int) -> None:
        """Post receives of messages that wait in MPI, while fewer than ``limit`` are received and not yielded."""
        status = self._status
        while sum(map(len, self._incoming)) < limit and self._comm.Iprobe(self._mpi.ANY_SOURCE, 0, status):
            source = status.source
            buffer = bytearray(status.Get_count(self._mpi.BYTE))
            self._incoming[source].append((self._comm.Irecv([buffer, self._mpi.BYTE], source, 0), buffer))
            self.last_received[source] = time.monotonic()
