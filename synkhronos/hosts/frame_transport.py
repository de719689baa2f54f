"""The agent's side of the pipes: frames between neighbouring hosts, sent and received over MPI."""

from __future__ import annotations

from collections import deque
from typing import Any

from synkhronos.ranks.control_memory import ControlMemory
from synkhronos.ranks.pipes import COUNT_BITS, DOWN_IN, DOWN_OUT, N_FRAMES, UP_IN, UP_OUT, LinkMemory


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
