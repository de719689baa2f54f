"""Starts and ends the ranks.

`fork`
    Forks workers and binds each rank to its device.
`close`
    Ends them.
`bytes_sent`
    How much other hosts were sent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import IO

import numpy as np

from synkhronos import engines, ranks
from synkhronos.checks import flag, index, integer, number
from synkhronos.devices import HOST, choose, device_named, is_on_gpus, keep_off_gpus, needs_fresh_processes
from synkhronos.graphs import loaded_libraries
from synkhronos.hosts import MAX_RANKS_PER_HOST, Host, MpiLink, find_launch, is_this_machine, parse_hosts, serve
from synkhronos.ranks import Command, Rank

__all__ = ["bytes_sent", "close", "fork"]

#: Seconds of silence after which a host is lost, by default.
HOST_TIMEOUT = 10.0
#: Bytes of the largest array whose memory a rank keeps when it is freed (the most that GNU's C library takes), and of
#: all that it keeps.
LARGEST_KEPT, MOST_KEPT = 1 << 25, 1 << 28
#: As malloc.h numbers what `mallopt` sets.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True, slots=True)
class _Bind(Command):
    """Bind each rank to its device; each host knows best which places it has, and the master which is its own."""

    name: str
    places: list[str]
    seeds: tuple[bytes, ...]
    cores: tuple[tuple[int, ...], ...] = ()

    def run(self, rank: Rank) -> None:
        if rank.number < len(self.cores):  # before anything starts threads
            os.sched_setaffinity(0, self.cores[rank.number])
        _keep_freed_memory()
        if not rank.is_master:
            # Copies of the master's global generators would draw the same numbers on every rank.
            of_numpy, of_python = (
                blake2b(seed, salt=rank.number.to_bytes(8, "little")).digest() for seed in self.seeds
            )
            np.random.seed(np.frombuffer(of_numpy, np.uint32))
            random.seed(of_python)
        device = device_named(self.name)
        rank.device = device
        if device is HOST:
            keep_off_gpus()
        here = rank.control.here
        places = self.places if rank.root in here else device.places(len(here), 0)
        device.bind(rank, places[rank.number - here.start])


def _keep_freed_memory() -> None:
    """Have the C library keep the memory of freed arrays: the next call of the same function needs as much again.

    By default it gives the kernel what is freed at the end of its heap, and gets it back page by page, at about 1 us
    each; which ranks that slows down is chance.
    """
    with contextlib.suppress(AttributeError):  # a C library other than GNU's
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, LARGEST_KEPT)
        libc.mallopt(_TRIM_THRESHOLD, MOST_KEPT)


def fork(
    n_parallel: int | None = None,
    use_gpu: bool | None = None,
    master_rank: int = 0,
    profile_workers: bool = False,
    timeout: float | None = None,
    hosts: Sequence[str] | str | None = None,
    host_timeout: float = HOST_TIMEOUT,
) -> int:
    """Fork one worker for each rank but the master's, and bind each rank to its device.

    Parameters
    ----------
    n_parallel : int, optional
        The number of ranks; with ``hosts`` the number on each host.  By default one for each core that this process may
        use, or one for each GPU.
    use_gpu : bool, optional
        By default GPUs are used if all hosts have some and the packages that they need, else the CPU.
    master_rank : int
        The rank of this process.
    profile_workers : bool
        Whether each worker leaves a cProfile file, ``synkhronos_rank{r}_{pid}.prof``, in the working directory.
    timeout : float, optional
        Seconds that a call waits for the workers before it ends them and raises `WorkerError`.  By default it waits as
        long as they live, and Ctrl-C interrupts it.
    hosts : list of str, or "all", optional
        The machines with ranks, this one first; ``"a:3"`` means three ranks on ``a``.  ``"all"`` means the hosts of a
        Slurm, PBS or LSF allocation.  By default those that the variable ``SYNKHRONOS_HOSTS`` names (``a,b:3``), or
        those on which ``mpirun`` or ``srun`` has started this script, one process on each: there `fork` returns on the
        first host only.  An empty list means this machine alone.
    host_timeout : float
        Seconds of silence after which a host is taken for lost.

    Returns
    -------
    int
        The number of ranks.

    Raises
    ------
    TypeError, ValueError
        For wrong arguments.
    RuntimeError
        If ranks are running already, ``use_gpu`` asks for GPUs that can't be used, hosts can't be reached, or they have
        other versions of Python or of a library.

    Notes
    -----
    A worker is a copy of this process as it is now: fork early, before you load data, and before you start threads,
    which may hold locks.  Each rank's BLAS gets as many threads as its share of the cores.  From then on the C
    library keeps up to 256 MB of freed arrays' memory in each rank, this process included, and the next call uses it
    again.

    Workers on other hosts are not copies but new processes, with this process' ``sys.path`` and working directory; they
    import what they need.  Python and its packages have to be at the same path there.  Hosts talk by MPI, which ``pip
    install synkhronos[hosts]`` installs.  They send each other pickles, so use a network that you trust.

    Examples
    --------
    >>> import synkhronos as synk
    >>> synk.fork(2, use_gpu=False)
    2
    >>> synk.close()
    """
    if n_parallel is not None:
        n_parallel = integer(n_parallel, "n_parallel")
        if not 1 <= n_parallel <= MAX_RANKS_PER_HOST:
            raise ValueError(f"n_parallel: expected a number of ranks from 1 to {MAX_RANKS_PER_HOST}, got {n_parallel}")
    if use_gpu is not None and not isinstance(use_gpu, bool | np.bool_):
        raise TypeError(f"use_gpu: expected True, False or None, got {use_gpu!r}")
    profile_workers = flag(profile_workers, "profile_workers")
    if timeout is not None and not number(timeout, "timeout", "a number of seconds, or None") > 0:
        raise ValueError(f"timeout: expected a positive number of seconds, got {timeout!r}")
    master_rank = integer(master_rank, "master_rank")
    if not number(host_timeout, "host_timeout", "a number of seconds") >= 1:
        raise ValueError(f"host_timeout: expected a number of seconds, at least 1, got {host_timeout!r}")
    named = parse_hosts(hosts)
    if len(named) == 1:
        _check_is_here(named[0])
        return _fork(named[0].n_ranks or n_parallel, use_gpu, master_rank, profile_workers, timeout)
    process = find_launch() if hosts is None else None
    if not named and process is not None and process[0] > 0:
        serve()
    if named or process is not None:
        with _started(named or None, use_gpu, host_timeout) as others:
            return _fork(n_parallel, use_gpu, master_rank, profile_workers, timeout, link=others)
    return _fork(n_parallel, use_gpu, master_rank, profile_workers, timeout)


def fork_bound(
    n_parallel: int,
    use_gpu: bool,
    cores: Sequence[Sequence[int]],
    hosts: Sequence[str] = (),
    said: IO[str] | None = None,
) -> int:
    """Fork as `fork` does, and bind each rank of this host to its cores before its device starts threads; none for not.

    What other hosts print goes to the file ``said``.
    """
    bound = tuple(map(tuple, cores))
    named = parse_hosts(hosts)
    if len(named) > 1:
        with _started(named, use_gpu, said=said) as others:
            return _fork(None, use_gpu, cores=bound, link=others)
    for host in named:
        _check_is_here(host)
    return _fork(n_parallel, use_gpu, cores=bound)


def _check_is_here(host: Host) -> None:
    """Refuse another machine: where one host is named there are no agents, and nothing else to find it out."""
    if not is_this_machine(host.name):
        raise RuntimeError(
            f"the hosts {host.name} could not be reached: the first host has to be the machine that calls fork(), and "
            f"{host.name} is not"
        )


@contextlib.contextmanager
def _started(
    named: Sequence[Host] | None, use_gpu: bool | None, host_timeout: float = HOST_TIMEOUT, said: IO[str] | None = None
) -> Iterator[MpiLink]:
    """Start other hosts, and end them if the ``with`` block fails."""
    ranks.check_free()
    if use_gpu:
        choose(True, None)  # where this host has none, or lacks something, no other is asked
    link = MpiLink(named, float(host_timeout), said)
    try:
        link.launch()
        yield link
    except BaseException:
        link.kill()
        raise


def _fork(
    n_parallel: int | None,
    use_gpu: bool | None,
    master_rank: int = 0,
    profile_workers: bool = False,
    timeout: float | None = None,
    cores: tuple[tuple[int, ...], ...] = (),
    link: MpiLink | None = None,
) -> int:
    if link is None:
        device, size = choose(use_gpu, n_parallel)
        index(master_rank, "master_rank", size, ValueError)
        n_here = size
    else:
        device, _ = choose(link.choose_gpu_default() if use_gpu is None else use_gpu, None)
        link.divide(n_parallel, is_on_gpus(device))
        size, n_here = link.size, len(link.here)
        if master_rank not in link.here:
            raise ValueError(f"master_rank: expected a rank of this host, below {n_here}, got {master_rank}")
    # From the master's states, so that a run repeats from its seed.
    states = np.random.get_state(legacy=False), random.getstate()
    seeds = tuple(blake2b(pickle.dumps(state)).digest() for state in states)
    # Copies of this process have what it has imported.
    loaded_libraries()
    engines.kinds()
    first = _Bind(device.name, device.places(n_here, master_rank), seeds, cores)
    ranks.fork(size, master_rank, profile_workers, timeout, first, needs_fresh_processes(), link)
    return size


def bytes_sent() -> int:
    """Return how many bytes of Data objects and functions other hosts have been sent since `fork`.

    Unchanged pages of memory are not sent again.  Of the rows that a lock brings, only those that the first host sends
    are counted.  Values that collectives exchange are not counted.

    Raises
    ------
    RuntimeError
        If no ranks are running.

    Examples
    --------
    >>> import synkhronos as synk
    >>> n = synk.fork(2, use_gpu=False)
    >>> synk.bytes_sent()  # there is one host
    0
    >>> synk.close()
    """
    return ranks.session().link.bytes_sent


def close() -> None:
    """End the workers and free every shared segment.

    Runs by itself at exit, and does nothing when no ranks are running.  `fork` works again after it; functions made
    before are sent to the new ranks when they are called; Data objects made before are empty.

    Examples
    --------
    >>> import synkhronos as synk
    >>> synk.close()
    """
    ranks.close()
