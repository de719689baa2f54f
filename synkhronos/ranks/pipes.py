"""Pipes: shared memory through which collectives stream arrays between neighbouring hosts.

Hosts form a chain, and each has pipes to its neighbours: *up* to the next host, *down* to the previous one.  All ranks
of a host process every frame of a pipe, even those that do not contribute to it.  Each rank counts the frames that it
has processed, and the agent counts the frames that it has sent or received.  A count restarts with each command.  Its
high bits are the command's number, so that counts of a failed command are less than counts of later commands.
"""

from __future__ import annotations

import numpy as np

from synkhronos.ranks.control_memory import AWAITS_BARRIER, SCRATCH_NBYTES, ControlMemory
from synkhronos.ranks.rank import Rank

#: Maximal number of bytes of a frame, the unit of streaming.
FRAME_NBYTES = SCRATCH_NBYTES
#: Number of frames in a pipe.
N_FRAMES = 8
#: Maximal number of bytes of a failure that an agent reports, as JSON.
MAX_FAILURE_NBYTES = 4096
#: Number of low bits of a counter that count frames; the high bits are the number of the command.
COUNT_BITS = 32

#: Pipes of a host: to and from the next host, to and from the previous host.
UP_OUT, UP_IN, DOWN_OUT, DOWN_IN = range(4)
#: Stream within the host, whose frames are in the ranks' scratch memory.
LOCAL_STREAM = 4


class LinkMemory:
    """Memory views of the link's part of the control memory: the failure that the agent reports, words, and frames."""

    def __init__(self, control: ControlMemory):
        n_local = len(control.local_ranks)
        memory = control.link_memory
        words = memory[MAX_FAILURE_NBYTES : MAX_FAILURE_NBYTES + _compute_words_nbytes(n_local)].cast("Q")
        #: Fields of the `SessionFailure` that the agent reports, as JSON.
        self.failure_json = memory[:MAX_FAILURE_NBYTES]
        #: One word, which contains the number of hosts after this one in the chain.
        self.n_next_hosts_word = words[:1]
        #: Number of frames that the agent has sent or received, by pipe.
        self.n_transferred = words[1:5]
        #: Number of bytes in each frame, by pipe.
        self.frame_nbytes = words[5 : 5 + 4 * N_FRAMES]
        processed = words[5 + 4 * N_FRAMES :]
        #: Number of frames that each rank has processed, by pipe and for `LOCAL_STREAM`.
        self.n_processed = [processed[i * n_local : (i + 1) * n_local] for i in range(5)]
        self._memory = memory
        self._frames_offset = MAX_FAILURE_NBYTES + _compute_words_nbytes(n_local)

    @staticmethod
    def compute_nbytes(n_local: int) -> int:
        """Return the number of bytes of the memory of a host with ``n_local`` ranks."""
        return MAX_FAILURE_NBYTES + _compute_words_nbytes(n_local) + 4 * N_FRAMES * FRAME_NBYTES

    def view_frame(self, pipe: int, frame_number: int) -> memoryview:
        """Return the memory of a frame of a pipe; frames are numbered from 0 in each command."""
        offset = self._frames_offset + (pipe * N_FRAMES + frame_number % N_FRAMES) * FRAME_NBYTES
        return self._memory[offset : offset + FRAME_NBYTES]


def _compute_words_nbytes(n_local: int) -> int:
    return 8 * (5 + 4 * N_FRAMES + 5 * n_local)


class PipeEnd:
    """A rank's end of one of its host's pipes, or of the stream within the host."""

    def __init__(self, rank: Rank, link_memory: LinkMemory, pipe: int):
        self._rank, self._link_memory, self._pipe = rank, link_memory, pipe
        self._local_rank = rank.number - rank.local_ranks.start
        self._n_processed = link_memory.n_processed[pipe]
        self._command_number = self._start_count = self._frame_number = 0

    def _get_frame_number(self) -> int:
        """Return the number of the current frame; 0 at the start of a command."""
        if self._command_number != self._rank.command_number:
            self._command_number = self._rank.command_number
            self._start_count = self._command_number << COUNT_BITS
            self._frame_number = 0
        return self._frame_number

    def wait_for_free_frame(self) -> np.ndarray:
        """Wait until the current frame's memory is free, and return it as bytes."""
        frame_number = self._get_frame_number()
        if frame_number >= N_FRAMES:
            self._wait_transferred(frame_number - N_FRAMES + 1)
        return self._view_frame_bytes(frame_number)

    def wait_for_received_frame(self) -> np.ndarray:
        """Wait until the current frame has been received, and return it as bytes."""
        frame_number = self._get_frame_number()
        self._wait_transferred(frame_number + 1)
        return self._view_frame_bytes(frame_number)

    def _wait_transferred(self, n_frames: int) -> None:
        transferred, pipe, target_count = self._link_memory.n_transferred, self._pipe, self._start_count + n_frames
        if transferred[pipe] < target_count:
            self._rank.barriers.wait_until(lambda: transferred[pipe] >= target_count)

    def view_previous_frame(self, n_skipped: int) -> np.ndarray:
        """Return the last frame that this rank has processed, before the newest ``n_skipped``, as bytes."""
        return self._view_frame_bytes(self._get_frame_number() - 1 - n_skipped)

    def finish_frame(self, nbytes: int = 0) -> None:
        """Mark the current frame as processed, and go to the next; ``nbytes`` is the length of a frame to send."""
        frame_number = self._get_frame_number()
        self._frame_number = frame_number + 1
        if nbytes:
            # All ranks of the host write the same number.
            self._link_memory.frame_nbytes[self._pipe * N_FRAMES + frame_number % N_FRAMES] = nbytes
        self._n_processed[self._local_rank] = self._start_count + frame_number + 1
        self._rank.control.wake_local_ranks(AWAITS_BARRIER)

    def wait_all_processed(self, n_skipped: int = 0) -> None:
        """Wait until all ranks of the host have processed this rank's frames, except the newest ``n_skipped``."""
        processed, target_count = self._n_processed, self._start_count + self._get_frame_number() - n_skipped
        self._rank.barriers.wait_until(lambda: min(processed) >= target_count)

    def _view_frame_bytes(self, frame_number: int) -> np.ndarray:
        return np.frombuffer(self._link_memory.view_frame(self._pipe, frame_number), np.uint8)
