"""Barriers of a command, which have numbers.

Each rank counts the barriers of a command, and passes a barrier once every counter has reached its number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from synkhronos.ranks.agreement import (
    BARRIER_BITS,
    BARRIER_MASK,
    MAX_BARRIERS,
    read_last_common_barrier,
    record_last_common_barrier,
)
from synkhronos.ranks.control_memory import AWAITS_BARRIER, POLL_SECONDS, ControlMemory
from synkhronos.ranks.errors import Cancelled
from synkhronos.ranks.interrupts import defer_signals


class CommandBarriers:
    """One rank's barriers in the current command, and the failure of the command on any rank.

    ``last_arrived`` is the number of the last barrier at which this rank has arrived; its high bits are the number of
    the command.  ``check_peers`` raises, or ends this process, when a peer has died.
    """

    def __init__(self, rank_number: int, master_rank: int, control: ControlMemory, check_peers: Callable[[], None]):
        self._rank_number, self._master_rank, self._control = rank_number, master_rank, control
        self.check_peers = check_peers
        self.last_arrived = 0
        self._agents_decide = len(control.local_ranks) < control.size
        self._deferred_signals: defer_signals | None = None

    def cancel_all_waits(self) -> None:
        """Cancel all waits of this process for the other ranks, which have exited: mark the command as failed."""
        self._control.mark_all_done()
        self._agents_decide = False  # the agents have exited
        self.fail_command()
        self.check_peers = lambda: None  # it refers to the session: a cycle, which would delay the release of memory

    @property
    def command_number(self) -> int:
        """Number of the current command."""
        return self.last_arrived >> BARRIER_BITS

    @property
    def has_failed(self) -> bool:
        """Whether the current command has failed on some rank."""
        return self._control.words[ControlMemory.FAILED] == self.last_arrived >> BARRIER_BITS

    @property
    def next_number(self) -> int:
        """Number of the next barrier."""
        return self.last_arrived + 1

    # -- waiting ---------------------------------------------------------------------------------------------

    def arrive(self) -> bool:
        """Arrive at the next barrier without waiting for the others.  Return True if all have arrived."""
        control = self._control
        if self.last_arrived & BARRIER_MASK == MAX_BARRIERS:  # the next number is one of the next command
            raise RuntimeError(f"a command, or a program of synkhronos.run, can have at most {MAX_BARRIERS:,} barriers")
        self.last_arrived += 1
        control.arrived[self._rank_number] = self.last_arrived
        control.fence()
        # The last rank to arrive wakes all others.  In a `Rank.gather_bytes` the master arrives after the workers: the
        # last worker wakes it.
        is_last = self.have_all_arrived(self.last_arrived)
        if is_last:
            control.wake_local_ranks_after_fence(AWAITS_BARRIER)
        elif self._rank_number != self._master_rank and self.have_all_arrived(self.last_arrived, self._master_rank):
            control.wake(self._master_rank, AWAITS_BARRIER)
        return is_last

    def arrive_and_wait(self) -> None:
        """Arrive at the next barrier, and wait until every rank has.

        If a rank fails, all ranks raise `Cancelled`, or none of them if all had arrived before: see `agreement`.
        """
        try:
            if not self.arrive():
                self.wait_for_barrier(self.last_arrived)
            elif self.has_failed:
                raise Cancelled
        except Cancelled:
            if not self.wait_and_check_all_reached(self.last_arrived):
                raise

    def have_all_arrived(self, number: int, excluded: int | None = None) -> bool:
        """Whether all ranks, or all but one, have arrived at a barrier."""
        if excluded is None:
            return min(self._control.arrived) >= number
        arrived = list(self._control.arrived)
        arrived[excluded] = number
        return min(arrived) >= number

    def wait_for_barrier(
        self, number: int, excluded: int | None = None, on_poll: Callable[[], None] | None = None
    ) -> None:
        """Wait, as `wait_until`, until all ranks, or all but one, have arrived at a barrier."""
        if not self.have_all_arrived(number, excluded):
            self.wait_until(lambda: self.have_all_arrived(number, excluded), on_poll)
        elif self.has_failed:
            raise Cancelled

    def wait_until(
        self, is_ready: Callable[[], bool], on_poll: Callable[[], None] | None = None, reason: int = AWAITS_BARRIER
    ) -> None:
        """Wait until a condition on shared memory holds.  Raise `Cancelled` if a rank failed in this command.

        ``on_poll`` is called repeatedly while waiting, and may raise.  The rank that makes the condition true wakes the
        ranks that sleep for this reason.
        """
        words, failed_index, command_number = self._control.words, ControlMemory.FAILED, self.command_number

        def poll() -> None:
            self.check_peers()
            if self._deferred_signals is not None:
                self._deferred_signals.stop_deferring_if_late()
            if on_poll is not None:
                on_poll()

        def is_over() -> bool:
            return is_ready() or words[failed_index] == command_number

        self._control.wait(self._rank_number, is_over, reason, poll, POLL_SECONDS)
        if words[failed_index] == command_number:
            raise Cancelled

    def check_cancelled(self) -> None:
        """Raise `Cancelled` if a peer has failed, and call `check_peers`: for waits that are not for a barrier."""
        if self.has_failed:
            raise Cancelled
        self.check_peers()
        if self._deferred_signals is not None:
            self._deferred_signals.stop_deferring_if_late()

    def defer_signals_until_late(self) -> defer_signals:
        """Defer signals as `defer_signals`, but for `MAX_DEFERRAL_SECONDS` at most if this rank waits for others."""
        return _DeferSignalsUntilLate(self)

    # -- failed commands -------------------------------------------------------------------------------------

    def fail_command(self) -> None:
        """Mark the command as failed, wake all waiting ranks, and record the last barrier that every rank reached."""
        control, words, command_number = self._control, self._control.words, self.command_number
        with defer_signals():  # once FAILED is set, peers wait for the decision and to be woken
            words[ControlMemory.FAILED] = command_number
            control.fence()
            # One of the ranks that fail at the same time decides the command; on several hosts the agents do.
            if not self._agents_decide and control.decision_lock.acquire(0):
                if read_last_common_barrier(words, command_number) is None:
                    record_last_common_barrier(words, command_number, min(control.arrived))
                control.decision_lock.release()
            control.wake_all_ranks()

    @property
    def last_failed_command(self) -> int:
        """Number of the last command that has failed on some rank, or 0 if none has."""
        return self._control.words[ControlMemory.FAILED]

    def read_last_common_barrier(self, command_number: int) -> int | None:
        """Return the number of the last barrier that all ranks reached in a failed command, or None until decided."""
        return read_last_common_barrier(self._control.words, command_number)

    def wait_until_decided(self, command_number: int) -> None:
        """Wait until a failed command is decided; see `agreement`."""

        def is_decided() -> bool:
            return self.read_last_common_barrier(command_number) is not None

        self._control.wait(self._rank_number, is_decided, AWAITS_BARRIER, self.check_peers, POLL_SECONDS)

    def wait_and_check_all_reached(self, number: int) -> bool:
        """Wait until this failed command is decided; return True if all ranks had reached a barrier before the failure.

        The answer is the same on all ranks.
        """
        command_number = self.command_number
        self.wait_until_decided(command_number)
        return (self.read_last_common_barrier(command_number) or 0) >= number


class _DeferSignalsUntilLate(defer_signals):  # not a generator's context manager, since each training step enters it
    """The block of `CommandBarriers.defer_signals_until_late`."""

    def __init__(self, barriers: CommandBarriers):
        self._barriers = barriers

    def __enter__(self) -> Self:
        self._barriers._deferred_signals = super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._barriers._deferred_signals = None
        super().__exit__(*error)
