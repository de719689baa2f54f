"""Watchdog of pending collectives on the GPU, which aborts those that can't complete.

A rank enqueues a collective and continues.  If a peer never enqueues it, the GPU waits forever, unless the connection
is aborted.  The watchdog records the collectives that this rank has started, and aborts them unless all ranks start
them::

    idle ────────────────> exposed ────────────────────────────────> safe ──────────> idle
         mark_started:       │  a rank may fail before it starts       │  all ranks      the GPU
         enqueued on the     │  the collective                         │  have started   is done
         stream              │                                         │
                             │  wait_until_started: wait for all ─────>
                             │  notify_started: arrive without waiting │
                             │                                         │
       a rank fails before   │  wait for earlier collectives           │  a peer exits
       all have started      v                                         v  (master's thread only)
       (command failed)  aborted: `NcclConnection.abort`; the GPU continues with undefined results
                         (also `ABORT_TIMEOUT_SECONDS` after a failure, for any reason)

The ranks agree on whether all have started (`synkhronos.ranks.agreement`), so either all abort a collective or none
does.  A rank checks in `wait_until_started`, and at the end of a failed command (`resolve_failed_command`).  A thread
checks, too, since a rank that waits for its GPU does not notice a failure.

Collectives that are enqueued between two such decisions form an *epoch*, which has the same number on all ranks.

An abort ends all of a connection's collectives.  Those of safe epochs may still be in progress when the next epoch
begins, so the GPU writes the epoch's number between them (`GpuContext.write_mark`), for which an abort waits.  The mark
is in host memory, since calls of CUDA block while another thread's call does.

A collective that one rank aborts does not wait for data any more, but still sends: the collective of a rank that has
not aborted it yet, or starts it later, may then complete with arbitrary values.  A launch of XLA therefore reads a flag
behind its collectives, and keeps the old values of variables if it is 0.  Each epoch has its own flag, in memory of
all ranks of a host, and a rank sets it to 0 before it aborts.  Other hosts do so when they notice the failure.

Invariant: at most one of a rank's connections has work on the stream.  Blocking operations (all but ``all_reduce`` of
all ranks) start on an idle stream.  The active connection is aborted first: the abort of another one frees memory on
the GPU, for which CUDA waits until the GPU is idle.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from time import perf_counter

import numpy as np

from synkhronos.devices.cuda.gpu_context import GpuContext
from synkhronos.devices.cuda.nccl_connection import PEER_POLL_SECONDS, STUCK_TIMEOUT_SECONDS, NcclConnection
from synkhronos.ranks import Cancelled, PendingOperation, Rank
from synkhronos.ranks.interrupts import defer_signals

#: Seconds between two checks of the peers after a peer has failed or exited while the stream was idle.
_IDLE_POLL_SECONDS = 0.2
#: Seconds after a failure within which a pending collective has to complete.
ABORT_TIMEOUT_SECONDS = 40
#: Seconds between a failure and an abort on several hosts, in which the others notice the failure.
_HOSTS_NOTICE_SECONDS = 0.5
#: Seconds between two queries of the stream.
GPU_POLL_SECONDS = 0.0002


class CollectiveWatchdog(PendingOperation):
    """Aborts pending collectives that can't complete, on one stream.

    ``connections`` are this rank's, beginning with that of all ranks.  ``active_connection`` has enqueued the last work
    on the stream.  ``has_lost_peer`` is True once a collective was aborted because a peer has exited.  With
    ``writes_in_place``, an abort of the pending collectives leaves variables undefined.
    """

    def __init__(self, rank: Rank, gpu: GpuContext, connection: NcclConnection, stream: int):
        self.has_lost_peer = self.writes_in_place = False
        self._rank, self._gpu, self._stream = rank, gpu, stream
        self.connections = [connection]
        self.active_connection = connection
        self._thread: threading.Thread | None = None
        self._query_thread: threading.Thread | None = None
        self._stop = threading.Event()
        #: Number of the last epoch, counted since the ranks have connected.
        self._epoch = 0
        #: Flags of the epochs, used in turn: a stream has a capacity of fewer epochs.
        self._valid_flags = np.frombuffer(rank.control.valid_flags, np.int32)
        self._flags_address = self._valid_flags.ctypes.data
        self._flags_lock = threading.Lock()
        gpu.pin_pages(self._flags_address, self._valid_flags.nbytes)
        #: Last command in which this rank completed a blocking collective that others may not have started.
        self._completed_command_number = 0
        self.mark_idle()

    def mark_idle(self) -> None:
        """Record that nothing is pending."""
        #: Command that has started the pending collectives; 0 without pending ones.
        self._pending_command_number = 0
        #: Number of the barrier at which all ranks have started them; infinity until this rank arrives at it.
        self._started_barrier_number: float = 0

    def abort(self, connection: NcclConnection | None = None) -> None:
        """Abort a connection, by default the active one."""
        with defer_signals():
            self.mark_idle()
            (connection or self.active_connection).abort()

    def abort_pending(self) -> None:
        """Abort the pending collectives, once the safe ones before them are complete."""
        self._abort_pending(self._pending_command_number)

    def _abort_pending(self, command_number: int) -> None:
        """Abort the collectives of a command as `abort_pending`.

        While this thread waits, the other one may abort them, and start those of the next command.
        """
        with defer_signals():
            self._invalidate_pending(command_number)
            self._wait_for_other_hosts()
            mark, deadline = self._gpu.host_mark, perf_counter() + ABORT_TIMEOUT_SECONDS
            while mark[0] != self._epoch and not self._rank.has_peer_died() and perf_counter() < deadline:
                time.sleep(GPU_POLL_SECONDS)
            if self._pending_command_number == command_number:
                self.abort()

    def _invalidate_pending(self, command_number: int) -> None:
        """Invalidate the pending collectives on all ranks of this host, if they are those of a command."""
        with self._flags_lock:
            if self._pending_command_number == command_number:
                self._valid_flags[self._epoch % len(self._valid_flags)] = 0

    def _wait_for_other_hosts(self) -> None:
        """Wait until the ranks of other hosts have invalidated their collectives, too."""
        if self._rank.spans_hosts:
            time.sleep(_HOSTS_NOTICE_SECONDS)

    def restart_epochs(self) -> None:
        """Count epochs from 0 again, once no rank has pending collectives."""
        with self._flags_lock:
            self._epoch = self._gpu.host_mark[0] = 0
            self._valid_flags[:] = 1

    # -- calls from a command --------------------------------------------------------------------------------

    def mark_started(self, connection: NcclConnection, is_idle: bool = False) -> None:
        """Record that a connection enqueues work on the stream now, and start the thread at the first call.

        ``is_idle`` means that the stream is known to be idle.
        """
        is_new_epoch = self._pending_command_number != self._rank.command_number or math.isfinite(
            self._started_barrier_number
        )
        if is_new_epoch and connection is self.connections[0]:  # operations of a group start on an idle stream
            self._epoch = (self._epoch + 1) % (1 << 31)
            if self._pending_command_number and not is_idle:
                self._gpu.write_mark(self._stream, self._epoch)
            else:
                self._gpu.host_mark[0] = self._epoch
        self.active_connection = connection
        self._pending_command_number = self._rank.command_number
        self._started_barrier_number = math.inf
        if self._rank.spans_hosts:  # the flag of another host's rank is not set to 0 before this one is pending
            self._rank.barriers.check_cancelled()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch_peers, daemon=True)
            self._thread.start()

    def get_valid_flag_address(self) -> int:
        """Return the host address of the pending epoch's flag."""
        return self._flags_address + 4 * (self._epoch % len(self._valid_flags))

    def mark_completed(self, connection: NcclConnection) -> None:
        """Record that this rank's collectives have completed.

        NCCL buffers small messages, so a sender (such as the root of a broadcast) may complete before its receivers
        have started.  If a receiver then fails before it starts, its next collective would receive the message.  To
        prevent this, `resolve_failed_command` aborts the connection.
        """
        self.mark_idle()
        if connection is self.connections[0]:
            self._completed_command_number = self._rank.command_number

    def wait_until_started(self) -> None:
        """Wait until all ranks have started the pending collectives, which then complete unless a peer exits."""
        barrier_number = self._started_barrier_number
        if not barrier_number:
            return
        barriers = self._rank.barriers
        if barrier_number == math.inf:
            self._started_barrier_number = barriers.next_number
            barriers.arrive_and_wait()
            return
        try:  # after `notify_started`
            barriers.wait_for_barrier(int(barrier_number))
        except Cancelled:
            # If all ranks had arrived before the failure, the collectives complete.
            if not barriers.wait_and_check_all_reached(int(barrier_number)):
                raise

    def compare_digests_after_start(self, digest: bytes) -> bool:
        """Wait as `wait_until_started`.  Return True if all ranks pass the same digest.

        A rank that has started nothing passes another digest, to `Rank.compare_digests`.
        """
        self._started_barrier_number = self._rank.barriers.next_number
        return self._rank.compare_digests(digest)

    def notify_started(self) -> None:
        """Notify the other ranks, without waiting, that this rank has started its collectives.

        Workers may call this instead of `wait_until_started` at the end of a command, as the master waits for them.
        """
        if self._started_barrier_number == math.inf:
            self._started_barrier_number = self._rank.barriers.next_number
            self._rank.barriers.arrive()

    # -- PendingOperation ------------------------------------------------------------------------------------

    def resolve_failed_command(self, command_number: int) -> None:
        """Abort the collectives of a failed command unless all ranks have started them: on all ranks, or on none.

        Connections of groups are always aborted, on all ranks, so that members need not compare generations.
        """
        if self._completed_command_number == command_number != self._pending_command_number:
            self.abort(self.connections[0])
        self._abort_unless_started_by_all(command_number)
        for connection in self.connections[1:]:
            connection.abort()

    def _abort_unless_started_by_all(self, command_number: int) -> None:
        if not self._are_started_by_all(command_number):
            self._abort_pending(command_number)

    def _are_started_by_all(self, command_number: int) -> bool:
        """Whether all ranks have started a failed command's collectives.  True, too, while this is not decided."""
        if self._pending_command_number != command_number:
            return True
        # The last common barrier is read first, then the barrier at which this rank's collectives were started.
        barrier_number = self._rank.barriers.read_last_common_barrier(command_number)
        return barrier_number is None or barrier_number >= self._started_barrier_number

    def is_stream_idle(self) -> bool:
        """Whether all work on the stream is done."""
        (result,) = self._gpu.driver.cuStreamQuery(self._stream)
        return bool(result != self._gpu.driver.CUresult.CUDA_ERROR_NOT_READY)

    def has_writes_at_risk(self) -> bool:
        """Whether a collective that writes in place is pending, or was aborted by a peer's exit."""
        if self._pending_command_number and not self.has_lost_peer:
            self._gpu.set_current_gpu()
            return self.writes_in_place and not self.is_stream_idle()
        return self.has_lost_peer and self.writes_in_place

    def finish(self) -> None:
        """Wait until the stream is idle, or a peer has exited."""
        self._gpu.set_current_gpu()
        while self._pending_command_number and not self.is_stream_idle() and not self._rank.has_peer_died():
            time.sleep(GPU_POLL_SECONDS)

    def close(self) -> None:
        """Stop the thread and abort all connections."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)
        self._valid_flags[:] = 0
        self.abort()  # the active connection before the others
        for connection in self.connections:
            connection.abort()
        deadline = perf_counter() + STUCK_TIMEOUT_SECONDS
        while not self.is_stream_idle() and perf_counter() < deadline:  # it reads the flags
            time.sleep(GPU_POLL_SECONDS)
        self._gpu.unpin_pages(self._flags_address)

    # -- thread ----------------------------------------------------------------------------------------------

    def _watch_peers(self) -> None:
        """Abort pending collectives when a peer has exited, or has failed in the command that started them."""
        self._gpu.set_current_gpu()
        failed_command, failed_since, pause = 0, 0.0, PEER_POLL_SECONDS
        while not self._stop.wait(pause):
            command_number, pause = self._pending_command_number, PEER_POLL_SECONDS
            has_peer_died = bool(command_number) and self._rank.has_peer_died()
            has_failed = bool(command_number) and self._rank.barriers.last_failed_command == command_number
            if not (has_peer_died or has_failed):
                failed_command = 0
                continue
            if not has_peer_died and not self._are_started_by_all(command_number):
                self._invalidate_pending(command_number)  # even if this rank still compiles the launch
            if self._query_idle():
                failed_command, pause = 0, _IDLE_POLL_SECONDS
                continue
            if has_peer_died:
                self.has_lost_peer = True
                self._valid_flags[:] = 0
                self._wait_for_other_hosts()
                self.abort()
                # `PeerWatch` may have ignored the peer's own SIGURG while no collective was pending.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)
                return
            self._abort_unless_started_by_all(command_number)
            # No wait is unbounded, even if a peer neither starts its collective nor exits.
            if failed_command != command_number:
                failed_command, failed_since = command_number, perf_counter()
            elif perf_counter() > failed_since + ABORT_TIMEOUT_SECONDS:
                self._valid_flags[:] = 0
                self.abort()

    def _query_idle(self) -> bool:
        """Whether the stream is known to be idle: False if CUDA does not answer within `STUCK_TIMEOUT_SECONDS`.

        A stream has a capacity of about a thousand operations.  Enqueueing one on a full stream blocks within CUDA, and
        so does every other call of CUDA.  They block forever if the GPU waits for a missing peer, so the query has its
        own thread.
        """
        answers: list[bool] = []

        def query() -> None:
            self._gpu.set_current_gpu()
            answers.append(self.is_stream_idle())

        if self._query_thread is not None and self._query_thread.is_alive():
            return False
        self._query_thread = threading.Thread(target=query, daemon=True)
        self._query_thread.start()
        self._query_thread.join(STUCK_TIMEOUT_SECONDS)
        return bool(answers and answers[0])
