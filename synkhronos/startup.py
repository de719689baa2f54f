"""Start and end of the ranks.

``fork`` chooses the number of ranks, their machines and their device.  It starts the session and runs its first
command, which prepares each rank.  Workers are forks of this process, or new processes where a fork could
not compute: after JAX has run here, and on other hosts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import IO, Any

import numpy as np

from synkhronos import engines, ranks
from synkhronos.checks import check_flag, check_index, check_integer, check_number
from synkhronos.devices import (
    NUMPY,
    choose_device,
    force_jax_on_cpu,
    get_device,
    is_fork_unsafe,
    set_rank_device,
    undo_force_jax_on_cpu,
)
from synkhronos.gpus import get_n_gpu
from synkhronos.graph_libraries import apply_settings, list_settings
from synkhronos.hosts import (
    MAX_RANKS_PER_HOST,
    Host,
    MpiLink,
    check_single_process,
    is_this_machine,
    parse_hosts,
)
from synkhronos.ranks import Command, Rank

__all__ = ["bytes_sent", "close", "fork"]

#: Default number of seconds without a message after which a host is considered lost.
DEFAULT_HOST_TIMEOUT = 10.0
#: Number of bytes of the largest freed array whose memory the C library of each rank keeps: the maximum of GNU's.
MAX_FREED_ARRAY_NBYTES = 1 << 25
#: Number of bytes of freed arrays that the C library of each rank keeps in total.
MAX_FREED_NBYTES = 1 << 28
#: Parameters of `mallopt`, as in malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True, slots=True)
class _SetUpRank(Command):
    """Prepare a rank: bind it to its cores, choose its device, and seed its global generators."""

    device_name: str
    #: GPU of each rank of the master's host, as ``CUDA_VISIBLE_DEVICES`` names it.  Other hosts assign their own.
    gpus: list[str]
    #: Seeds of NumPy's and Python's global generators.
    seeds: tuple[bytes, ...]
    #: The master's settings of each graph library, by import name, for workers that are new processes.
    settings: dict[str, dict[str, Any]]
    #: Cores of each rank; empty if ranks are not bound to cores.
    cores: Sequence[Sequence[int]] = ()
    #: Number of each rank's GPU among those of its host, for the ranks of all hosts; empty if there is one host.
    gpu_numbers: tuple[int, ...] = ()

    def without_rank(self, rank_number: int) -> _SetUpRank:
        gpus = self.gpus[:rank_number] + self.gpus[rank_number + 1 :]
        cores = [*self.cores[:rank_number], *self.cores[rank_number + 1 :]]
        gpu_numbers = self.gpu_numbers[:rank_number] + self.gpu_numbers[rank_number + 1 :]
        return replace(self, gpus=gpus, cores=cores, gpu_numbers=gpu_numbers)

    def run(self, rank: Rank) -> None:
        if rank.number < len(self.cores):  # before any library starts threads
            os.sched_setaffinity(0, self.cores[rank.number])
        _keep_freed_memory()
        if not rank.is_master:
            # Otherwise forks of the master would draw the same numbers.
            numpy_seed, python_seed = (
                blake2b(seed, salt=rank.number.to_bytes(8, "little")).digest() for seed in self.seeds
            )
            np.random.seed(np.frombuffer(numpy_seed, np.uint32))
            random.seed(python_seed)
        device = get_device(self.device_name)
        set_rank_device(rank, device)
        if device is NUMPY:
            force_jax_on_cpu()
        local_ranks = rank.local_ranks
        gpu_number, gpus = rank.number - local_ranks.start, self.gpus
        if rank.master_rank not in local_ranks:
            gpu_numbers = self.gpu_numbers[local_ranks.start : local_ranks.stop]
            # CUDA numbers the GPUs anew if it leaves out a broken one: then the master's numbers may not exist.
            if device is NUMPY or max(gpu_numbers) < get_n_gpu():
                gpu_number = gpu_numbers[gpu_number]
            gpus = device.choose_gpus(gpu_number + 1, 0)
        device.initialize(gpus[gpu_number])
        apply_settings(self.settings)


def _keep_freed_memory() -> None:
    """Make the C library keep the memory of freed arrays, since the next call of a function needs as much again.

    By default the C library returns memory at the end of its heap to the kernel, and later gets it back page by page.
    Which ranks this slows down is random.
    """
    with contextlib.suppress(AttributeError):  # a C library other than GNU's
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, MAX_FREED_ARRAY_NBYTES)
        libc.mallopt(_TRIM_THRESHOLD, MAX_FREED_NBYTES)


def fork(
    n_parallel: int | None = None,
    use_gpu: bool | None = None,
    master_rank: int = 0,
    profile_workers: bool = False,
    timeout: float | None = None,
    hosts: Sequence[str] | str | None = None,
    host_timeout: float = DEFAULT_HOST_TIMEOUT,
) -> int:
    """Start the ranks: this process is the master, each other rank a worker process.  Each rank gets a device.

    Parameters
    ----------
    n_parallel : int, optional
        Number of ranks; with ``hosts`` the number on each host.  Default: one for each core that this process may use,
        or one for each GPU.
    use_gpu : bool, optional
        Whether to compute on GPUs.  Default: True if all hosts have GPUs and the necessary packages.
    master_rank : int
        Rank of this process.
    profile_workers : bool
        Whether each worker writes a cProfile file, ``synkhronos_rank{r}_{pid}.prof``, to the working directory.
    timeout : float, optional
        Seconds for which a call waits for the workers before it ends them and raises `WorkerError`.  Default: no limit;
        Ctrl-C interrupts the wait.
    hosts : list of str, or "all", optional
        Machines with ranks, this one first; ``"a:3"`` means three ranks on ``a``.  ``"all"`` means the hosts of a
        Slurm, PBS or LSF allocation.  Default: the hosts in the environment variable ``SYNKHRONOS_HOSTS``
        (``a,b:3``), or else this machine only, as with an empty list.
    host_timeout : float
        Seconds without a message after which a host is considered lost.

    Returns
    -------
    int
        Number of ranks.

    Raises
    ------
    TypeError, ValueError
        For wrong arguments.
    RuntimeError
        If ranks are running already, if ``use_gpu`` requests GPUs that can't be used, if hosts can't be reached, or if
        they have other versions of Python or of a library.

    Notes
    -----
    A worker is a copy of this process.  Therefore call `fork` early, before you load data, and before you start
    threads, which may hold locks.  Each rank's BLAS uses as many threads as the rank's share of the cores.  From
    then on the C library caches up to 256 MB of memory of freed arrays in each rank, this process included.

    Workers on other hosts are new processes with this process's ``sys.path`` and working directory.  Python and its
    packages have to be installed at the same paths there.  Hosts communicate by MPI, which
    ``pip install synkhronos[hosts]`` installs.  They exchange pickles, so use a network that you trust.

    Examples
    --------
    >>> import synkhronos as synk
    >>> synk.fork(2, use_gpu=False)
    2
    >>> synk.close()
    """
    if n_parallel is not None:
        n_parallel = check_integer(n_parallel, "n_parallel")
        if not 1 <= n_parallel <= MAX_RANKS_PER_HOST:
            raise ValueError(f"n_parallel: expected a number of ranks from 1 to {MAX_RANKS_PER_HOST}, got {n_parallel}")
    if use_gpu is not None and not isinstance(use_gpu, bool | np.bool_):
        raise TypeError(f"use_gpu: expected True, False or None, got {use_gpu!r}")
    profile_workers = check_flag(profile_workers, "profile_workers")
    if timeout is not None and not check_number(timeout, "timeout", "a number of seconds, or None") > 0:
        raise ValueError(f"timeout: expected a positive number of seconds, got {timeout!r}")
    master_rank = check_integer(master_rank, "master_rank")
    if not check_number(host_timeout, "host_timeout", "a number of seconds") >= 1:
        raise ValueError(f"host_timeout: expected a number of seconds, at least 1, got {host_timeout!r}")
    host_list = parse_hosts(hosts)
    if len(host_list) != 1 and (host_list or hosts is None):
        check_single_process()
    return start_ranks(
        host_list,
        n_parallel,
        use_gpu,
        master_rank=master_rank,
        profile_workers=profile_workers,
        timeout=timeout,
        host_timeout=host_timeout,
    )


def start_ranks(
    host_list: Sequence[Host],
    n_parallel: int | None,
    use_gpu: bool | None,
    master_rank: int = 0,
    profile_workers: bool = False,
    timeout: float | None = None,
    cores: Sequence[Sequence[int]] = (),
    host_timeout: float = DEFAULT_HOST_TIMEOUT,
    output: IO[str] | None = None,
) -> int:
    """Start the agents of other hosts and the ranks, and return the number of ranks; see `fork`.

    ``cores`` has the cores of each rank on this host; it is empty if ranks are not bound to cores.  ``output`` is a
    file for the output of other hosts.
    """
    undo_force_jax_on_cpu()
    link = MpiLink(host_list, float(host_timeout), output) if len(host_list) > 1 else None
    gpu_numbers: tuple[int, ...] = ()
    try:
        if link is not None:
            ranks.check_no_session()
            if use_gpu:
                choose_device(True, None)  # raises if this host has no GPUs, before agents start
            link.start_agents()
            device, _ = choose_device(link.choose_gpu_default() if use_gpu is None else use_gpu, None)
            link.assign_ranks(n_parallel, device.needs_gpu)
            n_ranks, n_local = link.size, len(link.local_ranks)
            if master_rank not in link.local_ranks:
                raise ValueError(f"master_rank: expected a rank of this host, below {n_local}, got {master_rank}")
            gpu_numbers = tuple(i for host in link.ranks_by_host for i in range(len(host)))
        else:
            for name, n_ranks_of_host in host_list:
                if not is_this_machine(name):  # a single host has no agents that would detect this
                    raise RuntimeError(
                        f"hosts: the first host has to be the machine that calls fork(), and {name} is not"
                    )
                n_parallel = n_ranks_of_host or n_parallel
            device, n_ranks = choose_device(use_gpu, n_parallel)
            check_index(master_rank, "master_rank", n_ranks, ValueError)
            n_local = n_ranks
        # From the master's states, so that runs with the same seed are equal.
        generator_states = np.random.get_state(legacy=False), random.getstate()
        seeds = tuple(blake2b(pickle.dumps(state)).digest() for state in generator_states)
        settings = list_settings()  # imports modules before the fork, so that workers inherit them
        engines.list_engines()
        gpus = device.choose_gpus(n_local, master_rank)
        first_command = _SetUpRank(device.name, gpus, seeds, settings, cores, gpu_numbers)
        ranks.start_session(
            n_ranks,
            master_rank,
            profile=profile_workers,
            timeout=timeout,
            first_command=first_command,
            spawn=is_fork_unsafe(),
            link=link,
        )
    except BaseException:
        if link is not None:
            link.kill()
        raise
    return n_ranks


def bytes_sent() -> int:
    """Return the number of bytes of Data objects and functions that were sent to other hosts after `fork`.

    Unchanged pages of memory are not sent again.  Rows that `Lock.pull` and `Lock.push` copy are counted if the first
    host sends them.  Values that collectives exchange are not counted.

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
    return ranks.get_session().bytes_sent


def close() -> None:
    """End the workers and free all shared memory.

    It is also called at exit, and does nothing if no ranks are running.  After it, `fork` can be called again.  Then
    existing functions are sent to the new ranks when they are called, and existing Data objects are empty.

    Examples
    --------
    >>> import synkhronos as synk
    >>> synk.close()
    """
    ranks.close_session()
