"""Ranks for each chain of a sampler whose chains are threads of this process, as nutpie's are.

Threads cannot share the ranks of this process without waiting for each other.  So a server process is forked for each
chain that runs at a time, and starts the chain's share of the ranks.

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
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from synkhronos import ranks
from synkhronos.extensions import chains
from synkhronos.ranks import WorkerError, count_available_cores

__all__ = ["ChainServers", "wrap_nutpie"]

#: Seconds that a server gets to end its ranks.
_CLOSE_SECONDS = 10.0


class ChainServers:
    """Server processes for chains that run at a time.

    Parameters
    ----------
    count : int
        Number of servers.  Each inherits this process's objects, and has its share of the ranks.
    """

    def __init__(self, count: int):
        context = multiprocessing.get_context("fork")
        self._idle: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for number in range(count):
            parent_end, server_end = context.Pipe()
            self._pipes.append(parent_end)
            process = context.Process(target=_serve, args=(server_end, list(self._pipes), number, count), daemon=True)
            process.start()
            server_end.close()
            self._processes.append(process)
            self._idle.put(parent_end)

    def evaluate(self, rows_sum: Any, params: Sequence[np.ndarray], gradient: bool) -> list[np.ndarray]:
        """Return the value and, if asked for, the gradients of a `RowsSum`, computed by an idle server.

        Raises
        ------
        WorkerError
            If the server or one of its ranks has exited.
        Exception
            Any other error of the evaluation.
        """
        pipe = self._idle.get()
        try:
            pipe.send((rows_sum, list(params), gradient))
            results = pipe.recv()
        except BaseException as error:
            # After an interrupt, the result would be read as that of the next evaluation.
            pipe.close()
            if isinstance(error, EOFError | OSError):
                raise WorkerError("a process that computes a chain's log-density has exited", 0) from error
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


def _serve(pipe: Connection, inherited: list[Connection], number: int, count: int) -> None:
    """Evaluate sums until the master closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the sampler, which stops its threads
    for connection in inherited:
        connection.close()
    chains.set_chain(number, count)
    while True:
        try:
            rows_sum, params, gradient = pipe.recv()
        except EOFError:
            return
        try:
            results: Any = rows_sum.evaluate(params, gradient)
        except Exception as error:
            results = error
        pipe.send(results)


@contextlib.contextmanager
def _serve_chains(sums: Sequence[Any], count: int) -> Iterator[None]:
    """Context in which threads of a sampler evaluate these sums on servers."""
    servers = ChainServers(count)
    for rows_sum in sums:
        rows_sum.remote_evaluator = servers
    try:
        yield
    finally:
        for rows_sum in sums:
            rows_sum.remote_evaluator = None
        servers.close()


def wrap_nutpie() -> None:
    """Wrap PyMC's function that calls other samplers, so that nutpie's chains have servers."""
    from pymc.sampling import mcmc

    original = mcmc._sample_external_nuts
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def sample(*args: Any, **kwargs: Any) -> Any:
        sums = getattr(kwargs.get("model"), "rows_sums", [])
        if kwargs.get("sampler") != "nutpie" or not sums:
            return original(*args, **kwargs)
        session = ranks.get_session()
        cores = (kwargs.get("nuts_sampler_kwargs") or {}).get("cores") or kwargs.get("cores") or count_available_cores()
        count = min(kwargs["chains"], cores)
        if count < 2 or not chains.can_start_ranks(session):
            return original(*args, **kwargs)
        with _serve_chains(sums, count):
            return original(*args, **kwargs)

    mcmc._sample_external_nuts = sample
