"""Locks of other hosts, and the rows that are used under them.

`Locks`
    One agent's part.

A lock is on one host, and so is the only copy of what ranks use under it.  A rank of another host has its own host's
memory hold a copy as long as it has the lock: it reads rows when it has got the lock, computes as a rank of the lock's
host would, and writes them back.  Agents carry this, and compute nothing::

    rank          its agent                       the agent of the lock's host
    take          ASK(TAKE)               ->      stands in line; takes the lock for the rank
                                          <-      ANSWER: how often it had been taken
    read          ASK(READ, rows)         ->
                  into memory             <-      CONTENT, part by part, from memory; ANSWER
    write         CONTENT, part by part   ->      into memory
                  ASK(WRITE)              ->
                                          <-      ANSWER: all is there
    give          ASK(GIVE)               ->      gives it back

Bytes go from memory to memory: the message before them says where to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from synkhronos.ranks.control import FOR_TASK, Control
from synkhronos.ranks.segments import Segment
from synkhronos.ranks.task import GIVE, READ, TAKE, WRITE, Bridge, Span

#: Bytes of a piece of content or pages, at most: few enough that other messages don't wait for long behind it.
PIECE = 1 << 22
#: Messages that an agent has under way, at most, when it sends another part.
UNDER_WAY = 16


class Locks:
    """What an agent does for ranks that use another host's locks: its own ranks, and those that use its own locks.

    ``kinds`` are those of its messages: ASK, ANSWER, CONTENT.  ``host`` returns a rank's host.
    """

    def __init__(self, mail: Any, kinds: tuple[int, int, int], control: Control, host: Callable[[int], int]):
        self._mail, self._control, self._host = mail, control, host
        self._ask, self._answer, self._content = kinds
        self._number = 0
        self._bridge: Bridge | None = None
        self._segments: dict[int, Segment] = {}
        #: For each lock the hosts and ranks that wait for it.
        self._lines: dict[int, deque[tuple[int, int]]] = {}
        #: What is being sent.
        self._going: deque[Iterator[None]] = deque()
        #: From each host the content that is still coming, and the messages behind it.
        self._coming: list[deque[tuple[Any, int, Callable[[Bridge], object]]]] = [deque() for _ in range(mail.size)]

    def begin(self, number: int, bridge: Bridge | None, segments: dict[int, Segment]) -> None:
        """Begin with a command, and forget what is left of the one before."""
        self._number, self._bridge, self._segments = number, bridge, segments
        self._lines.clear()
        self._going.clear()

    @property
    def are_waited_for(self) -> bool:
        """Whether a rank of another host waits for a lock of this one, or content is on its way."""
        return any(self._lines.values()) or bool(self._going) or any(self._coming)

    def move(self) -> bool:
        """Do what can be done; return whether something was."""
        news = False
        for coming in self._coming:
            while coming and coming[0][1] <= self._number and (coming[0][0] is None or coming[0][0].Test()):
                _, number, act = coming.popleft()
                if number == self._number and self._bridge is not None:  # else the command has failed
                    act(self._bridge)
                news = True
        if self._bridge is not None:
            for request in self._bridge.asked():
                self._pass_on(self._bridge, *request)
                news = True
            for lock, line in self._lines.items():
                news |= bool(line) and self._grant(self._bridge, lock, line)
        while self._going and not self._mail.is_sending(UNDER_WAY):
            one = self._going.popleft()
            if next(one, self) is not self:
                self._going.append(one)  # each a part in turn
            news = True
        return news

    # -- for the ranks of this host ----------------------------------------------------------------------------

    def _pass_on(self, bridge: Bridge, rank: int, what: int, lock: int, spans: Sequence[Span]) -> None:
        home, number = self._host(bridge.home(lock)), self._number
        if what == WRITE:
            self._going.append(self._send(home, spans, self._ask, number, rank, what, lock, ()))
            return
        self._mail.send(home, self._ask, number, rank, what, lock, spans)
        if what == GIVE:
            self._tell(bridge, rank, 0)

    def take_answer(self, source: int, number: int, rank: int, value: int) -> None:
        """Have a rank hear what the lock's host says."""
        self._coming[source].append((None, number, lambda bridge: self._tell(bridge, rank, value)))

    def _tell(self, bridge: Bridge, rank: int, value: int) -> None:
        bridge.answer(rank, value)
        self._control.fence()
        self._control.ring(rank, FOR_TASK)

    # -- for the locks of this host ------------------------------------------------------------------------------

    def take_ask(self, source: int, number: int, rank: int, what: int, lock: int, spans: Sequence[Span]) -> None:
        """Do what a rank of another host asks for."""
        self._coming[source].append((None, number, lambda bridge: self._do(bridge, source, rank, what, lock, spans)))

    def _do(self, bridge: Bridge, source: int, rank: int, what: int, lock: int, spans: Sequence[Span]) -> None:
        number = self._number
        if what == TAKE:
            self._lines.setdefault(lock, deque()).append((source, rank))
            bridge.want(lock, True)
        elif what == READ:
            self._going.append(self._send(source, spans, self._answer, number, rank, 0))
        elif what == WRITE:  # what was before it has come
            self._mail.send(source, self._answer, number, rank, 0)
        else:
            bridge.give_lock(lock)

    def _grant(self, bridge: Bridge, lock: int, line: deque[tuple[int, int]]) -> bool:
        """Give a lock to the first who waits for it, if it is free."""
        source, rank = line[0]
        turn = bridge.take_lock(lock, rank)
        if turn is None:
            return False
        line.popleft()
        bridge.want(lock, bool(line))
        self._mail.send(source, self._answer, self._number, rank, turn)
        return True

    # -- content -------------------------------------------------------------------------------------------------

    def _send(self, to: int, spans: Sequence[Span], *message: Any) -> Iterator[None]:
        """Send rows to another host, a part at a time, and then a message."""
        for key, start, nbytes in spans:
            memory = memoryview(self._segments[key].buffer)
            for at in range(start, start + nbytes, PIECE):
                part = memory[at : min(at + PIECE, start + nbytes)]
                self._mail.send(to, self._content, self._number, key, at, len(part))
                self._mail.send_bytes(to, part)
                if self._mail.me == 0:
                    self._control.words[Control.SENT] += len(part)
                yield
        self._mail.send(to, *message)

    def take_content(self, source: int, number: int, key: int, at: int, nbytes: int) -> None:
        """Receive a part of rows to where they belong."""
        room: Any = bytearray(nbytes)
        if number == self._number and key in self._segments:  # else the command has failed
            room = memoryview(self._segments[key].buffer)[at : at + nbytes]
        self._coming[source].append((self._mail.receive_bytes(source, room), number, bool))
