"""One rank, as a command sees it.

`Rank`
    This process among the others: its number, its tables, and the steps at which ranks meet.
`Command`
    What every rank runs at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import pickle
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any

from synkhronos.ranks.control import FOR_STEP, POLL, SLOT, Control
from synkhronos.ranks.errors import Cancelled
from synkhronos.ranks.interrupts import undisturbed
from synkhronos.ranks.kept import Kept, UnderWay
from synkhronos.ranks.meeting import STEP_BITS, close, how_far
from synkhronos.ranks.segments import SegmentTable
from synkhronos.ranks.threads import ThreadShare

if TYPE_CHECKING:
    from synkhronos.ranks.task import TaskMemory

_log = logging.getLogger("synkhronos")

_STEP_MASK = (1 << STEP_BITS) - 1


#: Values that `Rank.exchange_known` keeps, with their bytes.
_KNOWN = 64
#: What a slot begins with: how long the whole message is, and the step for which it was written.
HEAD = struct.Struct("=QQ")
#: Bytes that one `Rank.gather` can show, and one round of `Rank.exchange`.
ROOM = SLOT - HEAD.size


class Command(ABC):
    """A small picklable object with a method that every rank runs, the master's included.

    A command is sent once and may run many times from the same object: `run` must not change it.

    Attributes
    ----------
    effect : str or None
        What the command changes, as an error says it ("The function's updates were applied").  A command with an
        effect calls `Rank.commit` when it has been applied, so that the error of a failed one names the ranks.
    partial_effect : str or None
        Said instead if some ranks have applied a part of the effect, and nobody knows how much.
    memory : TaskMemory or None
        Memory that the ranks share while the command runs, if it is a task.
    """

    __slots__ = ()

    @property
    def effect(self) -> str | None:
        """No effect."""
        return None

    @property
    def partial_effect(self) -> str | None:
        """No partial effect."""
        return None

    @property
    def memory(self) -> TaskMemory | None:
        """No memory of a task."""
        return None

    @abstractmethod
    def run(self, rank: Rank) -> Any:
        """Run this rank's part and return its result; a session returns that of the master's rank."""


class Rank:
    """A process among the ranks: this one.

    Parameters
    ----------
    number, root : int
        The rank of this process, and the master's.
    control : Control
        What they share.
    watch : callable
        Raises, or ends this process, when a peer has died.
    threads : ThreadShare
        How many threads its BLAS may use.

    Attributes
    ----------
    command : int
        The number of the command that this rank runs; no two commands of a session have the same.
    segments : SegmentTable
        The shared memory that this rank has mapped.
    objects : dict
        The rank's copies of objects that the master has sent, by their keys.
    kept : Kept
        What the rooms above keep on each rank.
    device
        What this rank computes with; `synkhronos.devices` knows what that is.
    """

    def __init__(
        self,
        number: int,
        root: int,
        control: Control,
        watch: Callable[[], None],
        threads: ThreadShare,
    ):
        self.number = number
        self.size = control.size
        self.root = root
        #: Whether this process is the user's own.
        self.is_master = number == root
        self.control = control
        #: Whether there are ranks on other machines.
        self.spans_hosts = len(control.here) < control.size
        self.watch = watch
        self.threads = threads
        self.segments = SegmentTable()
        self.objects: dict[Any, Any] = {}
        self.kept = Kept()
        self.device: Any = None
        self.command = 0
        self._step = 0
        self._known: dict[Any, Any] = {}
        self._commits = True
        #: Called when the command that runs has been run: what may be waited for as late as that.
        self.at_finish: list[Callable[[], None]] = []
        #: What commands have started and that may outlast them.
        self.under_way: list[UnderWay] = []
        #: Says whether a peer has died, without doing anything about it: the master's alone knows.
        self.bereft: Callable[[], bool] = lambda: False

    def begin(self, command: int) -> None:
        """Start counting the steps of a new command."""
        self.look_back()
        self.command = command
        self._commits = True
        self._step = command << STEP_BITS

    def look_back(self) -> None:
        """Give up what the last command started, if that command failed on some rank."""
        failed = self.control.words[Control.FAILED]
        if not 0 < self.command <= failed:
            return
        self._wait_until_closed(failed)  # it may be the next one, which is closed after this one
        if self.how_far(self.command) is None:
            return
        for one in self.under_way:
            try:
                one.give_up(self.command)
            except Exception as error:
                _log.warning("work that a failed command had started could not be given up: %s", error)

    def has_failed(self, command: int) -> bool:
        """Whether a command has failed on some rank, and none since."""
        return bool(self.control.words[Control.FAILED] == command)

    def commit(self) -> None:
        """Note that the command's effects are applied on this rank, so that an error can say so."""
        if self._commits:
            self.control.committed[self.number] = self.command

    @contextlib.contextmanager
    def uncommitted(self) -> Iterator[None]:
        """Have `commit` do nothing meanwhile."""
        self._commits = False
        try:
            yield
        finally:
            self._commits = True

    def finish(self) -> None:
        """Call what is in `at_finish`, and forget it: the end of a command on this rank, however it went."""
        while self.at_finish:
            self.at_finish.pop()()

    def arrive(self) -> None:
        """Come to the next step, and wait for nobody; `how_far` says, of a command that failed, when all had come."""
        control = self.control
        self._step += 1
        control.arrived[self.number] = self._step
        control.fence()
        # Ranks that come early have no news for anyone: the last to come wakes the others, and the last worker the
        # master, who may be gathering and then comes after them.
        if self._reached(self._step):
            for r in range(self.size):
                control.ring(r, FOR_STEP)
        elif not self.is_master and self._reached(self._step, besides=self.root):
            control.ring(self.root, FOR_STEP)

    def barrier(self, look: Callable[[], None] | None = None) -> None:
        """Return when every rank has come here; ``look()`` is called now and then while others are late, and may raise.

        Raises
        ------
        Cancelled
            If a rank failed in this command: it will not come, or not to the next step.
        """
        self.arrive()
        self._wait_for_step(self._step, look=look)

    def fail(self) -> None:
        """Say that the command has failed on this rank, and see to it that it is closed (see `meeting`)."""
        control, words, command = self.control, self.control.words, self.command
        with undisturbed():  # others wait for what comes behind the first line
            words[Control.FAILED] = command
            control.fence()
            # Of ranks that fail at once one does it, and between hosts the agents.
            if not self.spans_hosts and control.closing.take(0):
                if how_far(words, command) is None:
                    close(words, command, min(control.arrived))
                control.closing.ring()
            control.ring_all()

    @property
    def coming_step(self) -> int:
        """The number of the step that comes next."""
        return self._step + 1

    def how_far(self, command: int) -> int | None:
        """Return up to which step all ranks had come in a command that failed; None until it is closed (`meeting`)."""
        return how_far(self.control.words, command)

    def had_all_come(self, step: int) -> bool:
        """Whether all ranks had come to a step of this command, which has failed; all ranks find the same."""
        self._wait_until_closed(self.command)
        return (self.how_far(self.command) or 0) >= step

    def _wait_until_closed(self, command: int) -> None:
        words = self.control.words
        self.control.wait(self.number, lambda: how_far(words, command) is not None, FOR_STEP, self.watch, POLL)

    def exchange(self, value: Any) -> list[Any]:
        """Show a picklable value to all ranks, and return theirs, in rank order."""
        payload = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        return [pickle.loads(whole) for whole in self.exchange_bytes(payload)]

    def exchange_known(self, value: Hashable) -> list[Any]:
        """Do as `exchange`, faster, for values that come again and again and that nobody changes."""
        payload, digest = self._pickled(value)
        if self.agree(digest):  # nearly always
            return [value] * self.size
        return [pickle.loads(whole) for whole in self.exchange_bytes(payload)]

    def digest(self, value: Hashable) -> bytes:
        """Return what `exchange_known` shows of a value first."""
        return self._pickled(value)[1]

    def _pickled(self, value: Hashable) -> tuple[bytes, bytes]:
        known = self._known
        if len(known) > _KNOWN:
            known.clear()
        found: tuple[bytes, bytes] | None = known.get(value)
        if found is None:
            payload = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
            found = known[value] = payload, hashlib.blake2b(payload, digest_size=16).digest()
        return found

    def agree(self, digest: bytes) -> bool:
        """Show some bytes to all ranks, and return whether all have shown the same; a step of `exchange_known`."""
        step = self._open_slot(digest)
        self.barrier()
        slot, which, n = self.control.slot, step & 1, HEAD.size + len(digest)
        mine = slot(self.number, which)[:n]
        return all(slot(r, which)[:n] == mine for r in range(self.size) if r != self.number)

    def exchange_bytes(self, payload: bytes) -> list[bytes]:
        """Show bytes to all ranks, and return theirs, in rank order: as many at a time as a slot has room for."""
        parts: list[list[bytes]] = [[] for _ in range(self.size)]
        at = longest = 0
        while not at or at < longest:
            step = self._open_slot(memoryview(payload)[at : at + ROOM], len(payload))
            self.barrier()
            for r, some in enumerate(parts):
                slot = self.control.slot(r, step & 1)
                length, _ = HEAD.unpack_from(slot)
                some.append(bytes(slot[HEAD.size : HEAD.size + max(0, min(length - at, ROOM))]))
                longest = max(longest, length)
            at += ROOM
        return [b"".join(some) for some in parts]

    def gather(self, value: bytes) -> list[bytes] | None:
        """Show at most `ROOM` bytes to the master alone, without waiting for anyone.

        Return every rank's bytes in rank order, in the master; elsewhere None.
        """
        step = self._open_slot(value)
        if not self.is_master:
            self.arrive()
            return None
        self._wait_for_step(step, besides=self.number)
        values = [value if r == self.number else self._read_slot(r, step) for r in range(self.size)]
        self.arrive()
        return values

    def unfinished(self) -> bool:
        """Whether something is under way in which the peers have a part."""
        return any(one.unfinished() for one in self.under_way)

    def end(self) -> None:
        """End what is under way: the ranks end."""
        while self.under_way:
            try:
                self.under_way.pop().end()
            except Exception as error:
                _log.warning("a connection between ranks could not be given up: %s", error)

    def check(self) -> None:
        """Raise if a peer has failed (`Cancelled`) or died: for whoever waits for something else than a step."""
        if self.control.words[Control.FAILED] == self.command:
            raise Cancelled
        self.watch()

    # -- the parts of a step ---------------------------------------------------------------------------------

    def _reached(self, step: int, besides: int | None = None) -> bool:
        """Whether all ranks, or all besides one, have come as far as this step."""
        arrived = self.control.arrived
        if besides is None:
            return min(arrived) >= step
        return min([step, *arrived[:besides], *arrived[besides + 1 :]]) >= step

    def _wait_for_step(self, step: int, besides: int | None = None, look: Callable[[], None] | None = None) -> None:
        reached = self._reached
        self.wait(lambda: reached(step, besides), look)

    def wait(self, come: Callable[[], bool], look: Callable[[], None] | None = None, reason: int = FOR_STEP) -> None:
        """Return when ``come()`` is true: something that other ranks, or other machines, write in shared memory.

        They ring those who wait for this ``reason``.  ``look()`` is called now and then meanwhile, and may raise.

        Raises
        ------
        Cancelled
            If a rank failed in this command.
        """
        words, failed, command = self.control.words, Control.FAILED, self.command
        watch = self.watch
        if look is not None:

            def watch() -> None:
                self.watch()
                look()

        self.control.wait(self.number, lambda: come() or words[failed] == command, reason, watch, POLL)
        if words[failed] == command:
            raise Cancelled

    def tell(self) -> None:
        """Wake the ranks of this machine that are in `wait`, after a write of what they wait for."""
        self.control.ring_here(FOR_STEP)

    def _open_slot(self, payload: bytes | memoryview, total: int | None = None) -> int:
        """Write into this rank's slot for the next step, and return that step.

        Slots are used in turn, so that the one for this step was last used two steps ago; whoever read it then has
        taken the step in between, unless that was a `gather`, for which nobody waits: hence the wait here.
        """
        step = self._step + 1
        if self._step & _STEP_MASK and not self._reached(step - 1):
            self._wait_for_step(step - 1)
        slot = self.control.slot(self.number, step & 1)
        HEAD.pack_into(slot, 0, len(payload) if total is None else total, step)
        slot[HEAD.size : HEAD.size + len(payload)] = payload
        return step

    def _read_slot(self, rank: int, step: int) -> bytes:
        slot = self.control.slot(rank, step & 1)
        length, _ = HEAD.unpack_from(slot)
        return bytes(slot[HEAD.size : HEAD.size + length])
