"""The command line and the environment of ``mpirun``, and the interpretation of its messages."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Signal by which an agent kills itself after an error of MPI; no other process sends it.
_MPI_ERROR_SIGNAL = int(signal.SIGUSR2)
#: Main program of an agent.  An agent that fails kills itself: mpirun may ignore an exit code, and the other agents
#: would wait.  The hook is not part of a module, since it also handles the failure to import this package.  Most errors
#: of MPI are caused by the failure of another host, so they have their own signal (see `find_lost_hosts`).  The package
#: is not run, only the modules of it that an agent uses: its ``__init__`` imports three times as many.
_AGENT_PROGRAM = """
import importlib.util, os, signal, sys

def kill_agent(error_class, error, traceback):
    sys.__excepthook__(error_class, error, traceback)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
    os.kill(os.getpid(), signal.SIGUSR2 if error_class.__module__ == "mpi4py.MPI" else signal.SIGKILL)

sys.excepthook = kill_agent
_, package_folder, address = sys.argv
sys.path.insert(0, package_folder)
sys.modules["synkhronos"] = importlib.util.module_from_spec(importlib.util.find_spec("synkhronos"))
from synkhronos.hosts.agent_main import main
main(address)
"""


def make_agent_argv(address: str) -> list[str]:
    """Return the command line of an agent."""
    return [sys.executable, "-c", _AGENT_PROGRAM, str(Path(__file__).resolve().parents[2]), address]


def make_mpirun_argv(names: Sequence[str], address: str) -> list[str]:
    """Return the command line that starts an agent on each host."""
    mpirun = find_mpirun()
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    options = ["-hosts"] if "HYDRA" in version.upper() else ["--bind-to", "none", "-H"]  # MPICH, or Open MPI
    host_list = ",".join(f"{name}:1" for name in names)
    return [mpirun, *options, host_list, "-n", str(len(names)), *make_agent_argv(address)]


def find_mpirun() -> str:
    """Return the path of this Python environment's ``mpirun``, or of the first one on the search path."""
    sibling = Path(sys.executable).with_name("mpirun")
    path = str(sibling) if sibling.exists() else shutil.which("mpirun")
    if path is None:
        raise RuntimeError(
            "several hosts need MPI, and there is no mpirun: pip install synkhronos[hosts], or load the cluster's "
            "own MPI and pip install mpi4py"
        )
    return path


def make_mpirun_environment() -> dict[str, str]:
    """Return the environment of ``mpirun``."""
    environment = {"UCX_LOG_LEVEL": "error"}  # Open MPI's UCX warns at every agent's exit
    # In a Slurm step, this process's MPI variables describe the step, which has one task.
    environment |= {
        name: value for name, value in os.environ.items() if not name.startswith("PMI") or name.startswith("PMIX_MCA_")
    }
    if nodes := environment.get("SLURM_JOB_NODELIST"):
        # Open MPI reads hosts and slots from two variables, which a step redefines.
        environment |= {
            "SLURM_NODELIST": nodes,
            "SLURM_TASKS_PER_NODE": f"1(x{environment.get('SLURM_JOB_NUM_NODES', 1)})",
        }
        # mpirun starts a Slurm step by srun.  Without the first variable, that step waits for the cores of the script's
        # own step.  Without the second one, MPICH aborts where srun provides PMIx by default.
        environment |= {"SLURM_OVERLAP": "1", "SLURM_MPI_TYPE": "none"}
    return environment


def find_lost_hosts(output: str, aliases: Sequence[Sequence[str]]) -> list[int]:
    """Return the indexes of the hosts that may be lost: a single index if the output of ``mpirun`` names the lost host.

    ``aliases`` has the names of each host.
    """
    output = " ".join(output.split())  # line breaks may be anywhere

    def find_hosts(pattern: str) -> list[int]:
        named = re.findall(pattern, output)
        return [i for i, names in enumerate(aliases) if any(name in named for name in names)]

    mpich_pattern, open_mpi_pattern = r"RUNNING AT (\S+) = EXIT CODE: ", r"on node (\S+) exited on signal "
    # A host is alive if its agent raised an error of MPI, or reports a closed connection.  A host is also alive if its
    # agent crashed in MPICH, as an agent does when a peer is lost in the middle of a message.
    follow_up = rf"(?:{int(signal.SIGSEGV)}|{_MPI_ERROR_SIGNAL})\b"
    for pattern in (
        f"{mpich_pattern}(?!{follow_up})",
        r"Remote daemon: \S+ on node (\S+)",
        f"{open_mpi_pattern}(?!{follow_up})",
    ):
        if lost := find_hosts(pattern):
            return lost[:1]
    survivors = find_hosts(r"\[([^\s:]+):\d+\] \*\*\* An error occurred in Socket closed")
    survivors = survivors or find_hosts(mpich_pattern + follow_up) or find_hosts(open_mpi_pattern + follow_up) or [0]
    return [i for i in range(len(aliases)) if i not in survivors]


def list_descendants(pid: int) -> dict[int, str]:
    """Return the start times of all descendants of a process, by process ID."""
    descendants: dict[int, str] = {}
    with contextlib.suppress(OSError):  # it has exited
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            descendants |= list_descendants(child)
            with contextlib.suppress(OSError):
                descendants[child] = _read_start_time(child)
    return descendants


def kill_processes(start_times: Mapping[int, str]) -> None:
    """Kill the processes with these IDs, unless they have exited and other processes have their IDs."""
    for pid, start_time in start_times.items():
        with contextlib.suppress(OSError):
            if _read_start_time(pid) == start_time:
                os.kill(pid, signal.SIGKILL)


def _read_start_time(pid: int) -> str:
    """Return a process's start time in clock ticks since the machine's start.  Raise OSError if it does not exist."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
