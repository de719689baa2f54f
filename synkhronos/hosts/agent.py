"""The agent of a host: the process that ``mpirun`` starts there, and the only one that uses MPI.

An agent polls its host's control memory and MPI in turns, and blocks on neither::

    control memory of this host                                messages to and from the other agents (`Messenger`)
    a command was posted (master's host)          ->           COMMAND, preceded by NEW_SEGMENT, PAGES, DROP_SEGMENTS
    all ranks of the host have reached a barrier  ->           BARRIER, with the values that they publish
    a rank, here or elsewhere, has failed         ->           FAILED, once from each host
    all ranks of the host have finished           ->           DONE, with their reports, to the master's host
    a worker has exited, or memory is lacking     ->           PEER_FAILURE, to the master's host
    a frame of a pipe is full, or free            <->          frames, to and from the neighbours
    a rank has sent to a rank of another host     ->           CHANNEL_UPDATE, to that host
    a rank uses a lock of another host            <->          LOCK_REQUEST, LOCK_REPLY, LOCK_BYTES (`ProgramAgent`)
    the master ends the ranks                     ->           END; answered by ENDED

The agent of the master's host and every other agent send each other HEARTBEAT a few times a second.  A host from which
no message arrives for `host_timeout` seconds is lost.  The agent of the master's host reports the loss to the master.
An agent that has lost the master's host kills its workers and exits.  A rank may compute for minutes, since agents send
the heartbeats.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from synkhronos.hosts.frame_transport import FrameTransport
from synkhronos.hosts.host_list import compute_ranks_by_host, describe_host
from synkhronos.hosts.messenger import CHUNK_NBYTES, MAX_UNSENT_MESSAGES, MessageType, Messenger
from synkhronos.hosts.mpirun import kill_processes, list_descendants
from synkhronos.hosts.page_table import PAGE_NBYTES, PageTable, find_pages, view_pages
from synkhronos.hosts.program_agent import ProgramAgent
from synkhronos.ranks.agreement import BarrierTally, record_last_common_barrier
from synkhronos.ranks.control_memory import (
    AWAITS_BARRIER,
    AWAITS_COMMAND,
    AWAITS_COMPLETION,
    SLOT_NBYTES,
    ControlMemory,
)
from synkhronos.ranks.errors import Death
from synkhronos.ranks.pipes import MAX_FAILURE_NBYTES, LinkMemory
from synkhronos.ranks.program_memory import ProgramMemoryLayout
from synkhronos.ranks.rank import SLOT_HEADER
from synkhronos.ranks.segments import (
    Segment,
    SegmentReceiver,
    UnmappedSegment,
    create_unlinked_file,
    is_peer_closed,
    send_segment,
)
from synkhronos.ranks.thread_limit import count_available_cores
from synkhronos.ranks.worker_processes import WorkerProcesses

#: Maximal number of messages that an agent receives while it cannot process them: heartbeats of some minutes.
_MAX_UNPROCESSED = 10_000
#: Seconds between two heartbeats.
_HEARTBEAT_SECONDS = 0.2
#: Seconds between two checks that the workers are alive.
_CHECK_SECONDS = 0.02
#: Seconds without an event up to which an agent polls without sleeping.
_BUSY_POLL_SECONDS = 1e-3
#: Seconds without an event up to which an agent's sleeps are short.  Later sleeps last a hundredth of the time without
#: an event.
_SHORT_SLEEP_SECONDS = 0.05
#: Seconds of a short sleep.
_MIN_SLEEP_SECONDS = 50e-6
#: Seconds of the longest sleep.
_MAX_SLEEP_SECONDS = 10e-3
#: Seconds after which workers that have not exited are killed.
WORKER_EXIT_SECONDS = 2.0
#: Seconds after the master's death for which its host's agent waits for the other hosts to exit.
_HOST_EXIT_SECONDS = 0.5
#: Command number that is greater than all others: with it, nothing of a session is served any more.
_AFTER_LAST_COMMAND = 1 << 62


class Agent:
    """Agent of one host.

    ``config`` is the master's configuration (see `synkhronos.hosts.mpi_link.MpiLink.start_remote_workers`).  On the
    master's host, ``channel`` leads to the master, which has started the ``workers``, and segments arrive over
    ``segment_channel``; on other hosts the agent has started them.  ``frame_comm`` is a second communicator of all
    agents, for frames.
    """

    def __init__(
        self,
        mpi: Any,
        config: dict[str, Any],
        control: ControlMemory,
        channel: socket.socket | None,
        segment_channel: socket.socket | None,
        workers: WorkerProcesses,
        frame_comm: Any,
    ):
        world = mpi.COMM_WORLD
        self._config, self._control, self._channel, self._workers = config, control, channel, workers
        self._is_master_host = channel is not None
        self._host, self._host_names = world.rank, config["host_names"]
        self._ranks_by_host = compute_ranks_by_host(config["rank_counts"])
        self._local_ranks = control.local_ranks
        self._local_slice = slice(self._local_ranks.start, self._local_ranks.stop)
        self._link_memory = LinkMemory(control)
        self._link_memory.n_next_hosts_word[0] = world.size - 1 - world.rank
        self._messenger = Messenger(mpi, world)
        self._frame_transport = FrameTransport(mpi, frame_comm, control, self._link_memory)
        self._page_table = PageTable(world.size - 1, self.keep_alive)
        self._receiver = None if segment_channel is None else SegmentReceiver(segment_channel)
        self._segments: dict[int, Segment] = {}
        self._program_agent = ProgramAgent(self._messenger, control, self._ranks_by_host, self._segments)
        self._last_segment_key = self._last_command_number = self._last_barrier_number = 0
        self._tally = BarrierTally(world.size, world.rank)
        self._sent_done: tuple[int, ...] = ()
        # The other agents start their workers before they send anything.
        self._next_heartbeat = self._next_check = 0.0
        self._exit_deadline = 0.0
        self._is_ending = False
        #: Hosts with which this one exchanges heartbeats, and hosts that have ended their workers.
        self._heartbeat_hosts = self._messenger.other_hosts if self._is_master_host else [0]
        self._ended_hosts: set[int] = set()
        self._handlers: dict[int, Callable[..., None]] = {
            MessageType.COMMAND: self._on_command,
            MessageType.NEW_SEGMENT: self._on_new_segment,
            MessageType.PAGES: self._on_pages,
            MessageType.DROP_SEGMENTS: self._on_drop_segments,
            MessageType.BARRIER: self._on_barrier,
            MessageType.FAILED: self._on_failed,
            MessageType.DONE: self._on_done,
            MessageType.PEER_FAILURE: self._on_peer_failure,
            MessageType.HEARTBEAT: self._on_heartbeat,
            MessageType.END: self._on_end,
            MessageType.ENDED: self._on_ended,
            **self._program_agent.handlers,
        }

    def run(self) -> None:
        """Poll the control memory and MPI until the ranks have ended, and no agent has a message in transit."""
        last_event, has_cores = time.monotonic(), len(self._local_ranks) < count_available_cores()
        while not self._has_ended():
            has_events = not self._is_ending and self._send_changes()
            for source, message_type, arguments in self._messenger.receive():
                self._handlers[message_type](source, *arguments)
                has_events |= message_type != MessageType.HEARTBEAT
            if self._frame_transport.poll():
                self._control.wake_local_ranks(AWAITS_BARRIER)
                has_events = True
            has_events |= self._program_agent.advance()
            now = time.monotonic()
            self._run_periodic_work(now)
            if has_events:
                last_event = now
                continue
            idle_seconds = now - last_event
            # While frames are in transit, the agent sleeps briefly.  Ranks may need the core, and more frames follow.
            if idle_seconds < _BUSY_POLL_SECONDS and has_cores and not self._frame_transport.has_transfers:
                os.sched_yield()
            elif idle_seconds < _SHORT_SLEEP_SECONDS or self._program_agent.has_unfinished_work:
                time.sleep(_MIN_SLEEP_SECONDS)
            else:
                time.sleep(min(idle_seconds / 100, _MAX_SLEEP_SECONDS))

    def _has_ended(self) -> bool:
        return (
            self._is_ending
            and self._ended_hosts.issuperset(self._messenger.other_hosts)
            and self._frame_transport.has_ended()
            and not self._program_agent.has_unfinished_work
            and not self._messenger.complete_sends()
        )

    # -- events of this host -----------------------------------------------------------------------------------

    def _send_changes(self) -> bool:
        """Send changes of this host's control memory to the other hosts.  Return True if there were any."""
        words, has_events = self._control.words, False
        # `done` is read before FAILED: a failing rank writes FAILED first, so DONE is never sent before FAILED.
        done = tuple(self._control.done[self._local_slice])
        if self._is_master_host and words[ControlMemory.POSTED] > self._last_command_number:
            self._send_command()
            has_events = True
        failed = words[ControlMemory.FAILED]  # read before the ranks' barriers: see `ranks.agreement`
        barrier_number = min(self._control.arrived[self._local_slice])
        sends_barrier, sends_failed = self._tally.record_own_state(failed, barrier_number)
        if sends_barrier:
            self._send_barrier(barrier_number)
        if sends_failed:
            self._messenger.send_all(self._messenger.other_hosts, MessageType.FAILED, failed)
            self._record_last_common_barriers()
        has_events |= sends_barrier or sends_failed
        if not self._is_master_host:
            has_events |= self._send_done(done)
        elif words[ControlMemory.END_REQUEST] and not self._is_ending:
            has_events = True
            must_kill = words[ControlMemory.END_REQUEST] == ControlMemory.KILL_WORKERS
            self._messenger.send_all(self._messenger.other_hosts, MessageType.END, must_kill)
            self._end_session()
        return has_events

    def _send_command(self) -> None:
        """Send a command to the other hosts, preceded by the segments and pages that it needs."""
        words, messenger = self._control.words, self._messenger
        assert self._receiver is not None
        self._last_command_number = words[ControlMemory.POSTED]
        while self._last_segment_key < words[ControlMemory.NEWEST_KEY]:
            segment = self._receiver.receive()
            if isinstance(segment, UnmappedSegment):
                segment = segment.map()
            if segment.key > self._last_segment_key:
                self._last_segment_key = segment.key
                self._segments[segment.key] = segment
                if not segment.is_user_file:
                    self._page_table.add(segment.key, view_pages(segment))
                messenger.send_all(
                    messenger.other_hosts, MessageType.NEW_SEGMENT, segment.key, segment.nbytes, segment.path or None
                )
        length = words[ControlMemory.MESSAGE_NBYTES]
        message = bytes(self._control.mailbox[:length])
        accesses, dropped, program_layout = pickle.loads(
            self._control.mailbox[length : length + words[ControlMemory.PLAN_NBYTES]]
        )
        memory = self._page_table.memory
        missing = self._page_table.pop_missing_pages(
            [find_pages(pages_by_segment, memory) for pages_by_segment in accesses]
        )
        for host, pages_by_segment in zip(messenger.other_hosts, missing, strict=True):
            for key, pages in pages_by_segment.items():
                for start in range(0, len(pages), CHUNK_NBYTES // PAGE_NBYTES):
                    chunk = pages[start : start + CHUNK_NBYTES // PAGE_NBYTES]
                    content = memory[key][chunk]
                    words[ControlMemory.BYTES_SENT] += content.size
                    messenger.send(host, MessageType.PAGES, key, chunk, content)
                    self.keep_alive(MAX_UNSENT_MESSAGES)
            messenger.send(host, MessageType.COMMAND, self._last_command_number, message, program_layout)
            if dropped:
                messenger.send(host, MessageType.DROP_SEGMENTS, dropped)
        self._page_table.drop(dropped)
        for key in dropped:
            self._segments.pop(key, None)
        self._program_agent.start_command(self._last_command_number, program_layout)

    def keep_alive(self, max_unsent: int = 1 << 30) -> None:
        """Send heartbeats during long work.  With ``max_unsent``, wait until at most that many messages are unsent.

        The limit is the flow control of pages: their unsent messages occupy memory.
        """
        while True:
            self._messenger.post_receives(_MAX_UNPROCESSED)
            self._run_periodic_work(time.monotonic())
            if self._messenger.complete_sends() <= max_unsent:
                return
            time.sleep(_MIN_SLEEP_SECONDS)

    def _send_barrier(self, barrier_number: int) -> None:
        """Send the number of the barrier that this host's ranks have reached, and the values that they publish at it.

        If the previous barrier was not sent, its values are also sent.  The ranks may have passed that barrier without
        waiting for other hosts.
        """
        published = []
        for r in self._local_ranks:
            for published_number in {max(barrier_number - 1, self._last_barrier_number + 1), barrier_number}:
                slot = self._control.get_slot(r, published_number & 1)
                length, slot_number = SLOT_HEADER.unpack_from(slot)
                if slot_number == published_number:
                    published.append(
                        (r, published_number & 1, bytes(slot[: min(SLOT_HEADER.size + length, SLOT_NBYTES)]))
                    )
        self._last_barrier_number = barrier_number
        self._messenger.send_all(self._messenger.other_hosts, MessageType.BARRIER, barrier_number, published)

    def _send_done(self, done: tuple[int, ...]) -> bool:
        """Send the ranks' last finished commands to the master's host, all at once, or one by one after a failure."""
        control, local_ranks, posted = self._control, self._local_ranks, self._last_command_number
        if done == self._sent_done or not (min(done) >= posted or control.words[ControlMemory.FAILED] == posted):
            return False
        self._sent_done = done
        reports = {
            r: control.read_report(r)
            for r in local_ranks
            if done[r - local_ranks.start] == posted and control.report_nbytes[r]
        }
        self._messenger.send(0, MessageType.DONE, done, tuple(control.applied[self._local_slice]), reports)
        return True

    def _run_periodic_work(self, now: float) -> None:
        """Send a heartbeat if it is due, and handle deaths of other processes if the check is due."""
        if now >= self._next_heartbeat and not self._is_ending:
            self._next_heartbeat = now + _HEARTBEAT_SECONDS
            clock = time.monotonic_ns()
            ns_since_progress = [(p and clock - p) for p in self._control.last_progress[self._local_slice]]
            sleep_reasons = list(self._control.sleep_reason[self._local_slice])
            self._messenger.send_all(self._heartbeat_hosts, MessageType.HEARTBEAT, ns_since_progress, sleep_reasons)
        if now >= self._next_check:
            self._next_check = now + _CHECK_SECONDS
            self._handle_deaths(now)

    def _handle_deaths(self, now: float) -> None:
        """Act on the death of the master or of a worker, and on the failure of another host."""
        if self._channel is not None and is_peer_closed(self._channel):
            self._end_without_master(now)
        if self._is_ending:
            return
        timeout = self._config["timeout"]
        for host in self._heartbeat_hosts:
            if now - self._messenger.last_received[host] > timeout:
                if not self._is_master_host:
                    if os.getppid() > 1:
                        with contextlib.suppress(OSError):
                            os.kill(os.getppid(), signal.SIGKILL)  # the daemon of mpirun would wait forever
                    self._exit_alone()
                ranks, name = self._ranks_by_host[host], self._host_names[host]
                death = Death.from_lost_host(ranks, name, f"has sent no message for {timeout:g} seconds")
                description = f"no message from {describe_host(name, ranks)} has arrived for {timeout:g} seconds"
                self._report_failure(description, ranks.start, death)
        dead = self._workers.reap()
        if dead is not None:
            rank, pid, code = dead
            death = Death.from_exit(rank, self._host_names[self._host], pid, code)
            self._messenger.send(0, MessageType.PEER_FAILURE, death.describe(), rank, death)
            del self._workers.pids[rank]

    def _end_without_master(self, now: float) -> None:
        """End all hosts after the master's death.  If some do not answer, exit, and end ``mpirun``."""
        self._control.words[ControlMemory.END_REQUEST] = ControlMemory.KILL_WORKERS
        self._exit_deadline = self._exit_deadline or now + _HOST_EXIT_SECONDS
        if now > self._exit_deadline:
            self._exit_alone()

    # -- messages of other hosts ----------------------------------------------------------------------

    def _on_command(
        self, source: int, command_number: int, message: bytes, program_layout: ProgramMemoryLayout | None
    ) -> None:
        control, words = self._control, self._control.words
        self._program_agent.start_command(command_number, program_layout)
        control.mailbox[: len(message)] = message
        words[ControlMemory.MESSAGE_NBYTES] = len(message)
        words[ControlMemory.NEWEST_KEY] = self._last_segment_key
        words[ControlMemory.POSTED] = self._last_command_number = command_number
        self._control.wake_local_ranks(AWAITS_COMMAND)

    def _on_new_segment(self, source: int, key: int, nbytes: int, path: str | None) -> None:
        try:
            with create_unlinked_file(nbytes) if path is None else _open_user_file(path, nbytes) as file:
                segment = Segment(key, file.fileno(), nbytes, path is not None)
                for channel in self._workers.channels.values():
                    send_segment(channel, segment, file.fileno())
        except (MemoryError, OSError) as error:
            name = describe_host(self._host_names[self._host], self._local_ranks)
            self._messenger.send(0, MessageType.PEER_FAILURE, f"{name}: {error}", self._local_ranks.start)
            return
        self._segments[key] = segment
        self._last_segment_key = key

    def _on_pages(self, source: int, key: int, pages: np.ndarray, content: np.ndarray) -> None:
        if key in self._segments:  # else it could not be mapped
            view_pages(self._segments[key])[pages] = content

    def _on_drop_segments(self, source: int, keys: list[int]) -> None:
        for key in keys:
            self._segments.pop(key, None)

    def _on_barrier(self, source: int, barrier_number: int, published: list[tuple[int, int, bytes]]) -> None:
        self._tally.receive_barrier(source, barrier_number)
        control = self._control
        for r, parity, content in published:
            control.get_slot(r, parity)[: len(content)] = content
        for r in self._ranks_by_host[source]:
            control.arrived[r] = barrier_number
        self._control.wake_local_ranks(AWAITS_BARRIER)

    def _on_failed(self, source: int, command_number: int) -> None:
        self._tally.receive_failed(source, command_number)
        words = self._control.words
        if command_number > words[ControlMemory.FAILED]:
            words[ControlMemory.FAILED] = command_number
            self._control.wake_all_ranks()
        self._record_last_common_barriers()

    def _record_last_common_barriers(self) -> None:
        """Record the last common barrier of each failed command that all hosts have reported."""
        for command_number, barrier_number in self._tally.pop_decided():
            record_last_common_barrier(self._control.words, command_number, barrier_number)
            self._control.wake_local_ranks(AWAITS_BARRIER)

    def _on_done(self, source: int, done: tuple[int, ...], applied: tuple[int, ...], reports: dict[int, bytes]) -> None:
        control = self._control
        for i, r in enumerate(self._ranks_by_host[source]):
            control.write_report(r, reports.get(r, b""))
            control.applied[r] = applied[i]
            control.done[r] = done[i]
        self._control.wake_local_ranks(AWAITS_COMPLETION)

    def _on_peer_failure(self, source: int, *failure: Any) -> None:
        self._report_failure(*failure)

    def _on_heartbeat(self, source: int, ns_since_progress: list[int], sleep_reasons: list[int]) -> None:
        control, clock = self._control, time.monotonic_ns()
        for i, r in enumerate(self._ranks_by_host[source]):
            control.last_progress[r] = ns_since_progress[i] and clock - ns_since_progress[i]
            control.sleep_reason[r] = sleep_reasons[i]

    def _on_end(self, source: int, kill: bool) -> None:
        self._workers.shut_down(0.0 if kill else WORKER_EXIT_SECONDS, lambda: False)
        self._end_session()

    def _end_session(self) -> None:
        """Send the last messages of this session, and discard others from now on."""
        self._is_ending = True
        self._program_agent.start_command(_AFTER_LAST_COMMAND, None)
        self._frame_transport.end()
        self._messenger.send_all(self._messenger.other_hosts, MessageType.ENDED)

    def _on_ended(self, source: int) -> None:
        self._ended_hosts.add(source)

    # -- failures and exit -------------------------------------------------------------------------------------------

    def _report_failure(self, description: str, rank: int, death: Death | None = None) -> None:
        """Report the first failure to the master, by the fields of `SessionFailure`.

        Later failures are not reported, since they may be its consequences.
        """
        if self._control.words[ControlMemory.FAILURE_NBYTES]:
            return
        if death is not None:
            death = death._replace(lost_ranks=())  # the master knows the ranks of a lost host
        content = json.dumps([description[: MAX_FAILURE_NBYTES // 8], rank, death]).encode()
        self._link_memory.failure_json[: len(content)] = content
        self._control.words[ControlMemory.FAILURE_NBYTES] = len(content)
        self._control.wake_all_ranks()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._config["master"], signal.SIGURG)  # wakes `PeerWatch`, since the master may be computing

    def _exit_alone(self) -> None:
        """Kill this host's workers and exit, without waiting for the other hosts."""
        self._workers.shut_down(0.0, lambda: True)
        if self._is_master_host:  # an ssh would wait for an unreachable host, and mpirun for its ssh
            others = list_descendants(self._config["mpirun"])
            for pid in os.getpid(), os.getppid():
                others.pop(pid, None)
            kill_processes(others)
        os.kill(os.getpid(), signal.SIGKILL)  # mpirun may ignore an exit code, but not a death by a signal


def _open_user_file(path: str, nbytes: int) -> io.FileIO:
    """Open a user's file that the master has opened, and check that its size is equal on this host."""
    file = io.FileIO(path)
    own_nbytes = os.fstat(file.fileno()).st_size
    if own_nbytes != nbytes:
        file.close()
        raise OSError(f"{path} has {own_nbytes:,} bytes here, and {nbytes:,} on the master's host")
    return file
