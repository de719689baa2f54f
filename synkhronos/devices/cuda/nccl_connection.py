"""The NCCL connection between the ranks' GPUs: how it is made, and how it is aborted.

States of a `NcclConnection` on one rank::

    none ────────> exchanging id ────────> in NCCL's init ────────────> connected
      ^   connect    the first member        a thread blocks in it,        │  generation is not 0,
      │              sends an id             for 40 s at most              │  equal on all members
      │                 │                       │                          │
      └─────────────────┴───────────────────────┴──────────────────────────┘
         abort, by any thread: this rank or a peer has failed or exited; timeout; the watchdog; end

The id is exchanged at a barrier of the command (in groups: by messages).  If a rank fails or exits before the exchange,
the attempt fails on all ranks.  NCCL's init can't be interrupted, and returns only if all ranks call it.  It therefore
runs in a thread.  Meanwhile the main thread checks the peers, and abandons the thread if one of them fails.  If an
abandoned init returns later, its thread aborts the communicator.

Some ranks may connect, and others notice a failure first.  Then the ranks' generations differ, so each collective
starts with a comparison of generations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from synkhronos.devices.cuda.gpu_context import GpuContext, unwrap_cuda_result
from synkhronos.devices.cuda.launch_state import LaunchState
from synkhronos.devices.cuda.nccl_log import NcclLog
from synkhronos.ranks import Rank
from synkhronos.ranks.interrupts import defer_signals

#: NCCL's number of the dtype uint8 (ncclUint8).
NCCL_UINT8 = 1
#: NCCL's number of the reduction to a sum (ncclSum).
NCCL_SUM = 0
#: NCCL's results without an error: ncclSuccess and ncclInProgress.
_NO_ERROR_RESULTS = (0, 7)
#: Seconds between two checks of the peers.
PEER_POLL_SECONDS = 0.02
#: Seconds after which an attempt to connect fails; it usually takes one or two seconds.
CONNECT_TIMEOUT_SECONDS = 40
#: Seconds after which a call of CUDA or NCCL that should return at once is assumed to wait for a missing peer.
STUCK_TIMEOUT_SECONDS = 0.5


class NcclConnection:
    """NCCL communicator of all ranks, or of a group of ranks; the first collectives run on ``stream``.

    Attributes
    ----------
    nccl : module
        The functions of NCCL (``nccl.bindings.nccl``).
    generation : int
        Number of the connection, equal on all ranks that share it; 0 without a connection.
    members : tuple of int
        Ranks of the last connection, in NCCL's order.
    nccl_lock : threading.RLock
        Held during calls of NCCL, so that `abort` does not free the communicator meanwhile.
    launch_state : LaunchState
        State that handlers in C++ read during a launch, with the communicator's handle.
    """

    def __init__(self, rank: Rank, gpu: GpuContext, stream: int):
        from nccl.bindings import nccl

        self.nccl = nccl
        self.generation = 0
        self.nccl_lock = threading.RLock()
        self.members: tuple[int, ...] = ()
        self.launch_state = LaunchState()
        self._rank, self._gpu, self._stream = rank, gpu, stream
        self._comm: Any = None  # a `nccl.core.Communicator`
        self._handle: Any = None  # its handle, for the bindings' functions
        #: Number of the current attempt to connect; the result of an earlier one is discarded.
        self._attempt = 0
        self._comm_lock = threading.Lock()

    def connect(self, generation: int, members: Sequence[int], all_gather: Callable[[Any], Sequence[Any]]) -> None:
        """Connect ranks that have no connection yet.

        ``generation`` and ``members`` are equal on all of these ranks.  ``all_gather`` is a collective that takes this
        rank's value and returns a list, of which only the first member's value is used.  RuntimeError is raised if this
        rank could not be connected; on several hosts, the message names NCCL's network interfaces.
        """
        from nccl.core import get_unique_id

        self.members = tuple(members)
        with NcclLog(self._rank.spans_hosts) as log:
            try:
                own_id = bytes(get_unique_id()) if self._rank.number == members[0] else b""
                unique_id, first_interface = all_gather((own_id, log.find_interface()))[0]
                failure = self._connect_in_thread(unique_id)
                if failure is not None:
                    interfaces = _describe_interfaces(log.find_interface(), first_interface, members[0])
                    raise RuntimeError(
                        f"NCCL did not connect the ranks' GPUs: {failure}{interfaces}{log.quote_warnings()}"
                    )
            except BaseException:
                self.abort()
                raise
        self.generation = generation

    def _connect_in_thread(self, unique_id: bytes) -> str | None:
        """Connect in a thread.  Return the reason of a failure, or None.

        If a peer fails, the thread is abandoned.  A non-blocking communicator would be interruptible, but would start a
        thread for each collective.
        """
        errors: list[BaseException] = []
        thread = threading.Thread(target=self._init_and_warm_up, args=(self._attempt, unique_id, errors), daemon=True)
        deadline = perf_counter() + CONNECT_TIMEOUT_SECONDS
        thread.start()
        while thread.is_alive():
            thread.join(PEER_POLL_SECONDS)
            self._rank.barriers.check_cancelled()
            if perf_counter() > deadline:
                return f"it took longer than {CONNECT_TIMEOUT_SECONDS} seconds"
        return f"{type(errors[0]).__name__}: {errors[0]}" if errors else None

    def _init_and_warm_up(self, attempt: int, unique_id: bytes, errors: list[BaseException]) -> None:
        """Run NCCL's init and each collective once, and append an exception to ``errors``; the target of a thread."""
        from nccl.core import Communicator, UniqueId

        nccl, stream = self.nccl, self._stream
        size, nccl_rank = len(self.members), self.members.index(self._rank.number)
        try:
            self._gpu.set_current_gpu()
            comm = Communicator.init(size, nccl_rank, UniqueId.from_bytes(unique_id))
            handle = comm._comm  # for the bindings' functions: methods of the class inspect their arrays at each call
            address = self._gpu.allocate_scratch(size)
            with self.nccl_lock:
                if not self._set_current_comm(attempt, comm):
                    comm.abort()
                    return
                # NCCL sets up transports at the first collective of each kind: here, where a failure is handled.
                nccl.all_reduce(address, address, 1, NCCL_UINT8, NCCL_SUM, handle, stream)
                nccl.broadcast(address, address, 1, NCCL_UINT8, 0, handle, stream)
                nccl.reduce(address, address, 1, NCCL_UINT8, NCCL_SUM, 0, handle, stream)
                nccl.reduce_scatter(address, address + nccl_rank, 1, NCCL_UINT8, NCCL_SUM, handle, stream)
                nccl.all_gather(address + nccl_rank, address, 1, NCCL_UINT8, handle, stream)
                nccl.group_start()
                for peer in range(size):
                    if peer != nccl_rank:
                        nccl.send(address, 1, NCCL_UINT8, peer, handle, stream)
                        nccl.recv(address + peer, 1, NCCL_UINT8, peer, handle, stream)
                nccl.group_end()
            unwrap_cuda_result(self._gpu.driver.cuStreamSynchronize(stream))
        except BaseException as error:
            errors.append(error)

    def _set_current_comm(self, attempt: int, comm: Any) -> bool:
        """Store an attempt's communicator as the current one.  Return False if the attempt was aborted."""
        with self._comm_lock:
            if attempt != self._attempt:
                return False
            self._comm, self._handle = comm, comm._comm
            self.launch_state.comm_handle = int(getattr(comm._comm, "handle", comm._comm))
            return True

    def abort(self) -> None:
        """Abort the connection or the attempt to connect, and all operations in progress."""
        # An interrupt in the middle would leave a communicator that is neither current nor aborted, and its operations
        # would wait forever.
        with defer_signals():
            with self._comm_lock:  # only one thread gets the communicator
                comm, self._comm, self.generation = self._comm, None, 0
                self._attempt += 1
                self.launch_state.comm_handle = 0
            if comm is not None:
                self._gpu.set_current_gpu()
                is_locked = self.nccl_lock.acquire(timeout=STUCK_TIMEOUT_SECONDS)
                try:
                    comm.abort()
                finally:
                    if is_locked:
                        self.nccl_lock.release()

    def check_connected(self) -> None:
        """Raise RuntimeError if the connection was aborted after the ranks compared their generations."""
        if self._comm is None:
            self._rank.barriers.check_cancelled()
            raise RuntimeError("the connection between the ranks' GPUs was aborted")

    def get_handle(self) -> Any:
        """Return the communicator's handle, for NCCL's functions.  Raise the errors of `check_connected`."""
        if self._comm is None:
            self.check_connected()
        return self._handle

    def get_async_error(self) -> int | None:
        """Return NCCL's asynchronous error (an ncclResult_t), or None if there is none."""
        with self.nccl_lock:
            if self._comm is None:
                return None
            state: int = self.nccl.comm_get_async_error(self._handle)
        return None if state in _NO_ERROR_RESULTS else state


def _describe_interfaces(own_interface: str, first_interface: str, first_rank: int) -> str:
    """Return a sentence on the interfaces by which this rank has tried to reach the first rank, or "" if unknown."""
    if not (own_interface and first_interface):
        return ""
    return (
        f". NCCL uses the network interface {own_interface} here, and {first_interface} on rank {first_rank}, which "
        "all ranks have to reach; NCCL_SOCKET_IFNAME selects the interface, for all hosts"
    )
