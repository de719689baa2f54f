"""Ranks for each chain of a sampler that computes chains in processes of their own.

PyMC forks one process for each chain.  Such a process is a copy of the master, but cannot use the master's ranks.  At
its first evaluation it starts ranks of its own.  Their number is the master's, divided by the number of chains that run
at a time.  Rows are not copied, since the ranks of a chain inherit the arrays.  docs/internals.rst has a diagram.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import sys
import traceback
from collections.abc import Callable, Generator, Iterator
from multiprocessing import current_process
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from time import perf_counter
from types import FrameType
from typing import Any

from synkhronos import ranks
from synkhronos.data_objects.rows import get_share_slice
from synkhronos.devices import NUMPY, get_rank_device
from synkhronos.extensions.row_slices import create_slice_queue
from synkhronos.ranks import Session, WorkerError
from synkhronos.ranks.errors import describe_exit
from synkhronos.startup import close, fork

#: Modules of PyMC that start a process for each chain.
_SAMPLER_MODULES = ("pymc.sampling.parallel", "pymc.sampling.population", "pymc.smc.parallel")

#: Seconds for which `measure_evaluation_rate` measures.
_MEASURE_SECONDS = 0.3
#: Maximal seconds until all chains are ready to be measured.
_READY_SECONDS = 120.0

#: Result of `find_chain` in a process that has called `set_chain`.
_chain: tuple[int, int] | None = None


def set_chain(number: int, n_concurrent_chains: int) -> None:
    """Set the number of this process's chain, and the number of chains that are sampled at a time."""
    global _chain
    _chain = number, n_concurrent_chains


def find_chain() -> tuple[int, int] | None:
    """Return the number of this process's chain, and the number of chains that are sampled at a time, or None.

    PyMC does not pass these numbers on, so they are read from the call that forked this process, which is on its stack.
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


def can_compute_in_forks(session: Session) -> bool:
    """Whether forked processes can compute or start ranks while a session runs: not if its ranks use GPUs."""
    return get_rank_device(session.rank) is NUMPY


def start_chain_ranks(max_ranks: int | None) -> bool:
    """Start this chain's share of the ranks, at most ``max_ranks``.  Return whether ranks were started.

    No ranks are started if this process samples no chain, or if the master has no ranks or has them on GPUs.  The ranks
    end with this process.
    """
    inherited, chain = ranks.get_inherited_session(), find_chain()
    if inherited is None or chain is None or not can_compute_in_forks(inherited):
        return False
    number, n_concurrent_chains = chain
    share = get_share_slice(len(inherited.rank.local_ranks), n_concurrent_chains, number % n_concurrent_chains)
    size = max(1, share.stop - share.start)
    create_slice_queue()  # before the fork: the ranks inherit it
    fork(min(size, max_ranks or size), use_gpu=False, timeout=inherited.timeout, hosts=[])
    Finalize(None, close, exitpriority=0)  # a process of multiprocessing does not run the functions of atexit
    return True


def measure_evaluation_rate(evaluate: Callable[[], Any], n_chains: int) -> float:
    """Measure the calls of a function per second, added up over chains that are sampled at a time.

    With several chains, each one is measured in a forked process of its own.
    """
    if n_chains == 1:
        evaluate()
        return _measure_rate(evaluate)
    barrier = multiprocessing.get_context("fork").Barrier(n_chains)

    def measure(number: int) -> Iterator[float]:
        set_chain(number, n_chains)
        evaluate()
        barrier.wait(_READY_SECONDS)
        yield _measure_rate(evaluate)

    return sum(run_forked(measure, n_chains))


def _measure_rate(evaluate: Callable[[], Any]) -> float:
    start, calls = perf_counter(), 0
    while perf_counter() - start < _MEASURE_SECONDS or calls < 3:
        evaluate()
        calls += 1
    return calls / (perf_counter() - start)


def run_forked(compute: Callable[[int], Iterator[Any]], n_processes: int) -> Generator[Any, None, None]:
    """Run ``compute(i)`` in forked process ``i``.  Yield the objects that it yields, in order of arrival.

    At the end, or after an error of a process or its exit, all processes are ended.
    """
    context = multiprocessing.get_context("fork")
    processes: dict[Connection, Any] = {}
    try:
        for number in range(n_processes):
            parent_end, child_end = context.Pipe(duplex=False)
            process = context.Process(target=_send_results, args=(compute, number, child_end), daemon=True)
            process.start()
            child_end.close()
            processes[parent_end] = process
        running = dict(processes)
        while running:
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                process = running[pipe]
                try:
                    kind, content = pipe.recv()
                except EOFError:
                    process.join()
                    exit_description = describe_exit(process.exitcode)
                    message = f"process {process.pid}, which was started for this call, {exit_description}"
                    raise WorkerError(message, 0) from None  # the process was forked by rank 0
                if kind == "error":
                    raise content
                if kind == "end":
                    del running[pipe]
                else:
                    yield content
    finally:
        for pipe, process in processes.items():
            process.terminate()
            process.join()
            pipe.close()


def _send_results(compute: Callable[[int], Iterator[Any]], number: int, pipe: Connection) -> None:
    """Send messages of a kind and a content: each "result" that `compute` yields, then the "end" or an "error"."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the master, which ends this process
    try:
        for result in compute(number):
            pipe.send(("result", result))
        pipe.send(("end", None))
    except Exception as error:
        pipe.send(("error", to_picklable(error)))


def to_picklable(error: Exception) -> Exception:
    """Return a copy of an error for another process, with the traceback as a note.

    Return a RuntimeError that names the error if its pickle can't be loaded.
    """
    note = "".join(traceback.format_exception(error))
    try:
        copy: Exception = pickle.loads(ForkingPickler.dumps(error))
    except Exception:
        copy = RuntimeError(repr(error))
    copy.add_note(f"In process {os.getpid()}:\n{note}")
    return copy
