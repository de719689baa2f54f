"""Had all ranks come to a step when a command failed?  All ranks find the same.

A collective on GPUs that one rank does not start never ends for the others, and all must give it up; one that all have
started comes to its end, and none may.  So when a command fails ranks have to agree how far all of them had come in it,
though they hear of the failure at different times.  What they agree on is written down once: the command is *closed*.

*On one machine* ranks see each other's counters.  A rank that fails says so, looks how far all have come, and writes
that down, unless another one has.

*On several hosts* each sees the others' counters later than they are.  So a host says for each command up to which step
all of its ranks have come, and, if the command fails, that it says no more::

    of each host, for one command                          by its agent, to all others
    open ──┬── all ranks here have come to a step ──────>  STEP, as often as they do
           └── a rank here has failed,
               or another host has said FAILED ─────────>  FAILED, once, and no STEP of this command after it
    closed ─── all hosts have said FAILED ──────────────>  nothing: the answer is the least of all last STEPs

Messages from a host come in the order in which they were sent.  So when all have said FAILED each host has the same
last STEP of every host.  No rank has a part in it: one that computes for minutes holds nobody up.  A host that says
nothing any more is lost, and all workers with it.

Two things make it right.  Who closes (a rank that fails, an agent) looks at the counters *after* the word that the
command has failed; a rank looks for that word *after* it has written that it came.  So what a rank has found, all there
and no failure, is found by who closes, too: a rank that passes a step has come to it for all.  And the next command
begins on a host when the last one is closed there: of several hosts, each has said FAILED before it hears of that
command.

`tests/test_meeting.py` goes through all orders in which this can happen.

`Tally`
    What an agent has heard, and what it has to say.
`how_far`, `close`
    What ranks read, and who decides writes, in the control memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from synkhronos.ranks.control import Control

#: Steps of one command: the lower bits of the counter in which a rank says how far it has come.
STEP_BITS = 24


def close(words: Any, command: int, step: int) -> None:
    """Write down up to which step all ranks had come in a command that failed.

    There is a word for this command and one for the next: a rank is done with that before a third one is posted.
    """
    words[Control.CLOSED + (command & 1)] = max(step, command << STEP_BITS)


def how_far(words: Any, command: int) -> int | None:
    """Return up to which step all ranks had come in a command that failed; None as long as it isn't closed."""
    step: int = words[Control.CLOSED + (command & 1)]
    return step if step >> STEP_BITS == command else None


class Tally:
    """What hosts have told each other of steps and failures; ``me`` is this host."""

    def __init__(self, n_hosts: int, me: int):
        self._me = me
        #: The last step of each host, and its failed commands that are not closed, each with the last step before it.
        self.steps = [0] * n_hosts
        self.failures: list[deque[tuple[int, int]]] = [deque() for _ in range(n_hosts)]
        #: The last failure that this host has told.
        self.failed = 0

    def here(self, failed: int, step: int) -> tuple[bool, bool]:
        """Note how it is on this host, and return whether it says STEP, and whether behind that it says FAILED.

        ``failed`` is the last command that failed, and has to be read before ``step``, the last to which all ranks of
        this host have come.
        """
        says_step = step > self.steps[self._me] and step >> STEP_BITS > self.failed
        if says_step:
            self.steps[self._me] = step
        says_failed = failed > self.failed
        if says_failed:
            self.failed = failed
            self.heard_failed(self._me, failed)
        return says_step, says_failed

    def heard_step(self, host: int, step: int) -> None:
        """Take another host's STEP."""
        self.steps[host] = step

    def heard_failed(self, host: int, command: int) -> None:
        """Take a host's FAILED."""
        self.failures[host].append((command, self.steps[host]))

    def closed(self) -> Sequence[tuple[int, int]]:
        """Return the commands that are closed since the last time, each with the last step to which all have come."""
        closed = []
        while all(self.failures):
            of_all = [each.popleft() for each in self.failures]
            (command,) = {command for command, _ in of_all}
            closed.append((command, min(step for _, step in of_all)))
        return closed
