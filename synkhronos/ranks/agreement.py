"""Agreement on the last step that all ranks reached before a command failed.

If one rank does not start a collective on GPUs, it never ends on the others, so all ranks must cancel it.  If all ranks
have started it, it completes, so no rank may cancel it.  When a command fails, all ranks therefore have to agree on the
last step that all of them had reached (the *last common step*), although they notice the failure at different times.
This step is recorded once; the command is then *decided*.

*On one host* each rank reads the counters of all.  A rank that fails marks the command as failed, reads the
counters, and records the last common step, unless another rank has.

*On several hosts* a host gets the counters of others with a delay.  So a host reports the last step that all of its
ranks have reached.  Once it has noticed the failure of a command, it reports no more steps of it::

    state of each host, for one command                    sent by its agent to all others
    open ──┬── all its ranks have reached a step ───────>  STEP, at each step
           └── a rank of it has failed,
               or another host has sent FAILED ─────────>  FAILED, once, and no STEP of this command after it
    decided ── all hosts have sent FAILED ──────────────>  nothing: the last common step is the minimum of all STEPs

Messages of a host arrive in order.  So after all hosts have sent FAILED, all hosts have the same last STEP of every
host.  Only agents take part, so a rank that computes for minutes does not delay the decision.  If a host stops sending,
it is lost, and the session ends.

Two invariants make this correct.  First, the process that decides (a failing rank, or an agent) reads the counters
*after* the failure was marked, and a rank reads the mark *after* it has written its counter.  So if a rank reads that
all ranks have arrived and no failure is marked, the deciding process reads the same counters: a rank passes a step only
if the last common step is not before that step.  Second, a host starts the next command only after the last one is
decided there, as every other host sends FAILED before it receives the next command.

`tests/ranks/test_agreement.py` explores all interleavings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from synkhronos.ranks.control_memory import ControlMemory

#: Number of low bits of a step number that count the steps of a command; the high bits are the command's number.
STEP_BITS = 24


def record_common_step(words: Any, command_number: int, step: int) -> None:
    """Record the last step that all ranks reached in a failed command.

    Two words are used in turn: all ranks have finished a command before the second one after it is posted.
    """
    words[ControlMemory.COMMON_STEP + (command_number & 1)] = max(step, command_number << STEP_BITS)


def read_common_step(words: Any, command_number: int) -> int | None:
    """Return the last step that all ranks reached in a failed command; None until the command is decided."""
    step: int = words[ControlMemory.COMMON_STEP + (command_number & 1)]
    return step if step >> STEP_BITS == command_number else None


class StepTally:
    """Last step and failed commands that each host has reported; ``host`` is the number of this one.

    ``undecided`` has for each host the numbers of the failed commands that are not decided, and the last step that it
    had reported before each.  ``last_failed`` is the last failed command that this host has reported.
    """

    def __init__(self, n_hosts: int, host: int):
        self._host = host
        self.steps = [0] * n_hosts
        self.undecided: list[deque[tuple[int, int]]] = [deque() for _ in range(n_hosts)]
        self.last_failed = 0

    def record_own_state(self, failed_command: int, step: int) -> tuple[bool, bool]:
        """Record the state of this host; return whether to send STEP, and whether to send FAILED after it.

        ``failed_command`` is the number of the last command that failed, read before ``step``, the last step that all
        ranks of this host have reached.
        """
        sends_step = step > self.steps[self._host] and step >> STEP_BITS > self.last_failed
        if sends_step:
            self.steps[self._host] = step
        sends_failed = failed_command > self.last_failed
        if sends_failed:
            self.last_failed = failed_command
            self.receive_failed(self._host, failed_command)
        return sends_step, sends_failed

    def receive_step(self, host: int, step: int) -> None:
        """Record another host's STEP."""
        self.steps[host] = step

    def receive_failed(self, host: int, command_number: int) -> None:
        """Record a host's FAILED."""
        self.undecided[host].append((command_number, self.steps[host]))

    def pop_decided(self) -> Sequence[tuple[int, int]]:
        """Return the commands decided since the last call: their numbers, and the last step that all ranks reached."""
        decided = []
        while all(self.undecided):
            failures = [reported.popleft() for reported in self.undecided]
            (command_number,) = {number for number, _ in failures}
            decided.append((command_number, min(step for _, step in failures)))
        return decided
