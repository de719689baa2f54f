"""Worker of an experiment: a process with a device."""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from synkhronos.patching import restore_jax_precision
from synkhronos.platoon.channel import batch_queue, controller_connection, sockets
from synkhronos.platoon.channel.controller import add_port_arguments
from synkhronos.platoon.param_sync import ParamSyncRule
from synkhronos.platoon.util import EndOfBatches, PlatoonError, SingletonType
from synkhronos.programs.rank_context import get_rank_lock

try:
    from posix_ipc import BusyError  # scripts for Platoon catch this error of Platoon's lock
except ImportError:
    BusyError = TimeoutError

#: Platoon's names of reductions, and the library's.
_OP_NAMES = {
    **dict.fromkeys(("+", "sum", "add"), "sum"),
    **dict.fromkeys(("*", "prod", "product", "mul"), "prod"),
    **dict.fromkeys(("max", "maximum"), "max"),
    **dict.fromkeys(("min", "minimum"), "min"),
}


class Worker(metaclass=SingletonType):
    """The worker of this process, a singleton.

    Parameters
    ----------
    control_port : int
        Ignored: the launcher has connected the worker with its controller.
    data_port : int, optional
        Queue of mini-batches for `recv_mb`; see `init_mb_sock`.
    socket_timeout : int
        Milliseconds that a request or a mini-batch may take.
    data_hwm : int
        Ignored: the controller bounds the queue.

    Attributes
    ----------
    shared_params : list of ndarray
        Parameters in memory that the workers of this host share, after `init_shared_params`.
    local_params : list of shared variable
        This worker's own parameters.

    Raises
    ------
    PlatoonError
        If the launcher has not started this process.
    """

    def __init__(
        self,
        control_port: int | None,
        data_port: int | None = None,
        socket_timeout: int = 300000,
        data_hwm: int = 10,
    ):
        if controller_connection.current_connection is None:
            raise PlatoonError("this process has no controller: start NAME_worker.py with `synkhronos platoon NAME`")
        self._controller = controller_connection.current_connection
        self._timeout = socket_timeout / 1000
        first_rank = self.global_rank - self.local_rank  # of this host
        self._lock = get_rank_lock(self._controller.context, first_rank)
        self._holds_lock = False
        #: Connection to the queue of mini-batches.
        self._batch_connection: Connection | None = None
        #: Whether this worker has received no mini-batch since its last request.
        self._is_idle = True
        self._shared_memories: dict[int, mmap.mmap] = {}
        self.shared_params: list[np.ndarray] = []
        if data_port:
            self.init_mb_sock(data_port, data_hwm)

    # -- requests and the lock -----------------------------------------------------------------------------------

    def send_req(self, req: Any, info: Any = None) -> Any:
        """Send a request, and return the answer of the controller's ``handle_control``.

        Both are encoded as JSON: tuples become lists, keys of dicts str.  If there is no answer within
        ``socket_timeout``, or the controller has ended, PlatoonError is raised.
        """
        self._is_idle = True
        request = {"worker_id": os.getpid(), "req": req, "req_info": info}
        return self._controller.send_request(request, self._timeout)

    def lock(self, timeout: float | None = None) -> None:
        """Take the lock of this host's workers.

        By default there is no time limit.  If another worker still holds the lock after ``timeout`` seconds,
        posix_ipc.BusyError is raised, as in Platoon, or TimeoutError where posix_ipc is not installed.  If this worker
        holds the lock already, PlatoonError is raised.
        """
        if self._holds_lock:
            raise PlatoonError("lock: this worker holds the lock already")
        if not self._lock.acquire(timeout):
            raise BusyError("another worker holds the lock")
        self._holds_lock = True

    def unlock(self) -> None:
        """Release the lock; raise PlatoonError if this worker does not hold it."""
        if not self._holds_lock:
            raise PlatoonError("unlock: this worker does not hold the lock")
        self._holds_lock = False
        self._lock.release()

    @property
    def local_size(self) -> int:
        """Number of workers on this host."""
        return self._controller.local_size

    @property
    def local_rank(self) -> int:
        """Rank of this worker on its host: the position of its device in the host's list."""
        return self._controller.local_rank

    @property
    def global_size(self) -> int:
        """Number of the workers of all hosts."""
        return self._controller.context.size

    @property
    def global_rank(self) -> int:
        """Rank of this worker among all."""
        return self._controller.context.number

    def close(self) -> None:
        """Close the connection to the queue of mini-batches."""
        if self._batch_connection is not None:
            self._batch_connection.close()
            self._batch_connection = None

    # -- collectives -----------------------------------------------------------------------------------------------

    def all_reduce(self, src: Any, op: str, dest: Any = None) -> Any:
        """Return the reduction of the arrays of all workers, on the host or on GPUs, or None if ``dest`` gets it.

        All arrays have one shape and dtype.  ``op`` is ``"sum"``, ``"prod"``, ``"max"``, ``"min"``, or another name of
        Platoon's, such as ``"+"`` and ``"maximum"``.
        """
        name = _OP_NAMES.get(str(op).lower())
        if name is None:
            raise ValueError(f"op: expected one of {', '.join(_OP_NAMES)}, got {op!r}")
        src = np.asarray(src) if isinstance(src, np.generic) else src
        if dest is not None and (dest.shape, dest.dtype) != (src.shape, src.dtype):
            raise TypeError(
                f"dest: expected {src.dtype} of shape {src.shape}, as src, got {dest.dtype} of shape {dest.shape}"
            )
        with restore_jax_precision():
            result = self._controller.context.all_reduce(src, name)
        if dest is None:
            return result
        dest[...] = result
        return None

    def shared(self, array: Any) -> np.ndarray:
        """Return an array, of another array's shape and dtype, in memory that the workers of this host share.

        There is one memory for each number of bytes, initially zeros: all arrays of as many bytes share it.
        """
        nbytes = int(np.dtype(array.dtype).itemsize * np.prod(array.shape, dtype=int))
        memory = self._shared_memories.get(nbytes)
        if memory is None:
            memory, _ = self._controller.map_memory(f"shared arrays of {nbytes:,} bytes", nbytes, self._timeout)
            self._shared_memories[nbytes] = memory
        return np.ndarray(array.shape, array.dtype, memory)

    # -- shared parameters -----------------------------------------------------------------------------------------

    def init_shared_params(self, params: Sequence[Any], param_sync_rule: ParamSyncRule) -> None:
        """Map the shared parameters of this host; the first worker to call this copies its own into them.

        ``params`` are shared variables, whose shapes and dtypes are equal on all workers; the rule is that of
        `sync_params`.
        """
        self.local_params = params = list(params)
        self.update_fn = param_sync_rule.make_update_function(params)
        layouts = [(np.dtype(param.dtype), param.get_value(borrow=True).shape) for param in params]
        nbytes = [dtype.itemsize * int(np.prod(shape, dtype=int)) for dtype, shape in layouts]
        # Each parameter begins at a multiple of 16 bytes, which suits any dtype.
        offsets = np.cumsum([0, *(-(-n // 16) * 16 for n in nbytes)]).tolist()
        self.lock()
        try:
            memory, is_first = self._controller.map_memory("the shared parameters", offsets[-1], self._timeout)
            self.shared_params = [
                np.ndarray(shape, dtype, memory, offset)
                for (dtype, shape), offset in zip(layouts, offsets[:-1], strict=True)
            ]
            if is_first:
                self.copy_to_global(synchronous=False)
        finally:
            self.unlock()

    def sync_params(self, synchronous: bool = True) -> None:
        """Exchange this worker's parameters and the shared ones by the rule, if ``synchronous`` with the lock held.

        If `init_shared_params` was not called, PlatoonError is raised.
        """
        with self._lock_shared_params("sync_params", synchronous):
            self.update_fn(self.shared_params)

    def copy_to_local(self, synchronous: bool = True) -> None:
        """Copy the shared parameters to this worker's; argument and error as in `sync_params`."""
        with self._lock_shared_params("copy_to_local", synchronous):
            for param, value in zip(self.local_params, self.shared_params, strict=True):
                param.set_value(value)

    def copy_to_global(self, synchronous: bool = True) -> None:
        """Copy this worker's parameters to the shared ones; argument and error as in `sync_params`."""
        with self._lock_shared_params("copy_to_global", synchronous):
            for param, value in zip(self.local_params, self.shared_params, strict=True):
                value[...] = param.get_value(borrow=True)

    @contextlib.contextmanager
    def _lock_shared_params(self, caller: str, synchronous: bool) -> Iterator[None]:
        """Return a context manager that holds the lock, if ``synchronous``.

        If there are no shared parameters, it raises PlatoonError, which names the method ``caller``.
        """
        if not self.shared_params:
            raise PlatoonError(f"{caller}: call init_shared_params() first")
        if synchronous:
            self.lock()
        try:
            yield
        finally:
            if synchronous:
                self.unlock()

    # -- mini-batches ----------------------------------------------------------------------------------------------

    def init_mb_sock(self, port: int, data_hwm: int = 10) -> None:
        """Wait until the controller has opened the queue ``port``, and connect to it; ``data_hwm`` is ignored."""
        self._batch_connection = sockets.connect(
            f"{self._controller.address}-{port}", self._controller.context.report_progress, self._timeout
        )
        if self._batch_connection is None:
            raise PlatoonError(f"port: the controller has opened no queue {port}")

    def recv_mb(self) -> list[np.ndarray]:
        """Return the next mini-batch of the queue, the arrays of `Controller.send_mb`; each is received by one worker.

        Raises
        ------
        EndOfBatches
            If the controller has closed the queue and it is empty.  A worker that does not catch it exits, with status
            0 if it has received no mini-batch since its last request.
        PlatoonError
            If there is no mini-batch within ``socket_timeout``, or its sender was killed.
        """
        if self._batch_connection is None:
            raise PlatoonError("recv_mb: call init_mb_sock() first")
        with contextlib.suppress(OSError):  # the sender has ended; its last messages can be read
            self._batch_connection.send_bytes(b"")
        connection = self._batch_connection
        arrays = batch_queue.receive_arrays(
            lambda: self._controller.receive_from(connection, self._timeout, "mini-batch")
        )
        if arrays is None:
            raise EndOfBatches(self._is_idle)
        self._is_idle = False
        return arrays

    # -- arguments -------------------------------------------------------------------------------------------------

    @staticmethod
    def default_parser() -> argparse.ArgumentParser:
        """Return a parser of a worker's arguments, to which a script may add its own."""
        parser = argparse.ArgumentParser(description="A worker of Platoon's interface.")
        add_port_arguments(parser)
        return parser

    @staticmethod
    def default_arguments(args: argparse.Namespace) -> dict[str, Any]:
        """Return the arguments of this class among those parsed by `default_parser`."""
        return {name: value for name, value in vars(args).items() if name in ("control_port", "data_port", "data_hwm")}


class Soldier(Worker):
    """Worker of Platoon's first version; ``port`` and ``cport`` are the data and the control port."""

    def __init__(self, port: int | None = None, cport: int | None = None, socket_timeout: int = 300000, hwm: int = 10):
        super().__init__(cport, port, socket_timeout, hwm)

    def init_control_sock(self, port: int) -> None:
        """Do nothing: the launcher has connected the worker with its controller."""

    lock_params = Worker.lock
    unlock_params = Worker.unlock

    def init_shared_params(  # type: ignore[override]
        self, job_name: str, params: Sequence[Any], param_sync_rule: ParamSyncRule, cleanup: bool = False
    ) -> None:
        """Map the shared parameters as `Worker.init_shared_params`; ``job_name`` and ``cleanup`` are ignored."""
        super().init_shared_params(params, param_sync_rule)
