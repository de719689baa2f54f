"""Memory through which collectives stream arrays from a host to the next.

`Layout`
    Where everything lies in the part of the control memory that this room has.
`Pipe`
    One end of a stream of frames: ranks of a host fill frames that its agent sends, or take those that it received.

Hosts stand in a row, and each has pipes to its neighbours only: up to the next, down to the one before.  All ranks of
a host go through the frames of a pipe together, whether they have a part in them or not.  A rank counts the frames that
it is done with, the agent those that it has moved.  Counts begin anew with each command, whose number is in their upper
bits: so what a failed command has left is older than anything that is waited for.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from synkhronos.ranks import Rank
from synkhronos.ranks.control import SCRATCH, Control

#: Bytes of a frame, at most: what ranks of a host hand each other at once.  Each costs ranks and agents some turns.
FRAME = SCRATCH
#: Frames that a pipe holds.
FRAMES = 8
#: Bytes of the text in which an agent tells of a loss.
NEWS = 4096
#: Where the count of frames ends and the number of the command begins.
COUNT_BITS = 32

#: The pipes of a host: to and from the next one, to and from the one before.
UP_OUT, UP_IN, DOWN_OUT, DOWN_IN = range(4)
#: A stream that stays on the host: how far each rank is.
HERE = 4


class Layout:
    """What lies where in the extra memory of a `Control`."""

    def __init__(self, control: Control):
        n_here = len(control.here)
        memory = control.extra
        words = memory[NEWS : NEWS + _words_bytes(n_here)].cast("Q")
        #: Room for a text.
        self.news = memory[:NEWS]
        #: One word: how many hosts come after this one in the row.
        self.beyond = words[:1]
        #: For each pipe, the frames that the agent has sent or received.
        self.moved = words[1:5]
        #: For each pipe, the bytes in each of its frames.
        self.lengths = words[5 : 5 + 4 * FRAMES]
        done = words[5 + 4 * FRAMES :]
        #: For each pipe, and the host itself, the frames that each of its ranks is done with.
        self.done = [done[i * n_here : (i + 1) * n_here] for i in range(5)]
        self._memory = memory
        self._frames_at = NEWS + _words_bytes(n_here)

    @staticmethod
    def nbytes(n_here: int) -> int:
        """Return the size of the memory for a host with so many ranks."""
        return NEWS + _words_bytes(n_here) + 4 * FRAMES * FRAME

    def frame(self, pipe: int, count: int) -> memoryview:
        """Return the memory of the frame with this count."""
        at = self._frames_at + (pipe * FRAMES + count % FRAMES) * FRAME
        return self._memory[at : at + FRAME]


def _words_bytes(n_here: int) -> int:
    return 8 * (5 + 4 * FRAMES + 5 * n_here)


class Pipe:
    """A rank's view of one of its host's pipes, or of the stream that stays there."""

    def __init__(self, rank: Rank, layout: Layout, pipe: int):
        self._rank, self._layout, self._pipe = rank, layout, pipe
        self._me = rank.number - rank.control.here.start
        self._done = layout.done[pipe]
        self._command = self._base = self._count = 0

    def _now(self) -> int:
        """Return the count of the present frame; the first of a command begins anew."""
        if self._command != self._rank.command:
            self._command = self._rank.command
            self._base = self._command << COUNT_BITS
            self._count = 0
        return self._count

    def free(self) -> np.ndarray:
        """Return the next frame to fill, as bytes, when the one that was there has been sent."""
        count = self._now()
        moved, pipe, needed = self._layout.moved, self._pipe, self._base + count - FRAMES + 1
        if count >= FRAMES and moved[pipe] < needed:
            self._rank.wait(lambda: moved[pipe] >= needed)
        return self._bytes(count)

    def come(self) -> np.ndarray:
        """Return the next frame, as bytes, when it has been received."""
        count = self._now()
        moved, pipe, needed = self._layout.moved, self._pipe, self._base + count + 1
        if moved[pipe] < needed:
            self._rank.wait(lambda: moved[pipe] >= needed)
        return self._bytes(count)

    def past(self, behind: int) -> np.ndarray:
        """Return a frame that this rank has passed on, as bytes: the last one, or one so many before it."""
        return self._bytes(self._now() - 1 - behind)

    def pass_on(self, nbytes: int = 0) -> None:
        """Be done with the present frame, in which so many bytes are to be sent; the next one is the present one."""
        count = self._now()
        self._count = count + 1
        if nbytes:
            self._layout.lengths[self._pipe * FRAMES + count % FRAMES] = nbytes  # the same on all ranks of the host
        self._done[self._me] = self._base + count + 1
        self._rank.notify_local()

    def when_all(self, behind: int = 0) -> Callable[[], bool]:
        """Return what says whether all ranks of the host are done with as many frames as this one, less ``behind``."""
        done, needed = self._done, self._base + self._now() - behind
        return lambda: min(done) >= needed

    def _bytes(self, count: int) -> np.ndarray:
        return np.frombuffer(self._layout.frame(self._pipe, count), np.uint8)
