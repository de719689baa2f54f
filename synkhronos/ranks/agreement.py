"""Agreement on the last step that all ranks reached before a command failed.

A collective on GPUs that one rank does not start never ends for the others, so all must cancel it; one that all ranks
have started completes, so none may cancel it.  When a command fails, the ranks therefore need the same answer to "up
to which step had all of us arrived?", although they see the failure at different times.  The answer is written once;
the command is then *decided*.

*On one machine* ranks see each other's counters.  A rank that fails marks the command as failed, reads the counters
and writes the answer, unless another rank has.

*On several hosts* each sees the others' counters with a delay.  So a host reports the last step that all of its ranks
have reached, and reports nothing more for a command once it is known to have failed::

    state of each host, for one command                    sent by its agent to all others
    open ──┬── all its ranks have reached a step ───────>  STEP, at each step
           └── a rank of it has failed,
               or another host has sent FAILED ─────────>  FAILED, once, and no STEP of this command after it
    decided ── all hosts have sent FAILED ──────────────>  nothing: the answer is the minimum of all last STEPs

Messages of a host arrive in order.  So once all hosts have sent FAILED, each host knows the same last STEP of every
host.  No rank takes part: one that computes for minutes delays nobody.  A host that stops sending is lost, and all
workers with it.

Two invariants make this correct.  The process that decides (a failing rank, an agent) reads the counters *after* the
failure was marked; a rank looks for the mark *after* it has written that it arrived.  So if a rank sees all ranks
arrived and no failure, the deciding process sees them arrived, too: a rank passes a step only if the answer includes
that step.  And a host starts the next command only when the last one is decided there: every other host has sent FAILED
before it receives that command.

`tests/ranks/test_agreement.py` explores all interleavings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from synkhronos.ranks.control import Control

#: Number of low bits of a step number that count the steps of a command; the high bits are the command's number.
STEP_BITS = 24


def record_common_step(words: Any, command: int, step: int) -> None:
    """Record the last step that all ranks reached in a failed command.

    Successive commands use two words in turn: all ranks have finished a command before the second one after it is
    posted.
    """
    words[Control.COMMON_STEP + (command & 1)] = max(step, command << STEP_BITS)


def last_common_step(words: Any, command: int) -> int | None:
    """Return the last step that all ranks reached in a failed command; None until the command is decided."""
    step: int = words[Control.COMMON_STEP + (command & 1)]
    return step if step >> STEP_BITS == command else None


class StepTally:
    """Last step and failed commands that each host has reported.

    Parameters
    ----------
    n_hosts : int
    host : int
        Number of this host.

    Attributes
    ----------
    steps : list of int
        Last reported step of each host.
    undecided : list of deque of (int, int)
        For each host, the failed commands that are not decided, and the last step that it had reported before each.
    last_failed : int
        Last failed command that this host has reported.
    """

    def __init__(self, n_hosts: int, host: int):
        self._host = host
        self.steps = [0] * n_hosts
        self.undecided: list[deque[tuple[int, int]]] = [deque() for _ in range(n_hosts)]
        self.last_failed = 0

    def update(self, failed: int, step: int) -> tuple[bool, bool]:
        """Record the state of this host and decide which messages it sends.

        Parameters
        ----------
        failed : int
            Last command that failed.  It has to be read before ``step``.
        step : int
            Last step that all ranks of this host have reached.

        Returns
        -------
        sends_step, sends_failed : bool
            Whether to send STEP, and whether to send FAILED after it.
        """
        sends_step = step > self.steps[self._host] and step >> STEP_BITS > self.last_failed
        if sends_step:
            self.steps[self._host] = step
        sends_failed = failed > self.last_failed
        if sends_failed:
            self.last_failed = failed
            self.receive_failed(self._host, failed)
        return sends_step, sends_failed

    def receive_step(self, host: int, step: int) -> None:
        """Record another host's STEP."""
        self.steps[host] = step

    def receive_failed(self, host: int, command: int) -> None:
        """Record a host's FAILED."""
        self.undecided[host].append((command, self.steps[host]))

    def pop_decided(self) -> Sequence[tuple[int, int]]:
        """Return the commands decided since the last call, each with the last step that all ranks reached."""
        decided = []
        while all(self.undecided):
            failures = [reported.popleft() for reported in self.undecided]
            (command,) = {command for command, _ in failures}
            decided.append((command, min(step for _, step in failures)))
        return decided
