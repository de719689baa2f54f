"""Shares the machine's cores out among ranks.

`available_cores`
    How many cores this process may use.
`ONE_THREAD`
    The environment of a process without such threads.
`ThreadShare`
    Limits this process' thread pools (BLAS, OpenMP) to one rank's share.
"""

from __future__ import annotations

import os

import threadpoolctl

from synkhronos.ranks.interrupts import defer_signals

#: Read by the libraries named when they are loaded, so these reach what a worker imports later.
_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
#: For a process that is to have no threads beside its own.
ONE_THREAD = dict.fromkeys(_VARIABLES, "1")


def available_cores() -> int:
    """Return the number of cores that this process may run on: its affinity mask."""
    return len(os.sched_getaffinity(0))


class ThreadShare:
    """One rank's share of the threads, so that all ranks together use about all cores.

    With ``environment`` the environment's variables are set as well, for libraries that are loaded later.  That is
    right for a worker, whose environment is its own; the master's belongs to the user.
    """

    def __init__(self, size: int, environment: bool):
        self.threads = max(1, available_cores() // size)
        self._limits: list[threadpoolctl.threadpool_limits] = []
        if environment:
            for variable in _VARIABLES:
                os.environ[variable] = str(min(self.threads, _positive(os.environ.get(variable), self.threads)))
        self.limit()

    def limit(self) -> None:
        """Limit the thread pools of all libraries that are loaded by now.

        To be called again when a function has run for the first time: its compiler may have loaded another BLAS.
        """
        if any(pool["num_threads"] > self.threads for pool in threadpoolctl.threadpool_info()):
            with defer_signals():  # what is not noted is never put back
                self._limits.append(threadpoolctl.threadpool_limits(limits=self.threads))

    def restore(self) -> None:
        """Give the thread pools what they had before."""
        while self._limits:
            self._limits.pop().restore_original_limits()


def _positive(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isdecimal() and int(text) > 0 else default
