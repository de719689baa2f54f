"""Pipes: shared memory through which collectives stream arrays between neighbouring hosts.

Hosts are in a row, and each has pipes to its neighbours: up to the next, down to the previous one.  All ranks of a host
process every frame of a pipe, whether they contribute to it or not.  Each rank counts the frames that it has processed,
the agent those that it has sent or received.  A count restarts with each command, whose number is in its upper bits:
so counts of a failed command are less than any that is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from synkhronos.ranks import Rank
from synkhronos.ranks.control import SCRATCH, Control

#: Maximal number of bytes of a frame, the unit of streaming.
FRAME = SCRATCH
#: Number of frames in a pipe.
FRAMES = 8
#: Number of bytes of the message in which an agent describes a lost host or rank.
NEWS = 4096
#: Number of lower bits of a counter that count frames; the upper bits are the number of the command.
COUNT_BITS = 32

#: Pipes of a host: to and from the next host, to and from the previous one.
UP_OUT, UP_IN, DOWN_OUT, DOWN_IN = range(4)
#: Progress of each rank in a stream that stays on the host.
HERE = 4


class PipeLayout:
    """Layout of the link's part of the control memory.

    Attributes
    ----------
    news : memoryview
        Message of an agent about a loss.
    n_next_hosts : memoryview of uint64
        One word: number of hosts after this one in the row.
    moved : memoryview of uint64
        Number of frames that the agent has sent or received, by pipe.
    lengths : memoryview of uint64
        Number of bytes in each frame, by pipe.
    done : list of memoryview of uint64
        Number of frames that each rank has processed, by pipe and for `HERE`.
    """

    def __init__(self, control: Control):
        n_here = len(control.local_ranks)
        memory = control.extra
        words = memory[NEWS : NEWS + _compute_words_nbytes(n_here)].cast("Q")
        self.news = memory[:NEWS]
        self.n_next_hosts = words[:1]
        self.moved = words[1:5]
        self.lengths = words[5 : 5 + 4 * FRAMES]
        done = words[5 + 4 * FRAMES :]
        self.done = [done[i * n_here : (i + 1) * n_here] for i in range(5)]
        self._memory = memory
        self._frames_at = NEWS + _compute_words_nbytes(n_here)

    @staticmethod
    def nbytes(n_here: int) -> int:
        """Return the size of the memory of a host with ``n_here`` ranks."""
        return NEWS + _compute_words_nbytes(n_here) + 4 * FRAMES * FRAME

    def frame(self, pipe: int, count: int) -> memoryview:
        """Return the memory of the frame number ``count``."""
        at = self._frames_at + (pipe * FRAMES + count % FRAMES) * FRAME
        return self._memory[at : at + FRAME]


def _compute_words_nbytes(n_here: int) -> int:
    return 8 * (5 + 4 * FRAMES + 5 * n_here)


class Pipe:
    """A rank's end of one of its host's pipes, or of the stream that stays on the host.

    Parameters
    ----------
    rank : Rank
    layout : PipeLayout
    pipe : int
    """

    def __init__(self, rank: Rank, layout: PipeLayout, pipe: int):
        self._rank, self._layout, self._pipe = rank, layout, pipe
        self._me = rank.number - rank.control.local_ranks.start
        self._done = layout.done[pipe]
        self._command = self._base = self._count = 0

    def _frame_number(self) -> int:
        """Return the number of the current frame; 0 at the start of a command."""
        if self._command != self._rank.command_number:
            self._command = self._rank.command_number
            self._base = self._command << COUNT_BITS
            self._count = 0
        return self._count

    def wait_writable(self) -> np.ndarray:
        """Wait until the current frame's memory is free, and return it as bytes."""
        count = self._frame_number()
        moved, pipe, needed = self._layout.moved, self._pipe, self._base + count - FRAMES + 1
        if count >= FRAMES and moved[pipe] < needed:
            self._rank.wait(lambda: moved[pipe] >= needed)
        return self._view_bytes(count)

    def wait_readable(self) -> np.ndarray:
        """Wait until the current frame has been received, and return it as bytes."""
        count = self._frame_number()
        moved, pipe, needed = self._layout.moved, self._pipe, self._base + count + 1
        if moved[pipe] < needed:
            self._rank.wait(lambda: moved[pipe] >= needed)
        return self._view_bytes(count)

    def view_previous_frame(self, n_earlier: int) -> np.ndarray:
        """Return a frame that this rank has processed, as bytes: the last, or ``n_earlier`` frames before it."""
        return self._view_bytes(self._frame_number() - 1 - n_earlier)

    def advance(self, nbytes: int = 0) -> None:
        """Finish the current frame, whose first ``nbytes`` are to be sent, and advance to the next."""
        count = self._frame_number()
        self._count = count + 1
        if nbytes:
            self._layout.lengths[self._pipe * FRAMES + count % FRAMES] = nbytes  # equal on all ranks of the host
        self._done[self._me] = self._base + count + 1
        self._rank.notify_local()

    def make_all_done(self, n_earlier: int = 0) -> Callable[[], bool]:
        """Return a predicate: have all ranks of the host processed all but this rank's last ``n_earlier`` frames?"""
        done, needed = self._done, self._base + self._frame_number() - n_earlier
        return lambda: min(done) >= needed

    def _view_bytes(self, count: int) -> np.ndarray:
        return np.frombuffer(self._layout.frame(self._pipe, count), np.uint8)


class FrameTransport:
    """The agent's end of its host's pipes: sends and receives their frames over MPI.

    The tag of a message is the number of the command, modulo `_TAGS`.  Frames arrive in order, so both ends count them.

    Parameters
    ----------
    mpi : module
    world : mpi4py.MPI.Comm
        A communicator for frames alone.
    control : Control
    layout : PipeLayout
    """

    #: Number of commands that tags distinguish: every MPI has as many tags.
    _TAGS = 1 << 15

    def __init__(self, mpi: Any, world: Any, control: Control, layout: PipeLayout):
        self._mpi, self._world = mpi, world
        self._control, self._layout = control, layout
        me, last = world.rank, world.size - 1
        self._ends = [
            *([(UP_OUT, DOWN_IN, me + 1)] if me < last else []),
            *([(DOWN_OUT, UP_IN, me - 1)] if me > 0 else []),
        ]
        pipes = UP_OUT, DOWN_OUT, UP_IN, DOWN_IN
        self._next = dict.fromkeys(pipes, 0)
        #: Requests of frames in transit by pipe, each with the number of frames moved once it completes.
        self._moving: dict[int, deque[tuple[int, Any]]] = {pipe: deque() for pipe in pipes}
        self._command = self._base = 0
        self._status = mpi.Status()

    def progress(self) -> bool:
        """Start and complete transfers without waiting; return True if ranks have to be notified."""
        command = self._control.words[Control.POSTED]
        if command != self._command:
            self._command, self._base = command, command << COUNT_BITS
            self._next = dict.fromkeys(self._next, 0)
        news = False
        for out, into, peer in self._ends:
            news |= self._complete(out) | self._complete(into)
            self._send(out, peer)
            self._receive(into, peer)
        return news

    @property
    def has_transfers(self) -> bool:
        """Whether frames are in transit; MPI makes progress only while an agent calls it."""
        return any(self._moving.values())

    def _complete(self, pipe: int) -> bool:
        """Remove completed transfers; return True if one belongs to the current command."""
        moving, news = self._moving[pipe], False
        while moving and moving[0][1].Test():
            moved = moving.popleft()[0]
            if moved > self._base:
                self._layout.moved[pipe] = moved
                news = True
        return news

    def _send(self, pipe: int, peer: int) -> None:
        layout, base = self._layout, self._base
        filled = min(layout.done[pipe])
        while base + self._next[pipe] < filled:
            count = self._next[pipe]
            frame = layout.frame(pipe, count)[: layout.lengths[pipe * FRAMES + count % FRAMES]]
            tag = self._command % self._TAGS
            self._moving[pipe].append((base + count + 1, self._world.Isend([frame, self._mpi.BYTE], peer, tag)))
            self._next[pipe] = count + 1

    def _receive(self, pipe: int, peer: int) -> None:
        layout, arriving, base = self._layout, self._moving[pipe], self._base
        # A frame of a failed command may still be in transit into memory that the new command needs.
        while (
            len(arriving) < FRAMES
            and (not arriving or arriving[0][0] > base)
            and self._world.Iprobe(peer, self._mpi.ANY_TAG, self._status)
        ):
            tag, nbytes = self._status.tag, self._status.Get_count(self._mpi.BYTE)
            later = (tag - self._command) % self._TAGS
            if later == 0:
                count = self._next[pipe]
                if count >= FRAMES and min(layout.done[pipe]) < base + count - FRAMES + 1:
                    break  # its memory is in use
                buffer: Any = layout.frame(pipe, count)[:nbytes]
                self._next[pipe] = count + 1
                moved = base + count + 1
            elif later < self._TAGS // 2:
                break  # of a command that this host has not received yet
            else:  # of a failed command
                buffer, moved = bytearray(nbytes), 0
            arriving.append((moved, self._world.Irecv([buffer, self._mpi.BYTE], peer, tag)))
