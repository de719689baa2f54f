"""An agent's part in pipes: it moves frames from host to host, over MPI.

`Frames`
    Those of one host.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from synkhronos.hosts.pipes import COUNT_BITS, DOWN_IN, DOWN_OUT, FRAMES, UP_IN, UP_OUT, Layout
from synkhronos.ranks.control import Control


class Frames:
    """Moves the frames of this host's pipes to and from its neighbours.

    A message's tag says to which command its frame belongs.  Frames come in order, so that both ends count them.
    """

    #: Commands that a tag tells apart: as many tags as every MPI has.
    _TAGS = 1 << 15

    def __init__(self, mpi: Any, world: Any, control: Control, layout: Layout):
        self._mpi, self._world = mpi, world
        self._control, self._layout = control, layout
        me, last = world.rank, world.size - 1
        self._ends = [
            *([(UP_OUT, DOWN_IN, me + 1)] if me < last else []),
            *([(DOWN_OUT, UP_IN, me - 1)] if me > 0 else []),
        ]
        pipes = UP_OUT, DOWN_OUT, UP_IN, DOWN_IN
        self._next = dict.fromkeys(pipes, 0)
        #: For each pipe, the requests of frames on their way, each behind how many have moved then.
        self._moving: dict[int, deque[tuple[int, Any]]] = {pipe: deque() for pipe in pipes}
        self._command = self._base = 0
        self._status = mpi.Status()

    def move(self) -> bool:
        """Begin and end what can be; return whether a rank has something new to see."""
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
        """Whether some are on their way, which go on only while an agent looks at them."""
        return any(self._moving.values())

    def _end(self, pipe: int) -> bool:
        """Let go of what has moved; return whether some of it was the present command's."""
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
        # Content of a failed command may be on its way into a frame that the new one needs.
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
                    break  # its place is taken
                room: Any = layout.frame(pipe, count)[:nbytes]
                self._next[pipe] = count + 1
                moved = base + count + 1
            elif later < self._TAGS // 2:
                break  # of a command that this host has not heard of yet
            else:  # of one that has failed
                room, moved = bytearray(nbytes), 0
            coming.append((moved, self._world.Irecv([room, self._mpi.BYTE], peer, tag)))
