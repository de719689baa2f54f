"""Limits of each rank's thread pools, so that all ranks together use about as many threads as there are cores."""

from __future__ import annotations

import os

import threadpoolctl

from synkhronos.ranks.interrupts import defer_signals

#: Environment variables that libraries read when they are loaded.
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
#: Environment variables that limit a process to a single thread.
ONE_THREAD = dict.fromkeys(_THREAD_VARIABLES, "1")


def count_available_cores() -> int:
    """Return the number of cores in this process's affinity mask."""
    return len(os.sched_getaffinity(0))


class ThreadLimit:
    """Limit of one rank's thread pools (BLAS, OpenMP): each may have ``n_threads`` threads.

    ``n_local_ranks`` is the number of ranks of this host.  ``sets_environment``, in workers only, also sets environment
    variables, for libraries that are loaded later: the master's environment belongs to the user.
    """

    def __init__(self, n_local_ranks: int, sets_environment: bool):
        self.n_threads = max(1, count_available_cores() // n_local_ranks)
        self._limits: list[threadpoolctl.threadpool_limits] = []
        if sets_environment:
            for variable in _THREAD_VARIABLES:
                os.environ[variable] = str(
                    min(self.n_threads, _parse_positive(os.environ.get(variable), self.n_threads))
                )
        self.apply()

    def apply(self) -> None:
        """Limit the thread pools of all loaded libraries.

        Call it again after a function's first run: its compiler may have loaded another BLAS.
        """
        if any(pool["num_threads"] > self.n_threads for pool in threadpoolctl.threadpool_info()):
            with defer_signals():  # a limit that is not recorded is never restored
                self._limits.append(threadpoolctl.threadpool_limits(limits=self.n_threads))

    def restore(self) -> None:
        """Restore the thread pools' previous limits."""
        while self._limits:
            self._limits.pop().restore_original_limits()


def _parse_positive(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isdecimal() and int(text) > 0 else default
