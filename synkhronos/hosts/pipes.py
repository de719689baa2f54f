"""Pipes: shared memory through which collectives stream arrays between neighbouring hosts.

Hosts form a chain, and each has pipes to its neighbours: *up* to the next host, *down* to the previous one.  All ranks
of a host process every frame of a pipe, even those that do not contribute to it.  Each rank counts the frames that it
has processed, and the agent counts the frames that it has sent or received.  A count restarts with each command.  Its
high bits are the command's number, so that counts of a failed command are less than counts of later commands.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from synkhronos.ranks import Rank
from synkhronos.ranks.control_memory import AWAITS_BARRIER, SCRATCH_NBYTES, ControlMemory

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


class FrameTransport:
    """The agent's end of its host's pipes: sends and receives their frames over MPI.

    The tag of a message is the number of the command, modulo `_N_TAGS`.  A frame has no number: frames arrive in order,
    and both ends count them.  ``comm`` is a communicator that is used for frames only.
    """

    #: Number of commands that tags distinguish; every MPI provides at least as many tags.
    _N_TAGS = 1 << 15

    def __init__(self, mpi: Any, comm: Any, control: ControlMemory, link_memory: LinkMemory):
        self._mpi, self._comm = mpi, comm
        self._control, self._link_memory = control, link_memory
        host, last_host = comm.rank, comm.size - 1
        self._neighbours = [
            *([(UP_OUT, DOWN_IN, host + 1)] if host < last_host else []),
            *([(DOWN_OUT, UP_IN, host - 1)] if host > 0 else []),
        ]
        pipes = UP_OUT, DOWN_OUT, UP_IN, DOWN_IN
        self._next_frame_numbers = dict.fromkeys(pipes, 0)
        #: Frames in transit by pipe: the value of `n_transferred` after the transfer, and its request.
        self._in_transit: dict[int, deque[tuple[int, Any]]] = {pipe: deque() for pipe in pipes}
        self._command_number = self._start_count = 0
        self._status = mpi.Status()
        #: Offset that is added to the number of the posted command once the ranks have ended.  Then all frames belong
        #: to earlier commands.
        self._number_offset = 0
        #: Requests of the empty frames that mark the end of this agent's frames, one for each neighbour.
        self._last_frame_requests: list[Any] = []
        #: Neighbours whose last frame has been received.
        self._ended_neighbours: set[int] = set()

    def end(self) -> None:
        """Send no more frames after those in transit, and discard the frames that arrive."""
        self._number_offset = self._N_TAGS // 4
        for _, _, neighbour in self._neighbours:
            self._last_frame_requests.append(self._comm.Isend([b"", self._mpi.BYTE], neighbour, 0))

    def has_ended(self) -> bool:
        """Whether both this agent and its neighbours have ended, and no frame is in transit."""
        has_sent_last = all(request.Test() for request in self._last_frame_requests)
        return has_sent_last and not self.has_transfers and len(self._ended_neighbours) == len(self._neighbours)

    def poll(self) -> bool:
        """Start and complete transfers without blocking.  Return True if ranks have to be woken."""
        command_number = self._control.words[ControlMemory.POSTED] + self._number_offset
        if command_number != self._command_number:
            self._command_number, self._start_count = command_number, command_number << COUNT_BITS
            self._next_frame_numbers = dict.fromkeys(self._next_frame_numbers, 0)
        must_wake_ranks = False
        for outgoing, incoming, neighbour in self._neighbours:
            must_wake_ranks |= self._complete_transfers(outgoing) | self._complete_transfers(incoming)
            self._send_frames(outgoing, neighbour)
            self._receive_frames(incoming, neighbour)
        return must_wake_ranks

    @property
    def has_transfers(self) -> bool:
        """Whether frames are in transit.  Then the agent has to call MPI frequently."""
        return any(self._in_transit.values())

    def _complete_transfers(self, pipe: int) -> bool:
        """Remove completed transfers.  Return True if one belongs to the current command."""
        in_transit, must_wake_ranks = self._in_transit[pipe], False
        while in_transit and in_transit[0][1].Test():
            transferred = in_transit.popleft()[0]
            if transferred > self._start_count:
                self._link_memory.n_transferred[pipe] = transferred
                must_wake_ranks = True
        return must_wake_ranks

    def _send_frames(self, pipe: int, neighbour: int) -> None:
        """Start sending the frames that all ranks of this host have filled."""
        memory, start_count = self._link_memory, self._start_count
        filled = min(memory.n_processed[pipe])
        while start_count + self._next_frame_numbers[pipe] < filled:
            frame_number = self._next_frame_numbers[pipe]
            nbytes = memory.frame_nbytes[pipe * N_FRAMES + frame_number % N_FRAMES]
            frame = memory.view_frame(pipe, frame_number)[:nbytes]
            tag = self._command_number % self._N_TAGS
            self._in_transit[pipe].append(
                (start_count + frame_number + 1, self._comm.Isend([frame, self._mpi.BYTE], neighbour, tag))
            )
            self._next_frame_numbers[pipe] = frame_number + 1

    def _receive_frames(self, pipe: int, neighbour: int) -> None:
        """Start receiving frames into free memory; discard frames of failed commands."""
        memory, in_transit, start_count = self._link_memory, self._in_transit[pipe], self._start_count
        # A frame of a failed command may still be in transit into memory that the new command needs.
        while (
            len(in_transit) < N_FRAMES
            and (not in_transit or in_transit[0][0] > start_count)
            and neighbour not in self._ended_neighbours
            and self._comm.Iprobe(neighbour, self._mpi.ANY_TAG, self._status)
        ):
            tag, nbytes = self._status.tag, self._status.Get_count(self._mpi.BYTE)
            if not nbytes:  # the last frame
                if self._number_offset:  # else this agent ends later, when the master ends it
                    self._comm.Recv([bytearray(), self._mpi.BYTE], neighbour, tag)
                    self._ended_neighbours.add(neighbour)
                break
            commands_ahead = (tag - self._command_number) % self._N_TAGS
            if commands_ahead == 0:
                frame_number = self._next_frame_numbers[pipe]
                if (
                    frame_number >= N_FRAMES
                    and min(memory.n_processed[pipe]) < start_count + frame_number - N_FRAMES + 1
                ):
                    break  # ranks still use the memory of this frame
                buffer: Any = memory.view_frame(pipe, frame_number)[:nbytes]
                self._next_frame_numbers[pipe] = frame_number + 1
                transferred = start_count + frame_number + 1
            elif commands_ahead < self._N_TAGS // 2:
                break  # the frame belongs to a command that this host has not received yet
            else:  # the frame belongs to a failed command: receive and discard it
                buffer, transferred = bytearray(nbytes), 0
            in_transit.append((transferred, self._comm.Irecv([buffer, self._mpi.BYTE], neighbour, tag)))
