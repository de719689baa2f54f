"""Shared memory is accessible only to this user, without a name or a network address."""

import ast
import contextlib
import gc
import os
import pathlib
import re
import stat
import subprocess
import sys

import numpy as np
import pytest
from library import tensor
from system import run_code

import synkhronos as synk
from synkhronos import ranks

pytestmark = pytest.mark.starts_programs

PACKAGE = pathlib.Path(synk.__file__).parent


def call_functions_and_collectives():
    """Use segments, small and large commands, and results of all sizes."""
    x = tensor.dmatrix("x")
    f = synk.function([x], [(x.sum(), "sum"), (x * 2, "gather")])
    d = synk.data(np.ones((3000, 60)))
    f(d)
    f(d, batch=[1, 5, 3])
    return d


def list_sockets(pid):
    """Return the inodes of a process's sockets."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{fd}"))
            if match:
                inodes.add(int(match[1]))
    return inodes


def list_shared_mappings(pid):
    """Return the writable shared mappings of a process."""
    with open(f"/proc/{pid}/maps") as maps:
        fields = [line.split(maxsplit=5) for line in maps]
    return [line[5].strip() for line in fields if len(line) == 6 and line[1].startswith("rw") and line[1].endswith("s")]


@pytest.fixture
def no_umask():
    """Set the umask to 0, so that it hides no permission."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_segments_are_readable_only_by_this_user(fork, no_umask):
    fork(3)
    d = call_functions_and_collectives()
    d.set_value(np.ones((5000, 60)))  # new memory, which the workers have not received
    files = [file for _, file, _ in ranks.get_session().memory._unsent_segments]
    assert files
    for file in files:
        status = os.fstat(file.fileno())
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_uid == os.geteuid()
        assert status.st_nlink == 0


def test_sockets_are_pairs_without_an_address(fork):
    before = list_sockets(os.getpid())
    fork(3)
    call_functions_and_collectives()
    sockets = list_sockets(os.getpid()) - before
    assert len(sockets) == 2
    for pid in ranks.get_session().worker_pids.values():
        worker_sockets = list_sockets(pid)
        assert len(worker_sockets) == 1
        assert not worker_sockets & before
        sockets |= worker_sockets
    networks = pathlib.Path("/proc/net")
    for protocol in ("tcp", "tcp6", "udp", "udp6", "udplite", "udplite6", "raw", "raw6", "icmp", "packet", "netlink"):
        with contextlib.suppress(FileNotFoundError):
            column = -1 if protocol in ("packet", "netlink") else 9
            lines = (networks / protocol).read_text().splitlines()[1:]
            assert not {int(line.split()[column]) for line in lines} & sockets
    lines = [line.split() for line in (networks / "unix").read_text().splitlines()[1:]]
    socket_lines = [line for line in lines if int(line[6]) in sockets]
    assert len(socket_lines) == len(sockets)
    assert all(len(line) == 7 for line in socket_lines)  # an eighth field would be the path
    assert all(int(line[3], 16) & 0x10000 == 0 for line in socket_lines)  # no socket listens


def test_shared_mappings_are_anonymous_or_unlinked(fork):
    gc.collect()  # otherwise garbage of earlier tests could be freed in between
    before = list_shared_mappings(os.getpid())
    fork(3)
    keep = call_functions_and_collectives()
    assert len(list_shared_mappings(os.getpid())) > len(before)
    for pid in (os.getpid(), *ranks.get_session().worker_pids.values()):
        assert all(name.endswith("(deleted)") for name in list_shared_mappings(pid) if name not in before)
    assert keep.size


def test_subprocesses_inherit_nothing(fork):
    fork(3)
    d = call_functions_and_collectives()
    d.set_value(np.ones((7000, 60)))
    listing = "import os\nfor fd in os.listdir('/proc/self/fd'):\n  try: print(os.readlink('/proc/self/fd/' + fd))\n"
    listing += "  except OSError: pass"
    printed = subprocess.run(
        [sys.executable, "-c", listing], close_fds=False, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    sockets = {f"socket:[{inode}]" for inode in list_sockets(os.getpid())}
    assert sockets and len(printed.splitlines()) >= 3  # the standard streams
    assert not sockets & set(printed.split())
    assert "synkhronos" not in printed


def test_unpickling_happens_only_in_known_places():
    """A new call of pickle needs a review, and a line in docs/security.rst."""
    places = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        pickles = re.search(r"^\s*import (cloud)?pickle", text, re.MULTILINE) is not None
        for node in ast.walk(ast.parse(text)):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            owner = node.value.id if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else ""
            if owner in ("json", "tomllib"):  # these return numbers, strings, lists and dictionaries
                continue
            if name in ("eval", "exec") and isinstance(node, ast.Attribute) and owner != "builtins":
                continue  # a method of this name, such as a variable's
            if isinstance(node, ast.ImportFrom) and node.module in (
                "pickle",
                "marshal",
                "shelve",
                "dill",
                "cloudpickle",
            ):
                places.add((str(path.relative_to(PACKAGE)), "import"))
            if name in ("loads", "Unpickler", "eval", "exec") or (name == "load" and pickles):
                places.add((str(path.relative_to(PACKAGE)), name))
    assert places == {
        ("extensions/chains.py", "loads"),  # an error that the same line pickles
        ("functions/function.py", "loads"),  # a generator that the same line pickles: a deep copy
        ("replication/replicator.py", "Unpickler"),  # graphs, from a segment that the master filled
        ("replication/replicator.py", "load"),
        ("hosts/agent.py", "loads"),  # the master's plan, from the mailbox
        ("hosts/messenger.py", "loads"),  # messages between agents, over MPI
        ("loading/loader_process.py", "loads"),  # a loader's arguments, from memory that its owner filled
        ("ranks/rank.py", "loads"),  # objects of ranks, from the slots
        ("ranks/command_runner.py", "loads"),  # a worker's report of a failure, from its slot
        ("hosts/program_agent.py", "loads"),  # requests of a rank to its agent, from a channel
        ("ranks/program_peers.py", "loads"),  # messages between ranks, from the slots
        ("ranks/worker_main.py", "loads"),  # commands, from the mailbox
        ("ranks/command.py", "loads"),  # long commands, from a segment that the master filled
        ("programs/run.py", "Unpickler"),  # a program, from its command
        ("programs/run.py", "load"),
        ("collectives/commands.py", "loads"),  # results of programs and records of ranks, through NumPy's communicator
        ("programs/rank_context.py", "loads"),  # objects of ranks, from the slots
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user to be")
def test_other_users_can_reach_nothing(two_ranks_per_test):
    d = call_functions_and_collectives()
    d.set_value(np.ones((9000, 60)))
    worker = ranks.get_session().worker_pids[1]
    file = ranks.get_session().memory._unsent_segments[0][1].fileno()
    attempts = f"""
import os
def attempt(name, action):
    try:
        action()
    except PermissionError:
        pass
    else:
        print(name)
attempt("memory", lambda: open("/proc/{worker}/mem", "rb"))
attempt("maps", lambda: os.listdir("/proc/{worker}/map_files"))
attempt("segment", lambda: open("/proc/{os.getpid()}/fd/{file}", "rb"))
attempt("descriptors", lambda: os.listdir("/proc/{worker}/fd"))
attempt("signal", lambda: os.kill({worker}, 0))
print("tried")
"""
    # A kernel with Yama may refuse "memory" even to the same user.
    assert run_code(attempts).split()[-5:] == ["maps", "segment", "descriptors", "signal", "tried"]
    to_other_user = "import os; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    assert run_code(to_other_user + attempts).split() == ["tried"]
