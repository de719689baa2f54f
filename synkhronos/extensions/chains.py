"""Ranks for each chain of a sampler that computes chains in processes of their own.

PyMC forks one process for each chain.  Such a process is a copy of the master, but cannot use the master's ranks.  At
its first evaluation it starts ranks of its own: the master's number of ranks, divided by the number of chains that run
at a time.  Rows are not copied, since the ranks of a chain inherit the arrays.

.. code-block:: text

   master, fork(4)      its ranks wait while chains are sampled
     ├─▶ chain 0 ─▶ rank 1        each chain: a session of 4 ranks / 2 chains
     └─▶ chain 1 ─▶ rank 1
"""

from __future__ import annotations

import multiprocessing
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import current_process
from multiprocessing.util import Finalize
from time import perf_counter
from types import FrameType
from typing import Any

import numpy as np

from synkhronos import ranks
from synkhronos.collectives.arguments import distribute_variables
from synkhronos.data.rows import get_share
from synkhronos.devices import HOST
from synkhronos.graphs import get_library
from synkhronos.processes import close, fork
from synkhronos.ranks import Command, Rank, Session

#: Modules of PyMC that start a process for each chain.
_SAMPLER_MODULES = ("pymc.sampling.parallel", "pymc.sampling.population", "pymc.smc.parallel")

#: Seconds for which `measure_evaluation_rate` measures, and those in which all chains have to be ready.
_MEASURE_SECONDS, _READY_SECONDS = 0.3, 120.0

#: Result of `find_chain` in a process that `set_chain` was called in.
_chain: tuple[int, int] | None = None


def set_chain(number: int, n_parallel: int) -> None:
    """Set the number of this process's chain, and the number of chains that are sampled at a time."""
    global _chain
    _chain = number, n_parallel


def find_chain() -> tuple[int, int] | None:
    """Return the number of this process's chain, and the number of chains that are sampled at a time, or None.

    PyMC does not pass these numbers on.  They are read from the call that forked this process, which is on its stack.
    """
    if _chain is not None:
        return _chain
    match = re.search(r"(?:worker_chain_|ChainWalker)(\d+)$", current_process().name)
    frame: FrameType | None = sys._getframe()
    while match and (frame := frame and frame.f_back):
        values = frame.f_locals if frame.f_globals.get("__name__") in _SAMPLER_MODULES else {}
        if "steppers" in values:  # of a population: all chains step at the same time
            return int(match[1]), len(values["steppers"])
        if "chains" in values and "cores" in values:
            return int(match[1]), min(values["chains"], values["cores"])
    return None


def can_chains_start_ranks(session: Session) -> bool:
    """Whether processes of chains can start ranks: ranks on GPUs cannot be forked."""
    return session.rank.device is HOST


def start_chain_ranks(max_ranks: int | None = None) -> bool:
    """Start the ranks of this process's chain; they end with this process.

    Parameters
    ----------
    max_ranks : int, optional
        Maximal number of ranks.  A chain has its share of the master's ranks on this machine, and at least one.

    Returns
    -------
    bool
        False if this process samples no chain, or the master has no ranks or has them on GPUs.
    """
    inherited, chain = ranks.get_inherited_session(), find_chain()
    if inherited is None or chain is None or not can_chains_start_ranks(inherited):
        return False
    number, n_parallel = chain
    share = get_share(len(inherited.rank.local_ranks), n_parallel, number % n_parallel)
    size = max(1, share.stop - share.start)
    fork(min(size, max_ranks or size), use_gpu=False, timeout=inherited.timeout, hosts=[])
    Finalize(None, close, exitpriority=0)  # a process of multiprocessing does not run the functions of atexit
    return True


def measure_evaluation_rate(evaluate: Callable[[], Any], n_chains: int) -> float:
    """Return the number of calls of a function per second, added up over chains that are sampled at a time.

    Parameters
    ----------
    evaluate : callable
        Evaluates a chain's log-density and its gradient.
    n_chains : int
        Number of chains.  Each has a process of its own if there are several.
    """
    if n_chains == 1:
        evaluate()
        return _measure_rate(evaluate)
    context = multiprocessing.get_context("fork")
    barrier, pipes, processes = context.Barrier(n_chains), [], []
    try:
        for number in range(n_chains):
            parent_end, chain_end = context.Pipe()
            pipes.append(parent_end)
            process = context.Process(
                target=_measure_chain_rate, args=(evaluate, number, n_chains, barrier, chain_end), daemon=True
            )
            processes.append(process)
            process.start()
            chain_end.close()
        rates = [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.terminate()
            process.join()
    errors = [rate for rate in rates if isinstance(rate, Exception)]
    if errors:  # one chain's error breaks the barrier of the others
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    return sum(rates)


def _measure_chain_rate(evaluate: Callable[[], Any], number: int, n_chains: int, barrier: Any, pipe: Any) -> None:
    set_chain(number, n_chains)
    try:
        evaluate()
        barrier.wait(_READY_SECONDS)
        pipe.send(_measure_rate(evaluate))
    except Exception as error:
        barrier.abort()
        pipe.send(error)


def _measure_rate(evaluate: Callable[[], Any]) -> float:
    start, calls = perf_counter(), 0
    while perf_counter() - start < _MEASURE_SECONDS or calls < 3:
        evaluate()
        calls += 1
    return calls / (perf_counter() - start)


def load_inherited_rows(session: Session, variables: list[Any], owner: Any) -> None:
    """Set each rank's variables to the rank's rows of the arrays in ``owner.inherited_rows``.

    Parameters
    ----------
    session : Session
        Its workers are forks of this process.
    variables : list of shared variable
    owner : object
        Its pickle is a reference: each worker has inherited the object with ``inherited_rows``, a list of an array
        for each variable.
    """
    with session.call_lock:
        session.wait_until_idle()
        session.run(_LoadInheritedRows(distribute_variables(session, variables), owner))


@dataclass(frozen=True, slots=True)
class _LoadInheritedRows(Command):
    """Command of `load_inherited_rows`; ``keys`` are the variables' keys among the ranks' objects."""

    keys: tuple[Any, ...]
    owner: Any

    def run(self, rank: Rank) -> None:
        """Put views of this rank's rows into the variables' containers, or copies where rows are not contiguous."""
        for key, values in zip(self.keys, self.owner.inherited_rows, strict=True):
            shared = rank.get_object(key)
            rows = values[get_share(len(values), rank.size, rank.number)]
            get_library(shared).store_value(shared, np.ascontiguousarray(rows))
