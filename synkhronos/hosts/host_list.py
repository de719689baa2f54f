"""The list of hosts of a session: its sources, its syntax, and the ranks on each host."""

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
    """A host: the name by which other hosts reach it, and the number of its ranks, None if it is not given."""

    name: str
    n_ranks: int | None


#: Maximal number of ranks on a host; a larger number is refused as a mistake.
MAX_RANKS_PER_HOST = 1024
#: Environment variables with the number of processes that MPICH, Open MPI or Slurm has started.
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def check_single_process() -> None:
    """Raise ValueError if ``mpirun`` or ``srun`` has started several processes of this program."""
    for variable in _SIZE_VARIABLES:
        size = os.environ.get(variable, "")
        if size.isdecimal() and int(size) > 1:
            raise ValueError(
                f"hosts: {size} processes of this program were started, and one starts the ranks of all hosts: start "
                'it once, with hosts=[...] or "all" (srun --nodes=1 --ntasks=1, or without srun or mpirun); '
                "independent processes call fork(hosts=[])"
            )


def is_this_machine(name: str) -> bool:
    """Whether a host name resolves to an address of this machine."""
    with contextlib.suppress(OSError):
        for family, socket_type, _, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, socket_type) as test_socket:
                test_socket.bind(address)
                return True
    return name == socket.gethostname()


def parse_hosts(hosts: str | Sequence[str] | None) -> list[Host]:
    """Return the list of hosts for ``fork(hosts=...)``, which is empty for this machine alone.

    ``hosts`` are names, optionally with a number of ranks: ``"a:3"``; or "all", the hosts of a Slurm, PBS or LSF
    allocation; or None, for the environment variable ``SYNKHRONOS_HOSTS``.  Raise TypeError or ValueError for other
    values, a host named twice, or "all" outside of an allocation.
    """
    argument_name = "hosts"
    if hosts is None:
        argument_name, text = "SYNKHRONOS_HOSTS", os.environ.get("SYNKHRONOS_HOSTS", "").strip()
        if not text:
            return []
        hosts = text if text == "all" else text.split(",")
    if hosts == "all":
        hosts = _read_allocation(argument_name)
    if isinstance(hosts, str) or not isinstance(hosts, Sequence):
        raise TypeError(f'{argument_name}: expected a list of names, or "all", got {hosts!r}')
    parsed = [_parse_host(host, argument_name) for host in hosts]
    names = [host.name for host in parsed]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{argument_name}: {name} is named twice; write {name}:2 for two ranks on it")
    return parsed


def _parse_host(text: object, argument_name: str) -> Host:
    """Return the host that a text such as "name" or "name:4" describes.  Raise ValueError for another text."""
    if not isinstance(text, str):
        raise TypeError(f"{argument_name}: expected names, got {text!r}")
    name, colon, count = text.strip().partition(":")
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name.startswith("-"):
        raise ValueError(f"{argument_name}: expected the name of a host, got {text!r}")
    if colon and not (count.isdecimal() and 0 < int(count) <= MAX_RANKS_PER_HOST):
        raise ValueError(
            f"{argument_name}: expected a number of ranks from 1 to {MAX_RANKS_PER_HOST} after the colon, got {text!r}"
        )
    return Host(name, int(count) if colon else None)


def compute_ranks_by_host(rank_counts: Sequence[int]) -> list[range]:
    """Return each host's range of ranks, from its number of ranks.

    Examples
    --------
    >>> compute_ranks_by_host([3, 1])
    [range(0, 3), range(3, 4)]
    """
    return [range(stop - count, stop) for stop, count in zip(accumulate(rank_counts), rank_counts, strict=True)]


def find_host(ranks_by_host: Sequence[range], rank: int) -> int:
    """Return the number of a rank's host."""
    return next(host for host, host_ranks in enumerate(ranks_by_host) if rank in host_ranks)


def describe_host(name: str, host_ranks: range) -> str:
    """Return the name of a host with its ranks, for messages."""
    ranks = f"rank {host_ranks.start}" if len(host_ranks) == 1 else f"ranks {host_ranks.start} to {host_ranks.stop - 1}"
    return f"host {name} ({ranks})"


def _read_allocation(argument_name: str) -> list[str]:
    """Return the host names of this job's allocation, in the batch system's order."""
    if nodes := os.environ.get("SLURM_JOB_NODELIST"):
        output = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
        names = output.stdout.split()
    elif path := os.environ.get("PBS_NODEFILE"):
        with open(path) as file:
            names = file.read().split()
    elif host_counts := os.environ.get("LSB_MCPU_HOSTS"):  # "a 16 b 16"; large jobs have no LSB_HOSTS ("a a b b")
        names = host_counts.split()[::2]
    else:
        raise ValueError(
            f'{argument_name}: "all" stands for the hosts of an allocation of Slurm, PBS or LSF, and this process is '
            "in none: list the hosts"
        )
    return list(dict.fromkeys(names))
