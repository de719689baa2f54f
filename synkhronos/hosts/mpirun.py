"""What ``mpirun`` and ``srun`` have to be told, and what is to be made of what they say.

`command`, `environment`
    How ``mpirun`` starts an agent on each host.
`agent_command`
    What starts one here, where they have started this script on each host.
`check_processes`
    Whether that was as it has to be.
`lost_hosts`
    Which host ``mpirun`` complains of.
`path`, `under_srun`
    For messages: where it is, and how ``srun`` starts scripts.
`tree`
    The processes to end with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from synkhronos.hosts.names import launched

#: By which an agent ends itself that got an error from MPI; nobody else sends it.
_OF_MPI = int(signal.SIGUSR2)


def agent_command(address: str) -> list[str]:
    """Return the command line of an agent."""
    package = str(Path(__file__).resolve().parents[2])
    # An agent that fails kills itself: the others wait for it, and mpirun may overlook an exit code.  What MPI raises
    # mostly follows from the loss of another host: the signal tells these from failures of its own (see `lost_hosts`).
    code = "import os, signal, sys; sys.excepthook = lambda kind, *error: (sys.__excepthook__(kind, *error), "
    code += f"signal.signal({_OF_MPI}, signal.SIG_DFL), signal.pthread_sigmask(signal.SIG_UNBLOCK, [{_OF_MPI}]), "
    code += f"os.kill(os.getpid(), {_OF_MPI} if kind.__module__ == 'mpi4py.MPI' else {int(signal.SIGKILL)})); "
    code += f"sys.path.insert(0, {package!r}); from synkhronos.hosts.agent import main; main({address!r})"
    return [sys.executable, "-c", code]


def command(names: Sequence[str], address: str) -> list[str]:
    """Return the command line that starts an agent on each host."""
    mpirun = path()
    each = ",".join(f"{name}:1" for name in names)
    if _is_mpich(mpirun):
        how = ["-hosts", each]
    else:
        _check_names(names)
        how = ["-H", each, "--bind-to", "none"]
    return [mpirun, *how, "-n", str(len(names)), *agent_command(address)]


def path() -> str:
    """Return the ``mpirun`` of this environment, or else the first on the path."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise RuntimeError(
            "several hosts need MPI, and there is no mpirun: pip install synkhronos[hosts], or load the cluster's "
            "own MPI and pip install mpi4py"
        )
    return found


def _is_mpich(mpirun: str) -> bool:
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    return "HYDRA" in said.upper()


def _check_names(names: Sequence[str]) -> None:
    """Refuse hosts that nobody knows: Open MPI is silent about them for half a minute."""
    unknown = [name for name in names if not _is_known(name) and not _is_known(_of_ssh(name))]
    if unknown:
        raise RuntimeError(
            f"the hosts {', '.join(names)} could not be reached: this machine knows no address of {', '.join(unknown)}"
        )


def _is_known(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def _of_ssh(name: str) -> str:
    """Return the name or address that a user's configuration of ssh has for a host."""
    with contextlib.suppress(OSError):
        said = subprocess.run(["ssh", "-G", name], capture_output=True, text=True, check=False).stdout
        if found := re.search(r"^hostname (\S+)$", said, re.MULTILINE):
            return found[1]
    return name


def environment(is_started: bool) -> dict[str, str]:
    """Return the environment of ``mpirun``; of this host's agent alone, where ``mpirun`` has started this script."""
    found = {"UCX_LOG_LEVEL": "error", **os.environ}  # Open MPI's UCX warns of what every agent's end leaves
    if is_started:
        return found
    # In a step of Slurm, what srun has told this process of MPI is for that step, of one task.
    found = {name: value for name, value in found.items() if not name.startswith("PMI") or name.startswith("PMIX_MCA_")}
    if nodes := found.get("SLURM_JOB_NODELIST"):
        # Open MPI takes hosts and places from these, which a step has of its own.
        found |= {"SLURM_NODELIST": nodes, "SLURM_TASKS_PER_NODE": f"1(x{found.get('SLURM_JOB_NUM_NODES', 1)})"}
        # mpirun has srun start a step.  It would wait without end for cores that the script's own step has; and where
        # srun connects MPI by PMIx unless it is told not to, MPICH gets two answers, and ends.
        found |= {"SLURM_OVERLAP": "1", "SLURM_MPI_TYPE": "none"}
    return found


def check_processes(hellos: Sequence[dict[str, Any]]) -> None:
    """Refuse processes that MPI doesn't connect, and several on one host; warn of one that is bound to a core."""
    _, count = launched() or (0, len(hellos))
    if len(hellos) != count:
        raise RuntimeError(
            f"{count} processes were started, and MPI connects {len(hellos)} of them: start one on each host, by the "
            f"mpirun of the MPI that mpi4py uses{under_srun()}; independent processes call fork(hosts=[])"
        )
    names = [hello["name"] for hello in hellos]
    for name in names:
        if names.count(name) > 1:
            raise RuntimeError(
                f"mpirun has started {names.count(name)} processes on {name}: start one on each host, which forks the "
                "ranks there (mpirun --map-by ppr:1:node, mpirun -ppn 1, srun --ntasks-per-node=1); independent "
                "processes call fork(hosts=[])"
            )
    for hello in hellos:
        if hello["cores"] == 1 < hello["machine"]:
            warnings.warn(
                f"the process on {hello['name']} may use 1 of {hello['machine']} cores: mpirun --bind-to none lets it "
                "use them all",
                stacklevel=6,
            )


def under_srun() -> str:
    """Say how ``srun`` starts scripts, where it has started this one."""
    if "SLURM_STEP_ID" not in os.environ:
        return ""
    return (
        "; srun --ntasks-per-node=1 --mpi=pmix python ... connects Open MPI (srun --mpi=list says what there is); with "
        "every MPI the script can be started once: SYNKHRONOS_HOSTS=all srun --nodes=1 --ntasks=1 python ..."
    )


def lost_hosts(said: str, known_as: Sequence[Sequence[str]]) -> list[int]:
    """Return which host is lost, by what ``mpirun`` has said; where it names none, those that may be.

    ``known_as`` has the names of each host.
    """
    said = " ".join(said.split())  # it breaks lines where it likes

    def named(pattern: str) -> list[int]:
        found = re.findall(pattern, said)
        return [i for i, names in enumerate(known_as) if any(name in found for name in names)]

    of_mpich, of_open_mpi = r"RUNNING AT (\S+) = EXIT CODE: ", r"on node (\S+) exited on signal "
    # A host whose agent got an error from MPI is still there.  So is one whose agent MPICH has crashed, as it does at
    # times where the other end goes in the middle of a message, and one that complains of a closed connection.
    follows = rf"(?:{int(signal.SIGSEGV)}|{_OF_MPI})\b"
    for pattern in (f"{of_mpich}(?!{follows})", r"Remote daemon: \S+ on node (\S+)", f"{of_open_mpi}(?!{follows})"):
        if lost := named(pattern):
            return lost[:1]
    complaining = named(r"\[([^\s:]+):\d+\] \*\*\* An error occurred in Socket closed")
    complaining = complaining or named(of_mpich + follows) or named(of_open_mpi + follows) or [0]
    return [i for i in range(len(known_as)) if i not in complaining]


def tree(pid: int) -> list[int]:
    """Return a process, its children, their children, and so on."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended
        children = []
    return [pid, *(each for child in children for each in tree(int(child)))]
