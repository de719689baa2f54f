"""Agreement on the last barrier that all ranks reached before a command failed.

A collective on GPUs completes only if every rank starts it.  If one rank does not start it, all ranks must cancel it.
If all ranks have started it, no rank may cancel it.  When a command fails, all ranks therefore have to agree on the
last barrier that all of them had reached, the *last common barrier*.  They notice the failure at different times.  The
barrier's number is recorded once; the command is then *decided*.

*On one host* each rank reads the counters of all.  A rank that fails marks the command as failed, reads the
counters, and records the last common barrier, unless another rank has.

*On several hosts* a host gets the counters of others with a delay.  Each host therefore reports the last barrier that
all of its own ranks have reached.  Once it has noticed the failure of a command, it reports no more barriers of that
command::

    state of each host, for one command                    sent by its agent to all others
    open ──┬── all its ranks have reached a barrier ────>  BARRIER, for each one
           └── a rank of it has failed,
               or another host has sent FAILED ─────────>  FAILED, once, and no BARRIER of this command after it
    decided ── all hosts have sent FAILED ──────────────>  nothing: the last common barrier is the minimum of BARRIERs

Messages of a host arrive in order, so after all hosts have sent FAILED, all hosts know the same last BARRIER of every
host.  Only agents take part, so a rank that computes for minutes does not delay the decision.  If a host stops sending,
it is lost, and the session ends.

Two invariants make this correct:

- The process that decides (a failing rank, or an agent) reads the counters *after* the failure was marked.  A rank
  reads the mark *after* it has written its counter.  If a rank sees that all ranks have arrived and that no failure is
  marked, the deciding process therefore reads the same counters.  Hence the last common barrier is never before a
  barrier that some rank has passed.
- A host starts the next command only after the last one is decided there, because every other host sends FAILED before
  it receives the next command.

`tests/ranks/test_agreement.py` explores all interleavings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from synkhronos.ranks.control_memory import ControlMemory

#: Low bits of a barrier's number, which count the barriers of a command; the high bits are the command's number.  A
#: number has 64 bits: a command may be a program that trains for days, and a session may run commands for days.
BARRIER_BITS = 32
#: Mask of these low bits.
BARRIER_MASK = (1 << BARRIER_BITS) - 1
#: Largest number of barriers in a command, and of commands in a session.
MAX_BARRIERS, MAX_COMMANDS = BARRIER_MASK, (1 << 64 - BARRIER_BITS) - 1


def record_last_common_barrier(words: Any, command_number: int, barrier_number: int) -> None:
    """Record the number of the last barrier that all ranks reached in a failed command.

    Two words are used in turn: all ranks have finished a command before the second one after it is posted.
    """
    index = ControlMemory.COMMON_BARRIER_EVEN + (command_number & 1)
    words[index] = max(barrier_number, command_number << BARRIER_BITS)


def read_last_common_barrier(words: Any, command_number: int) -> int | None:
    """Return the number of the last barrier that all ranks reached in a failed command, or None until it is decided."""
    barrier_number: int = words[ControlMemory.COMMON_BARRIER_EVEN + (command_number & 1)]
    return barrier_number if barrier_number >> BARRIER_BITS == command_number else None


class BarrierTally:
    """The last barrier and the failed commands that each host has reported.  ``host`` is the number of this one.

    ``barrier_numbers`` has the last barrier that each host has reported.  ``undecided`` has for each host the numbers
    of its undecided failed commands, each with the last barrier that the host had reported before.
    ``last_failed_command`` is the last failed command that this host has reported.
    """

    def __init__(self, n_hosts: int, host: int):
        self._host = host
        self.barrier_numbers = [0] * n_hosts
        self.undecided: list[deque[tuple[int, int]]] = [deque() for _ in range(n_hosts)]
        self.last_failed_command = 0

    def record_own_state(self, failed_command: int, barrier_number: int) -> tuple[bool, bool]:
        """Record the state of this host.  Return whether to send BARRIER, and whether to send FAILED after it.

        ``failed_command`` is the number of the last command that failed, and must be read first.  ``barrier_number`` is
        that of the last barrier that all ranks of this host have reached.
        """
        sends_barrier = (
            barrier_number > self.barrier_numbers[self._host]
            and barrier_number >> BARRIER_BITS > self.last_failed_command
        )
        if sends_barrier:
            self.barrier_numbers[self._host] = barrier_number
        sends_failed = failed_command > self.last_failed_command
        if sends_failed:
            self.last_failed_command = failed_command
            self.receive_failed(self._host, failed_command)
        return sends_barrier, sends_failed

    def receive_barrier(self, host: int, barrier_number: int) -> None:
        """Record another host's BARRIER."""
        self.barrier_numbers[host] = barrier_number

    def receive_failed(self, host: int, command_number: int) -> None:
        """Record a host's FAILED."""
        self.undecided[host].append((command_number, self.barrier_numbers[host]))

    def pop_decided(self) -> Sequence[tuple[int, int]]:
        """Return the commands decided since the last call: the numbers of each, and of its last common barrier."""
        decided = []
        while all(self.undecided):
            failures = [reported.popleft() for reported in self.undecided]
            (command_number,) = {number for number, _ in failures}
            decided.append((command_number, min(barrier_number for _, barrier_number in failures)))
        return decided
