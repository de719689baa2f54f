"""Start of an agent: its connection to MPI and to the master, and the preparation of its host."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import platform
import re
import signal
import socket
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from synkhronos.checks import list_versions
from synkhronos.gpus import get_n_gpu
from synkhronos.hosts.agent import WORKER_EXIT_SECONDS, Agent
from synkhronos.hosts.host_list import compute_ranks_by_host, describe_host
from synkhronos.hosts.messenger import MessageType, Messenger
from synkhronos.ranks.child_process import ignore_job_signals
from synkhronos.ranks.control_memory import SPIN_SECONDS, ControlMemory
from synkhronos.ranks.fork_server import ForkServer
from synkhronos.ranks.pipes import FRAME_NBYTES, LinkMemory
from synkhronos.ranks.segments import get_peer_ids
from synkhronos.ranks.thread_limit import count_available_cores
from synkhronos.ranks.worker_processes import WorkerProcesses

#: Prefixes of the environment variables by which launchers identify MPI processes.
_MPI_VARIABLE_PREFIXES = ("PMI", "OMPI_", "PRTE_", "MPI_LOCAL", "HYDI_", "HYDRA_")
#: Seconds after which an agent exits if MPI has not connected it to the others, or the master starts no ranks.
_START_SECONDS = 90
#: Seconds between two checks whether the master starts ranks.
_START_POLL_SECONDS = 2e-3
#: Tag of a message with the configuration of a session.
_CONFIG_TAG = 2


def main(address: str) -> None:
    """Serve one session after another, until the master closes the connection.

    The master waits for the first host's agent on the abstract Unix socket ``address``.
    """
    ignore_job_signals()
    os.environ.pop("MPI4PY_RC_INITIALIZE", None)  # set for scripts that must not initialize MPI
    import mpi4py

    mpi4py.rc.finalize = False
    mpi4py.rc.thread_level = "single"
    # By default MPICH's UCX splits a frame, and copies each part once more.
    os.environ.setdefault("UCX_RNDV_THRESH", str(FRAME_NBYTES // 4))
    # By default UCX creates shared memory for processes of the same host.  There are none, and the memory would stay
    # behind if this process were killed during its start.
    os.environ.setdefault("UCX_TLS", "^sm")
    signal.alarm(_START_SECONDS)  # MPI would wait for other hosts without limit
    from mpi4py import MPI

    _unlink_shared_memory()
    world = MPI.COMM_WORLD
    frame_comm, channel = world.Dup(), _connect(address) if world.rank == 0 else None
    fork_server: ForkServer | None = None
    settings: list[Any] = []
    while True:
        config, fds = _request_config(world, channel)
        if config is None:
            break
        if channel is None:
            _set_environment(config)
            # The server's forks inherit the settings.  Libraries read their numbers of threads at their import.
            n_local_ranks, old_settings = config["rank_counts"][world.rank], settings
            settings = [n_local_ranks, *(config[name] for name in ("environment", "path", "folder"))]
            if fork_server is not None and (fork_server.has_exited or settings != old_settings):
                fork_server.close()
                fork_server = None
            if fork_server is None and config["modules"]:
                fork_server = ForkServer(n_local_ranks)
        _run_session(MPI, config, channel, fds, fork_server, frame_comm)
        gc.collect()  # frees the memory of the session
    signal.alarm(_START_SECONDS)  # MPI would wait for a lost host without limit
    with contextlib.suppress(MPI.Exception):  # messages that were never received
        MPI.Finalize()


def _request_config(world: Any, channel: socket.socket | None) -> tuple[dict[str, Any] | None, list[int]]:
    """Send the hosts' infos to the master.  Return its answer, the configuration of a session, and file descriptors.

    The file descriptors are the control memory and the channel over which segments arrive, on the master's host only.
    The configuration is None if the master has closed the connection.
    """
    signal.alarm(_START_SECONDS)
    host_infos = world.gather(_get_host_info())
    if channel is None:
        while not world.iprobe(0, _CONFIG_TAG):
            time.sleep(_START_POLL_SECONDS)
        config = world.recv(None, 0, _CONFIG_TAG)
        signal.alarm(0)
        return config, []
    signal.alarm(0)
    fds: list[int] = []
    content = b""
    with contextlib.suppress(ConnectionError):  # the master has closed it
        channel.send(json.dumps(host_infos).encode())
        content, fds, _, _ = socket.recv_fds(channel, 1 << 20, 2)
    config = json.loads(content) if content else None
    if config is not None:
        config["master"], _ = get_peer_ids(channel)
    for host in range(1, world.size):
        world.send(config, host, _CONFIG_TAG)
    return config, fds


def _run_session(
    mpi: Any,
    config: dict[str, Any],
    channel: socket.socket | None,
    fds: Sequence[int],
    fork_server: ForkServer | None,
    frame_comm: Any,
) -> None:
    """Start this host's workers, except on the master's host, and run the agent of a session until its end."""
    local_ranks = compute_ranks_by_host(config["rank_counts"])[mpi.COMM_WORLD.rank]
    link_nbytes = LinkMemory.compute_nbytes(len(local_ranks))
    is_master_host, segment_channel = channel is not None, None
    if is_master_host:
        file, segment_channel = open(fds[0], "r+b", buffering=0), socket.socket(fileno=fds[1])
    else:
        file = _create_control_memory(mpi, config, local_ranks, link_nbytes)
    spin_seconds = SPIN_SECONDS if len(local_ranks) < count_available_cores() else 0.0
    control = ControlMemory(config["size"], spin_seconds, file.fileno(), is_master_host, local_ranks, link_nbytes)
    workers = WorkerProcesses(config["master_rank"], control, None if is_master_host else file, fork_server)
    agent = Agent(mpi, config, control, channel, segment_channel, workers, frame_comm)
    if not is_master_host:
        if fork_server is not None:  # imports from a cold network file system take longer than the hosts' timeout
            fork_server.import_modules(config["modules"], agent.keep_alive)
        workers.start(config["profile"])
    file.close()
    agent.run()
    workers.close_channels()
    if segment_channel is not None:
        segment_channel.close()
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:  # orphaned children of workers are now this process's children
            pass


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
    if find_spec("pygpu") is not None:  # environments link it without its metadata
        versions["pygpu"] = "installed"
    return {
        "name": platform.node(),
        "n_cores": count_available_cores(),
        "n_gpus": get_n_gpu(),
        "versions": versions,
    }


def _connect(address: str) -> socket.socket:
    """Return the channel to the master."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        channel.connect("\0" + address)
    except ConnectionRefusedError:
        name = platform.node()
        raise RuntimeError(f"the first host has to be the machine that calls fork(), and {name} is not") from None
    _, user = get_peer_ids(channel)
    if user != os.getuid():
        raise RuntimeError("another user's process answers in the master's place")
    return channel
