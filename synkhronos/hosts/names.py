"""The hosts that a user names.

`Host`
    A host, and how many ranks it is to have.
`hosts_of`
    Reads ``fork(hosts=...)`` and the environment.
`ranks_of`, `host_of`
    Which ranks each host has, and which host has a rank.
`host_and_ranks`
    How errors name a host.
`MOST`
    More ranks than this on one host is taken for a mistake.
`launched`
    Which of several processes this is that ``mpirun`` or ``srun`` has started, and of how many.
`is_this_machine`
    Whether a name is this machine's.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Host(NamedTuple):
    """A host, by the name under which the others reach it, and how many ranks it is to have: None for a default."""

    name: str
    n_ranks: int | None


MOST = 1024
#: Where launchers say which of how many processes this is: MPICH's, Open MPI's, Slurm's.
_LAUNCHED = [
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
]


def launched() -> tuple[int, int] | None:
    """Return the number of this process among several that ``mpirun`` or ``srun`` has started, and how many they are.

    None if it is alone.
    """
    for rank, size in _LAUNCHED:
        if os.environ.get(rank, "").isdecimal() and os.environ.get(size, "").isdecimal() and int(os.environ[size]) > 1:
            return int(os.environ[rank]), int(os.environ[size])
    return None


def is_this_machine(name: str) -> bool:
    """Whether this machine has an address that a name stands for."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as one:
                one.bind(address)
                return True
    return name == socket.gethostname()


def hosts_of(hosts: str | Sequence[str] | None) -> list[Host]:
    """Return the hosts that ``fork(hosts=...)`` or ``SYNKHRONOS_HOSTS`` names; none for this machine alone.

    Each is a name, perhaps with a number of ranks: ``"a:3"``.  ``"all"`` are those of a Slurm, PBS or LSF allocation.

    Raises
    ------
    TypeError, ValueError
        For something else, a host named twice, or ``"all"`` outside of an allocation.
    """
    called = "hosts"
    if hosts is None:
        called, text = "SYNKHRONOS_HOSTS", os.environ.get("SYNKHRONOS_HOSTS", "").strip()
        if not text:
            return []
        hosts = text if text == "all" else text.split(",")
    if hosts == "all":
        hosts = _of_allocation(called)
    if isinstance(hosts, str) or not isinstance(hosts, Sequence):
        raise TypeError(f'{called}: expected a list of names, or "all", got {hosts!r}')
    found = [_host(each, called) for each in hosts]
    names = [host.name for host in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{called}: {name} is named twice; write {name}:2 for two ranks on it")
    return found


def _host(text: object, called: str) -> Host:
    if not isinstance(text, str):
        raise TypeError(f"{called}: expected names, got {text!r}")
    name, colon, count = text.strip().partition(":")
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name.startswith("-"):
        raise ValueError(f"{called}: expected the name of a host, got {text!r}")
    if colon and not (count.isdecimal() and 0 < int(count) <= MOST):
        raise ValueError(f"{called}: expected a number of ranks from 1 to {MOST} behind the colon, got {text!r}")
    return Host(name, int(count) if colon else None)


def ranks_of(counts: Sequence[int]) -> list[range]:
    """Return the ranks of each host, which are numbered host by host.

    Examples
    --------
    >>> ranks_of([3, 1])
    [range(0, 3), range(3, 4)]
    """
    return [range(stop - count, stop) for stop, count in zip(accumulate(counts), counts, strict=True)]


def host_of(ranks: Sequence[range], rank: int) -> int:
    """Return the number of the host that has a rank."""
    return next(host for host, of_host in enumerate(ranks) if rank in of_host)


def host_and_ranks(name: str, of_host: range) -> str:
    """Return how an error names a host: with its ranks."""
    ranks = f"rank {of_host.start}" if len(of_host) == 1 else f"ranks {of_host.start} to {of_host.stop - 1}"
    return f"host {name} ({ranks})"


def _of_allocation(called: str) -> list[str]:
    """Return the hosts that a batch system has given to this job, in its order."""
    if nodes := os.environ.get("SLURM_JOB_NODELIST"):
        found = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
        names = found.stdout.split()
    elif path := os.environ.get("PBS_NODEFILE"):
        with open(path) as file:
            names = file.read().split()
    elif listed := os.environ.get("LSB_MCPU_HOSTS"):  # "a 16 b 16"; LSB_HOSTS, "a a b b", large jobs don't have
        names = listed.split()[::2]
    else:
        raise ValueError(
            f'{called}: "all" are the hosts of an allocation of Slurm, PBS or LSF, and this process is in none: '
            "name the hosts"
        )
    return list(dict.fromkeys(names))
