"""Ranks for each chain of a sampler whose chains are threads of this process, as nutpie's are.

Threads cannot share the ranks of this process without waiting for each other.  Therefore a server process is forked for
each chain that runs at a time, and starts the chain's share of the ranks.

.. code-block:: text

   master, fork(4)     thread of a chain ──parameters──▶ server 0 ─▶ rank 1      each server: a session of
                       thread of a chain ◀──results───── server 1 ─▶ rank 1      4 ranks / 2 chains

A thread takes any idle server: servers keep no state of a chain.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import queue
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np

from synkhronos import ranks
from synkhronos.extensions import chains
from synkhronos.ranks import WorkerError, count_available_cores

__all__ = ["ChainServers", "patch_external_sampler"]

#: Seconds that a server gets to end its ranks.
_CLOSE_SECONDS = 10.0


class ChainServers:
    """Server processes for chains that run at a time.

    Each of the ``n_servers`` inherits this process's objects, and has its share of the ranks.
    """

    def __init__(self, n_servers: int):
        context = multiprocessing.get_context("fork")
        self._idle: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        #: Error of later evaluations, once one has not read its result.
        self._failure: WorkerError | None = None
        for number in range(n_servers):
            parent_end, server_end = context.Pipe()
            self._pipes.append(parent_end)
            process = context.Process(
                target=_run_server, args=(server_end, list(self._pipes), number, n_servers), daemon=True
            )
            process.start()
            server_end.close()
            self._processes.append(process)
            self._idle.put(parent_end)

    def evaluate(self, distributed_sum: Any, params: Sequence[np.ndarray], with_gradients: bool) -> list[np.ndarray]:
        """Return the value of a sum and, optionally, its gradients, computed by an idle server.

        Raise its error, or WorkerError if the server or one of its ranks has exited.  After an evaluation that could
        not read its result, all later ones raise WorkerError with the cause of the first.
        """
        # Bytes, not a view of a BytesIO: Python 3.12 may crash when it collects the view with an error's traceback.
        request = bytes(ForkingPickler.dumps((distributed_sum, list(params), with_gradients)))
        pipe = self._idle.get()
        try:
            if self._failure is not None:
                raise self._failure
            pipe.send_bytes(request)
            results = pipe.recv()
        except BaseException as error:
            # The next evaluation on this pipe would read the result of this one.
            has_exited = isinstance(error, EOFError | OSError)
            if self._failure is None:
                cause = "a process that computes a chain's log-density has exited"
                self._failure = WorkerError(cause if has_exited else f"another chain stopped: {error!r}", 0)
            if has_exited:
                raise self._failure from error
            raise
        finally:
            self._idle.put(pipe)
        if isinstance(results, Exception):
            raise results
        return list(results)

    def close(self) -> None:
        """End the servers and their ranks."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_CLOSE_SECONDS)
            process.terminate()
            process.join()


def _run_server(pipe: Connection, inherited_pipes: list[Connection], number: int, n_servers: int) -> None:
    """Run a server: evaluate the sums that the master sends, until it closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the sampler, which stops its threads
    for connection in inherited_pipes:
        connection.close()
    chains.set_chain(number, n_servers)
    while True:
        try:
            distributed_sum, params, with_gradients = pipe.recv()
        except EOFError:
            return
        try:
            results: Any = distributed_sum.evaluate(params, with_gradients)
        except Exception as error:
            results = chains.to_picklable(error)
        pipe.send(results)


def patch_external_sampler() -> None:
    """Wrap PyMC's function that calls other samplers, to start servers for nutpie's chains."""
    from pymc.sampling import mcmc

    original = mcmc._sample_external_nuts
    if hasattr(original, "starts_chain_servers"):
        return

    @functools.wraps(original)
    def sample(*args: Any, **kwargs: Any) -> Any:
        sums = getattr(kwargs.get("model"), "distributed_sums", [])
        if kwargs.get("sampler") != "nutpie" or not sums:
            return original(*args, **kwargs)
        cores = (kwargs.get("nuts_sampler_kwargs") or {}).get("cores") or kwargs.get("cores") or count_available_cores()
        n_servers = min(kwargs["chains"], cores)
        if n_servers < 2 or not chains.can_compute_in_forks(ranks.get_session()):
            return original(*args, **kwargs)
        with contextlib.closing(ChainServers(n_servers)) as servers:
            for distributed_sum in sums:
                distributed_sum.remote_evaluator = servers
            try:
                return original(*args, **kwargs)
            finally:
                for distributed_sum in sums:
                    distributed_sum.remote_evaluator = None

    # Another library's wrapper by functools.wraps copies the attribute, so that the function is patched once.
    sample.starts_chain_servers = True  # type: ignore[attr-defined]  # mypy knows no attributes of functions
    mcmc._sample_external_nuts = sample
