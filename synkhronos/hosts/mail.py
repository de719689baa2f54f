"""What agents tell each other, over MPI.

`Mail`
    Sends and receives messages.  `synkhronos.hosts.agent` says what each kind of them is for.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

#: Kinds of messages.
POST, ANNOUNCE, PAGES, DROP, STEP, FAILED, DONE, LOST, BEAT, END, GONE, PART, STOP, ASK, ANSWER, CONTENT = range(16)

#: Seconds that a host has until its first message, besides `host_timeout`.
_FIRST_BEAT = 10.0
#: Bytes of rows or pages that one message brings, at most: few enough that others don't wait for long behind it.
PIECE = 1 << 22
#: Messages that an agent has under way, at most, when it sends another piece.
UNDER_WAY = 16


class Mail:
    """Messages between agents, over MPI's communicator ``world``: sent and received without ever waiting."""

    def __init__(self, mpi: Any, world: Any):
        self._mpi, self._world = mpi, world
        self.me, self.size = world.rank, world.size
        self._sending: list[Any] = []
        self._coming: list[deque[tuple[Any, bytearray]]] = [deque() for _ in range(self.size)]
        self._status = mpi.Status()
        #: When a message of each other host came last, by the monotonic clock.
        self.heard = dict.fromkeys(self.others, time.monotonic() + _FIRST_BEAT)

    @property
    def others(self) -> list[int]:
        """All hosts but this."""
        return [host for host in range(self.size) if host != self.me]

    def send(self, to: int, kind: int, *what: Any) -> None:
        """Send a message to a host."""
        self.send_all([to], kind, *what)

    def send_all(self, hosts: Iterable[int], kind: int, *what: Any) -> None:
        """Send a message to some hosts."""
        payload = pickle.dumps((kind, what), pickle.HIGHEST_PROTOCOL)
        for host in hosts:
            self._sending.append((self._world.Isend([payload, self._mpi.BYTE], host, 0), payload))

    def send_bytes(self, to: int, content: memoryview) -> None:
        """Send memory as it is, which has to stay so until it has gone; a message before it says what it is."""
        self._sending.append((self._world.Isend([content, self._mpi.BYTE], to, 1), content))

    def receive_bytes(self, source: int, room: Any) -> Any:
        """Receive what `send_bytes` sends, in the order of the messages before; return MPI's request."""
        return self._world.Irecv([room, self._mpi.BYTE], source, 1)

    def is_sending(self, most: int) -> bool:
        """Whether more than so many of the messages that were sent have not gone yet."""
        self._sending = [each for each in self._sending if not each[0].Test()]
        return len(self._sending) > most

    def come(self) -> Iterator[tuple[int, int, tuple[Any, ...]]]:
        """Yield what has come: from which host, the kind, the content; from each host in the order it was sent."""
        self.is_sending(0)  # lets go of what has gone
        self.hear(UNDER_WAY)
        for source, waiting in enumerate(self._coming):
            while waiting and waiting[0][0].Test():
                kind, what = pickle.loads(waiting.popleft()[1])
                yield source, kind, what

    def hear(self, most: int) -> None:
        """Take in what has come, up to so many messages, without looking at them."""
        status = self._status
        while sum(map(len, self._coming)) < most and self._world.Iprobe(self._mpi.ANY_SOURCE, 0, status):
            source = status.source
            room = bytearray(status.Get_count(self._mpi.BYTE))
            self._coming[source].append((self._world.Irecv([room, self._mpi.BYTE], source, 0), room))
            self.heard[source] = time.monotonic()
