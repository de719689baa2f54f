"""NumPy arrays, combined by ranks on several hosts.

`ChainCommunicator`
    Streams arrays along the row of hosts.

A reduction goes up the row and comes down again.  On each host the ranks add theirs, in rank order, to what has come
from the host before, each rank its share of the elements; the last host's result goes back.  So every element is
reduced in the order of ranks, and results have the same bits as on one host.  Several chunks are under way at once::

    host 0   r0 + r1  -->  host 1   (..) + r2 + r3  -->  host 2   (....) + r4 + r5
             result   <--           result          <--           = result
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from synkhronos.devices.communicator import ArrayLayout
from synkhronos.devices.host_communicator import HostCommunicator, as_bytes, count_bytes, reduce_arrays
from synkhronos.devices.reductions import REDUCTIONS
from synkhronos.hosts.pipes import DOWN_IN, DOWN_OUT, FRAME, FRAMES, HERE, UP_IN, UP_OUT, Pipe, PipeLayout
from synkhronos.ranks import Rank

#: Chunks whose results the ranks of the last host have not taken yet, at most: a frame must not be filled anew before.
_ON_LAST = FRAMES - 2


class ChainCommunicator(HostCommunicator):
    """Collectives over NumPy arrays of ranks on several hosts."""

    def __init__(self, rank: Rank):
        super().__init__(rank)
        layout, self._here = PipeLayout(rank.control), rank.control.here
        self._n_next_hosts = layout.n_next_hosts
        self._up_out, self._up_in, self._down_out, self._down_in, self._local = (
            Pipe(rank, layout, pipe) for pipe in (UP_OUT, UP_IN, DOWN_OUT, DOWN_IN, HERE)
        )
        self._is_first, self._is_last = self._here.start == 0, self._here.stop == rank.size

    def broadcast(self, array: np.ndarray, root: int) -> None:
        """Copy the root's array into every other rank's, in place."""
        mine = as_bytes(array)
        self._flow(mine if self._rank.number == root else None, mine, mine.size, root, range(self._rank.size))

    def reduce_scatter(self, array: np.ndarray, op: str, bounds: Sequence[int], out: np.ndarray) -> None:
        """Write this rank's items of the reduction over all ranks into ``out``, one rank's after another's."""
        rank, source, target = self._rank, array.reshape(-1), out.reshape(-1)
        for r, (start, stop) in enumerate(pairwise(bounds)):
            mine = target if r == rank.number else None
            self._reduce(source[start:stop], mine, op, stop - start, array.dtype, range(rank.size))

    def gather(
        self,
        array: np.ndarray | None,
        root: int | None,
        layouts: Sequence[ArrayLayout | None],
        out: Sequence[np.ndarray | None] | None,
    ) -> None:
        """Copy rank r's array into ``out[r]`` on the root, or on every rank if ``root`` is None."""
        rank = self._rank
        for r, layout in enumerate(layouts):
            target = None if out is None else out[r]
            mine = array if r == rank.number else None
            if mine is not None and target is not None:
                target.reshape(-1)[:] = mine.reshape(-1)
            if layout is not None and r != root:
                to = range(rank.size) if root is None else range(root, root + 1)
                source = None if mine is None else as_bytes(mine)
                self._flow(source, None if target is None else as_bytes(target), count_bytes(layout), r, to)

    def _flow(self, source: np.ndarray | None, target: np.ndarray | None, size: int, root: int, to: range) -> None:
        """Stream so many bytes from the root, through all hosts on the way, to a run of ranks.

        Parameters
        ----------
        source, target : ndarray or None
            The root's bytes; where this rank wants them, if it does.
        """
        here, me = self._here, self._rank.number
        from_below, from_above = root < here.start, root >= here.stop
        if (from_below and to.stop <= here.start) or (from_above and to.start >= here.stop):
            return  # none of it comes this way
        into = self._up_in if from_below else self._down_in if from_above else self._local
        outs = []
        if not self._is_last and not from_above and to.stop > here.stop:
            outs.append(self._up_out)
        if not self._is_first and not from_below and to.start < here.start:
            outs.append(self._down_out)
        for at in range(0, size, FRAME):
            n = min(FRAME, size - at)
            if into is self._local:
                content = self._next_halves()[root - here.start][:n]
                if me == root and source is not None:
                    content[:] = source[at : at + n]
                self._local.advance()
                self._rank.wait(self._local.make_all_done())
            else:
                content = into.wait_readable()[:n]
            for out in outs:
                frame = out.wait_writable()
                if me == here.start:
                    frame[:n] = content
                out.advance(n)
            if target is not None and me != root:
                target[at : at + n] = content
            if into is not self._local:
                into.advance()

    def _reduce(
        self,
        source: np.ndarray | None,
        target: np.ndarray | None,
        op: str,
        size: int,
        dtype: np.dtype,
        contributors: Sequence[int],
    ) -> None:
        """Reduce ``source`` over the contributors into every rank's ``target``, where there is one."""
        rank, here, row = self._rank, self._here, REDUCTIONS[op]
        wide = row.accumulator_dtype(dtype)
        each = FRAME // wide.itemsize
        waiting: list[tuple[int, int]] = []  # chunks whose results have not come yet
        place = rank.number - here.start
        for at in range(0, size, each):
            count = min(each, size - at)
            low, high = (count * i // len(here) for i in (place, place + 1))
            halves = [half[: count * dtype.itemsize].view(dtype) for half in self._next_halves()]
            if source is not None:
                part = source[at : at + count]
                halves[place][:low] = part[:low]
                halves[place][high:] = part[high:]
            self._local.advance()
            rank.wait(self._local.make_all_done())
            inputs = [
                source[at + low : at + high]
                if r == rank.number and source is not None
                else halves[r - here.start][low:high]
                for r in contributors
                if r in here
            ]
            so_far = None
            if not self._is_first:
                so_far = self._up_in.wait_readable()[: count * wide.itemsize].view(wide)[low:high]
            out = self._down_out if self._is_last else self._up_out
            result = out.wait_writable()[: count * wide.itemsize].view(wide)[low:high]
            if so_far is not None and contributors[0] < here.start:
                inputs.insert(0, so_far)
            reduce_arrays(inputs, row, result)
            if self._is_last and row.divides:
                np.true_divide(result, len(contributors), out=result)
            if not self._is_first:
                self._up_in.advance()
            out.advance(count * wide.itemsize)
            waiting.append((at, count))
            if len(waiting) > self._under_way:
                self._take(target, waiting.pop(0), wide, len(waiting))
        while waiting:
            self._take(target, waiting.pop(0), wide, len(waiting))

    @property
    def _under_way(self) -> int:
        """How many chunks may be under way between this host and the last one, or wait there.

        The way is longer for the first hosts.  Each hop has room for four times as many as it adds here, so that hosts
        whose frames are full never wait for each other in a circle.
        """
        return _ON_LAST if self._is_last else FRAMES * self._n_next_hosts[0]

    def _take(self, target: np.ndarray | None, chunk: tuple[int, int], wide: np.dtype, behind: int) -> None:
        """Copy a chunk of the result to where it is wanted, and pass it on to the host before.

        ``behind`` is how many chunks this rank has begun since.
        """
        at, count = chunk
        if self._is_last:
            self._rank.wait(self._down_out.make_all_done(behind))
            result = self._down_out.previous_frame(behind)[: count * wide.itemsize].view(wide)
        else:
            result = self._down_in.wait_readable()[: count * wide.itemsize].view(wide)
            if not self._is_first:
                frame = self._down_out.wait_writable()
                if self._rank.number == self._here.start:
                    frame[: count * wide.itemsize] = as_bytes(result)
                self._down_out.advance(count * wide.itemsize)
        if target is not None:
            target[at : at + count] = result
        if not self._is_last:
            self._down_in.advance()
