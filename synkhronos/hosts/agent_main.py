"""Start of an agent: its connection to MPI and to the master, and the preparation of its host."""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import re
import signal
import socket
import sys
import time
from importlib.util import find_spec
from typing import Any

from synkhronos.checks import list_versions
from synkhronos.gpus import get_n_gpu
from synkhronos.hosts.agent import WORKER_EXIT_SECONDS, Agent
from synkhronos.hosts.host_list import compute_ranks_by_host, describe_host
from synkhronos.hosts.messenger import MessageType, Messenger
from synkhronos.hosts.pipes import FRAME_NBYTES, PipeLayout
from synkhronos.ranks.child_process import ignore_job_signals
from synkhronos.ranks.control_memory import SPIN_SECONDS, ControlMemory
from synkhronos.ranks.segments import get_peer_ids
from synkhronos.ranks.thread_limit import count_available_cores
from synkhronos.ranks.worker_processes import WorkerProcesses

#: Prefixes of the environment variables by which launchers identify MPI processes.
_MPI_VARIABLE_PREFIXES = ("PMI", "OMPI_", "PRTE_", "MPI_LOCAL", "HYDI_", "HYDRA_")
#: Seconds after which an agent exits if MPI has not connected it to the others.
_MPI_CONNECT_SECONDS = 90


def main(address: str) -> None:
    """Run an agent until the ranks end.

    The master waits for the first host's agent on the abstract Unix socket ``address``.
    """
    ignore_job_signals()
    os.environ.pop("MPI4PY_RC_INITIALIZE", None)  # set where scripts must not initialize MPI
    import mpi4py

    mpi4py.rc.finalize = False
    mpi4py.rc.thread_level = "single"
    # By default MPICH's UCX splits a frame, and copies each part once more.
    os.environ.setdefault("UCX_RNDV_THRESH", str(FRAME_NBYTES // 4))
    # By default UCX creates shared memory for processes of the same host.  There are none, and the memory would stay
    # behind if this process were killed during its start.
    os.environ.setdefault("UCX_TLS", "^sm")
    signal.alarm(_MPI_CONNECT_SECONDS)  # MPI waits without limit until all are connected
    from mpi4py import MPI

    _unlink_shared_memory()
    world = MPI.COMM_WORLD
    host_infos = world.gather(_get_host_info())
    channel, file, config = None, None, None
    if world.rank == 0:
        channel, config, file = _connect(address, host_infos)
    config = world.bcast(config)
    if config is None:  # the master has cancelled the start
        MPI.Finalize()
        return
    frame_comm = world.Dup()
    signal.alarm(0)
    local_ranks = compute_ranks_by_host(config["rank_counts"])[world.rank]
    is_master_host, link_nbytes = file is not None, PipeLayout.compute_nbytes(len(local_ranks))
    if file is None:
        file = _create_control_memory(MPI, config, local_ranks, link_nbytes)
        _set_environment(config)
    spin_seconds = SPIN_SECONDS if len(local_ranks) < count_available_cores() else 0.0
    control = ControlMemory(config["size"], spin_seconds, file.fileno(), is_master_host, local_ranks, link_nbytes)
    workers = WorkerProcesses(config["master_rank"], control, None if is_master_host else file)
    if not is_master_host:
        workers.start(config["profile"])
        file.close()
    Agent(MPI, config, control, channel, workers, frame_comm).run()
    with contextlib.suppress(MPI.Exception):  # messages that were never received
        MPI.Finalize()


def _set_environment(config: dict[str, Any]) -> None:
    """Set the master's environment variables, ``sys.path`` and working directory for this process and its workers."""
    os.environ.update(config["environment"])
    # A worker may import mpi4py, as Theano does.  It must neither join MPI in this agent's place nor initialize MPI.
    os.environ["MPI4PY_RC_INITIALIZE"] = "0"
    for name in [name for name in os.environ if name.startswith(_MPI_VARIABLE_PREFIXES)]:
        del os.environ[name]
    sys.path[:] = config["path"]
    with contextlib.suppress(OSError):
        os.chdir(config["folder"])


def _create_control_memory(mpi: Any, config: dict[str, Any], local_ranks: range, link_nbytes: int) -> io.FileIO:
    """Create this host's control memory.  If that fails, report it, wait for END, and raise MemoryError."""
    try:
        return ControlMemory.create_file(config["size"], len(local_ranks), link_nbytes)
    except MemoryError as error:
        messenger = Messenger(mpi, mpi.COMM_WORLD)
        messenger.send(
            0,
            MessageType.PEER_FAILURE,
            f"{describe_host(config['host_names'][messenger.host], local_ranks)}: {error}",
            local_ranks.start,
        )
        deadline = time.monotonic() + WORKER_EXIT_SECONDS
        while time.monotonic() < deadline and all(
            message_type != MessageType.END for _, message_type, _ in messenger.receive()
        ):
            time.sleep(0.01)
        raise


def _unlink_shared_memory() -> None:
    """Unlink files in /dev/shm that MPI would leave behind if this process were killed.

    MPI uses them between processes of one host, which has only one agent.  Open MPI creates some under srun.
    """
    pattern = re.compile(r"/dev/shm/(mpich|sm_segment)\S*$")
    with open("/proc/self/maps") as maps:
        names = {match[0] for line in maps if (match := pattern.search(line))}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _get_host_info() -> dict[str, Any]:
    """Return this host's name, numbers of usable cores and of GPUs, and versions, for the master."""
    versions = list_versions(("synkhronos", "numpy", "pytensor", "Theano", "jax", "nccl4py", "cuda-core"))
    versions |= {"Python": platform.python_version()}
    if find_spec("pygpu") is not None:  # linked into environments without metadata
        versions["pygpu"] = "installed"
    return {
        "name": platform.node(),
        "n_cores": count_available_cores(),
        "n_gpus": get_n_gpu(),
        "versions": versions,
    }


def _connect(address: str, host_infos: Any) -> tuple[socket.socket, dict[str, Any] | None, Any]:
    """Send the hosts' infos to the master; return the channel, its configuration and the file of its control memory."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        channel.connect("\0" + address)
    except ConnectionRefusedError:
        name = platform.node()
        raise RuntimeError(f"the first host has to be the machine that calls fork(), and {name} is not") from None
    pid, user = get_peer_ids(channel)
    if user != os.getuid():
        raise RuntimeError("another user's process answers in the master's place")
    channel.send(json.dumps(host_infos).encode())
    content, fds, _, _ = socket.recv_fds(channel, 1 << 20, 1)
    if not content:
        return channel, None, None
    config = json.loads(content)
    config["master"] = pid
    return channel, config, open(fds[0], "r+b", buffering=0)
