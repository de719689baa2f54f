"""What ranks of different hosts have to do with each other in a task: messages, locks, and the rows used under these.

`TaskAgent`
    One agent's part.

What a rank has sent to one of another host goes there as PART; that one has received it, as another PART.  STOP is a
rank's word that all ought to stop.

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

What comes from a host is done in the order in which it was sent: nothing before the content in front of it is there, or
before this host has heard of the command to which it belongs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from synkhronos.hosts.mail import ANSWER, ASK, CONTENT, PART, PIECE, STOP, UNDER_WAY, Mail
from synkhronos.hosts.names import host_of
from synkhronos.ranks.control import FOR_TASK, Control
from synkhronos.ranks.segments import Segment
from synkhronos.ranks.task import GIVE, READ, TAKE, WRITE, Bridge, Span, TaskMemory


class TaskAgent:
    """What an agent does in tasks, for ranks of its host and for those that use its host's locks.

    ``ranks`` has those of each host, ``segments`` the shared memory of this one, by key.
    """

    def __init__(self, mail: Mail, control: Control, ranks: Sequence[range], segments: dict[int, Segment]):
        self._mail, self._control, self._ranks, self._segments = mail, control, ranks, segments
        self._number = 0
        self._bridge: Bridge | None = None
        #: For each lock the hosts and ranks that wait for it.
        self._lines: dict[int, deque[tuple[int, int]]] = {}
        #: What is being sent.
        self._going: deque[Iterator[None]] = deque()
        #: From each host what has come and is not done yet: the content to wait for, the command, what to do.
        self._coming: list[deque[tuple[Any, int, Callable[[Bridge], object]]]] = [deque() for _ in range(mail.size)]
        #: What takes each kind of message.
        self.takes: dict[int, Callable[..., None]] = {
            PART: self._take_part, STOP: self._take_stop,
            ASK: self._take_ask, ANSWER: self._take_answer, CONTENT: self._take_content,
        }  # fmt: skip

    def begin(self, number: int, task: TaskMemory | None) -> None:
        """Begin with a command, which may be a task, and forget what is left of the one before."""
        self._number, self._bridge = number, None
        self._lines.clear()
        self._going.clear()
        if task is not None and task.key in self._segments:  # there may have been no room for its memory
            segment = self._segments[task.key]
            if self._mail.me > 0:  # else the master has done it
                task.prepare(segment)
            self._bridge = Bridge(task, segment, self._control.here)

    @property
    def is_waited_for(self) -> bool:
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
            news |= self._tell_others(self._bridge)
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

    def _when_here(self, source: int, number: int, act: Callable[[Bridge], object], content: Any = None) -> None:
        """Do something for a command when it is the turn of what this host has sent."""
        self._coming[source].append((content, number, act))

    def _wake(self, rank: int) -> None:
        self._control.fence()
        self._control.ring(rank, FOR_TASK)

    # -- messages between ranks ----------------------------------------------------------------------------------

    def _tell_others(self, bridge: Bridge) -> bool:
        """Send what ranks of this host have sent to others."""
        news = False
        for source, target, turn, content in bridge.news():
            to = target if content is not None else source
            self._mail.send(host_of(self._ranks, to), PART, self._number, source, target, turn, content)
            news = True
        if bridge.is_stopped_here():
            self._mail.send_all(self._mail.others, STOP, self._number)
        return news

    def _take_part(self, source: int, number: int, *part: Any) -> None:
        self._when_here(source, number, lambda bridge: self._wake(bridge.take(*part)))

    def _take_stop(self, source: int, number: int) -> None:
        self._when_here(source, number, Bridge.stop)

    # -- for the ranks of this host that use another one's locks -------------------------------------------------

    def _pass_on(self, bridge: Bridge, rank: int, what: int, lock: int, spans: Sequence[Span]) -> None:
        home, number = host_of(self._ranks, bridge.home(lock)), self._number
        if what == WRITE:
            self._going.append(self._send(home, spans, ASK, number, rank, what, lock, ()))
            return
        self._mail.send(home, ASK, number, rank, what, lock, spans)
        if what == GIVE:
            self._answer(bridge, rank, 0)

    def _take_answer(self, source: int, number: int, rank: int, value: int) -> None:
        self._when_here(source, number, lambda bridge: self._answer(bridge, rank, value))

    def _answer(self, bridge: Bridge, rank: int, value: int) -> None:
        """Have a rank hear what the lock's host says."""
        bridge.answer(rank, value)
        self._wake(rank)

    # -- for the locks of this host ------------------------------------------------------------------------------

    def _take_ask(self, source: int, number: int, rank: int, what: int, lock: int, spans: Sequence[Span]) -> None:
        self._when_here(source, number, lambda bridge: self._do(bridge, source, rank, what, lock, spans))

    def _do(self, bridge: Bridge, source: int, rank: int, what: int, lock: int, spans: Sequence[Span]) -> None:
        """Do what a rank of another host asks for."""
        number = self._number
        if what == TAKE:
            self._lines.setdefault(lock, deque()).append((source, rank))
            bridge.want(lock, True)
        elif what == READ:
            self._going.append(self._send(source, spans, ANSWER, number, rank, 0))
        elif what == WRITE:  # what was before it has come
            self._mail.send(source, ANSWER, number, rank, 0)
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
        self._mail.send(source, ANSWER, self._number, rank, turn)
        return True

    # -- content -------------------------------------------------------------------------------------------------

    def _send(self, to: int, spans: Sequence[Span], *message: Any) -> Iterator[None]:
        """Send rows to another host, a part at a time, and then a message."""
        for key, start, nbytes in spans:
            memory = memoryview(self._segments[key].buffer)
            for at in range(start, start + nbytes, PIECE):
                part = memory[at : min(at + PIECE, start + nbytes)]
                self._mail.send(to, CONTENT, self._number, key, at, len(part))
                self._mail.send_bytes(to, part)
                if self._mail.me == 0:
                    self._control.words[Control.SENT] += len(part)
                yield
        self._mail.send(to, *message)

    def _take_content(self, source: int, number: int, key: int, at: int, nbytes: int) -> None:
        """Receive a part of rows to where they belong."""
        room: Any = bytearray(nbytes)
        if number == self._number and key in self._segments:  # else the command has failed
            room = memoryview(self._segments[key].buffer)[at : at + nbytes]
        self._when_here(source, number, lambda bridge: None, self._mail.receive_bytes(source, room))
