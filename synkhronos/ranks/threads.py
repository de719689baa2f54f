"""Shares the machine's cores out among ranks.

`available_cores`
    How many cores this process may use.
`share_threads`
    Limits this process' thread pools (BLAS, OpenMP) to one rank's share.
"""

from __future__ import annotations

import os

import threadpoolctl

#: Read by the libraries named when they are loaded, so these reach what a worker imports later.
_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def available_cores() -> int:
    """Return the number of cores that this process may run on (its affinity mask, where the system has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def share_threads(size: int, environment: bool) -> threadpoolctl.threadpool_limits:
    """Limit this process to its share of threads, so that ``size`` ranks together use about all cores.

    Parameters
    ----------
    size : int
        The number of ranks.
    environment : bool
        Whether to set the environment variables as well, for libraries that are loaded later.  Right for a
        worker, whose environment is its own; the master's belongs to the user.

    Returns
    -------
    threadpoolctl.threadpool_limits
        Its ``restore_original_limits()`` undoes the limits.
    """
    share = max(1, available_cores() // size)
    if environment:
        for variable in _VARIABLES:
            os.environ[variable] = str(min(share, _positive(os.environ.get(variable), share)))
    return threadpoolctl.threadpool_limits(limits=share)


def _positive(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isdecimal() and int(text) > 0 else default
