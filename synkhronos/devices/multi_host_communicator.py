"""Collectives over NumPy arrays of ranks on several hosts.

Hosts form a chain.  Arrays are streamed along it in chunks, through the pipes between neighbours.  A reduction passes
all hosts up the chain, and its result passes them down again::

    host 0   r0 + r1  -->  host 1   (..) + r2 + r3  -->  host 2   (....) + r4 + r5
             result   <--           result          <--           = result

On each host, a chunk's elements are divided among the ranks.  For its elements, a rank adds the inputs of all ranks of
the host, in rank order, to the partial sum of the previous host.  Every element is thus reduced in rank order, and
results are bitwise equal to those on one host.

A chunk takes long to pass up and down, so a host begins further chunks before the result of the first one arrives.
Their number is limited: see `MultiHostCommunicator._max_pending_chunks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from synkhronos.devices.communicator import ArrayLayout
from synkhronos.devices.reduce_op import REDUCE_OPS, divide_in_place
from synkhronos.devices.shared_memory_communicator import (
    SharedMemoryCommunicator,
    accumulate_arrays,
    compute_nbytes,
    copy_bytes,
    view_bytes,
)
from synkhronos.ranks import Rank
from synkhronos.ranks.pipes import (
    DOWN_IN,
    DOWN_OUT,
    FRAME_NBYTES,
    LOCAL_STREAM,
    N_FRAMES,
    UP_IN,
    UP_OUT,
    LinkMemory,
    PipeEnd,
)

#: Maximal number of chunks on the last host whose results are not copied yet.  Their frames may have been sent already,
#: so that the pipe itself would allow ranks to overwrite them.
_MAX_PENDING_ON_LAST_HOST = N_FRAMES - 2


class MultiHostCommunicator(SharedMemoryCommunicator):
    """Collectives over NumPy arrays of ranks on several hosts, through shared memory and pipes between hosts."""

    def __init__(self, rank: Rank):
        super().__init__(rank)
        link_memory, self._local_ranks = LinkMemory(rank.control), rank.local_ranks
        self._n_next_hosts_word = link_memory.n_next_hosts_word
        self._up_out, self._up_in, self._down_out, self._down_in, self._local_stream = (
            PipeEnd(rank, link_memory, pipe) for pipe in (UP_OUT, UP_IN, DOWN_OUT, DOWN_IN, LOCAL_STREAM)
        )
        self._is_first, self._is_last = self._local_ranks.start == 0, self._local_ranks.stop == rank.size

    @property
    def max_small_nbytes(self) -> int:
        """Return 0: ranks of other hosts can't read this host's scratch memory."""
        return 0

    def broadcast(self, array: np.ndarray, root: int) -> None:
        content = view_bytes(array)
        self._stream_bytes(
            content if self._rank.number == root else None, content, content.size, root, range(self._rank.size)
        )

    def reduce_scatter(self, array: np.ndarray, op: str, bounds: Sequence[int], out: np.ndarray) -> None:
        """Write this rank's items of the reduction over all ranks into ``out``; one reduction per rank."""
        rank, source, target = self._rank, array.reshape(-1), out.reshape(-1)
        for r, (start, stop) in enumerate(pairwise(bounds)):
            own_target = target if r == rank.number else None
            self._reduce(source[start:stop], own_target, op, stop - start, array.dtype, range(rank.size))

    def _gather_to(
        self,
        receivers: range,
        array: np.ndarray | None,
        layouts: Sequence[ArrayLayout | None],
        out: Sequence[np.ndarray | None] | None,
    ) -> None:
        rank = self._rank
        for r, layout in enumerate(layouts):
            target = None if out is None else out[r]
            source = array if r == rank.number else None
            if source is not None and target is not None:
                copy_bytes(view_bytes(source), 0, view_bytes(target))
            if layout is not None and receivers != range(r, r + 1):
                source_bytes = None if source is None else view_bytes(source)
                self._stream_bytes(
                    source_bytes, None if target is None else view_bytes(target), compute_nbytes(layout), r, receivers
                )

    def _stream_bytes(
        self, source: np.ndarray | None, target: np.ndarray | None, nbytes: int, root: int, receivers: range
    ) -> None:
        """Stream ``nbytes`` bytes from the root to a range of ranks, through all hosts between them.

        ``source`` are the bytes on the root.  ``target`` is the memory for them on this rank; None if it does not need
        them.
        """
        local_ranks, number = self._local_ranks, self._rank.number
        from_below, from_above = root < local_ranks.start, root >= local_ranks.stop
        if (from_below and receivers.stop <= local_ranks.start) or (from_above and receivers.start >= local_ranks.stop):
            return  # this host is not between the root and the receivers
        source_pipe = self._up_in if from_below else self._down_in if from_above else self._local_stream
        target_pipes = []
        if not self._is_last and not from_above and receivers.stop > local_ranks.stop:
            target_pipes.append(self._up_out)
        if not self._is_first and not from_below and receivers.start < local_ranks.start:
            target_pipes.append(self._down_out)
        for offset in range(0, nbytes, FRAME_NBYTES):
            frame_nbytes = min(FRAME_NBYTES, nbytes - offset)
            if source_pipe is self._local_stream:
                content = self.switch_scratch_halves()[root - local_ranks.start][:frame_nbytes]
                if number == root and source is not None:
                    copy_bytes(source, offset, content)
                self._local_stream.finish_frame()
                self._local_stream.wait_all_processed()
            else:
                content = source_pipe.wait_for_received_frame()[:frame_nbytes]
            for pipe in target_pipes:
                frame = pipe.wait_for_free_frame()
                if number == local_ranks.start:
                    frame[:frame_nbytes] = content
                pipe.finish_frame(frame_nbytes)
            if target is not None and number != root:
                target[offset : offset + frame_nbytes] = content
            if source_pipe is not self._local_stream:
                source_pipe.finish_frame()

    def _reduce(
        self,
        source: Any,
        target: np.ndarray | None,
        op: str,
        n_items: int,
        dtype: np.dtype,
        contributors: Sequence[int],
    ) -> None:
        """Reduce ``source``, an array or bytes of another kind, into every ``target`` that is not None."""
        rank, local_ranks, reduce_op = self._rank, self._local_ranks, REDUCE_OPS[op]
        accumulator = reduce_op.choose_accumulator_dtype(dtype)
        chunk_items = FRAME_NBYTES // accumulator.itemsize
        pending: list[tuple[int, int]] = []  # chunks whose results have not arrived: first element, number
        local_index, is_array = rank.number - local_ranks.start, isinstance(source, np.ndarray)
        for offset in range(0, n_items, chunk_items):
            count = min(chunk_items, n_items - offset)
            low, high = (count * i // len(local_ranks) for i in (local_index, local_index + 1))
            halves = [half[: count * dtype.itemsize].view(dtype) for half in self.switch_scratch_halves()]
            if source is not None and not is_array:
                source.copy_to(view_bytes(halves[local_index]), offset * dtype.itemsize)
            elif source is not None:
                own_chunk = source[offset : offset + count]
                halves[local_index][:low] = own_chunk[:low]
                halves[local_index][high:] = own_chunk[high:]
            self._local_stream.finish_frame()
            self._local_stream.wait_all_processed()
            inputs = [
                source[offset + low : offset + high]
                if r == rank.number and is_array
                else halves[r - local_ranks.start][low:high]
                for r in contributors
                if r in local_ranks
            ]
            if not self._is_first:
                partial = self._up_in.wait_for_received_frame().view(accumulator)[low:high]
                if contributors[0] < local_ranks.start:
                    inputs.insert(0, partial)
            out = self._down_out if self._is_last else self._up_out
            result = out.wait_for_free_frame().view(accumulator)[low:high]
            accumulate_arrays(inputs, reduce_op, result)
            if self._is_last and reduce_op.is_mean:
                divide_in_place(result, len(contributors))
            if not self._is_first:
                self._up_in.finish_frame()
            out.finish_frame(count * accumulator.itemsize)
            pending.append((offset, count))
            if len(pending) > self._max_pending_chunks:
                self._finish_chunk(target, pending.pop(0), accumulator, len(pending))
        while pending:
            self._finish_chunk(target, pending.pop(0), accumulator, len(pending))

    @property
    def _max_pending_chunks(self) -> int:
        """Maximal number of chunks that this host has begun, but whose results it has not copied.

        The number grows by `N_FRAMES` with each hop to the last host, as results take longer to return.

        Invariant: the pipes at both ends of a hop have room for four times `N_FRAMES` chunks.  Hosts with full pipes
        therefore never wait for each other in a circle.
        """
        return _MAX_PENDING_ON_LAST_HOST if self._is_last else N_FRAMES * self._n_next_hosts_word[0]

    def _finish_chunk(
        self, target: np.ndarray | None, chunk: tuple[int, int], accumulator: np.dtype, n_newer: int
    ) -> None:
        """Copy a chunk of the result into this rank's target, and pass it to the previous host.

        ``chunk`` are its first element and its number of elements; ``n_newer`` is the number of chunks that this rank
        has begun since this one.
        """
        offset, count = chunk
        if self._is_last:
            self._down_out.wait_all_processed(n_newer)
            result = self._down_out.view_previous_frame(n_newer).view(accumulator)[:count]
        else:
            result = self._down_in.wait_for_received_frame().view(accumulator)[:count]
            if not self._is_first:
                frame = self._down_out.wait_for_free_frame()
                if self._rank.number == self._local_ranks.start:
                    frame[: count * accumulator.itemsize] = view_bytes(result)
                self._down_out.finish_frame(count * accumulator.itemsize)
        if target is not None:
            target[offset : offset + count] = result
        if not self._is_last:
            self._down_in.finish_frame()


def get_numpy_communicator(rank: Rank) -> SharedMemoryCommunicator:
    """Return a rank's communicator for NumPy arrays, always the same object."""
    communicator_class = MultiHostCommunicator if len(rank.local_ranks) < rank.size else SharedMemoryCommunicator
    return rank.registry.get_or_create(communicator_class, lambda: communicator_class(rank))
