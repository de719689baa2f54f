"""Transport of pipe frames between hosts, over MPI: the agent's part of a collective on several hosts."""

from __future__ import annotations

from collections import deque
from typing import Any

from synkhronos.hosts.pipes import COUNT_BITS, DOWN_IN, DOWN_OUT, FRAMES, UP_IN, UP_OUT, PipeLayout
from synkhronos.ranks.control import Control


class Frames:
    """Sends and receives the frames of this host's pipes.

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
            news |= self._end(out) | self._end(into)
            self._send(out, peer)
            self._receive(into, peer)
        return news

    @property
    def are_moving(self) -> bool:
        """Whether frames are in transit; MPI makes progress only while an agent calls it."""
        return any(self._moving.values())

    def _end(self, pipe: int) -> bool:
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
        layout, coming, base = self._layout, self._moving[pipe], self._base
        # A frame of a failed command may still be in transit into memory that the new command needs.
        while (
            len(coming) < FRAMES
            and (not coming or coming[0][0] > base)
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
            coming.append((moved, self._world.Irecv([buffer, self._mpi.BYTE], peer, tag)))
