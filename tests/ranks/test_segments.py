"""Shared memory segments: their mapping on all ranks, release and limits."""

import gc
import os
import warnings
from dataclasses import dataclass

import pytest
from rank_commands import CountOpenFiles, GatherMessages
from system import run_code

from synkhronos import ranks
from synkhronos.ranks import Command, segments


@dataclass(frozen=True)
class Fill(Command):
    """Command that writes one item per rank into an array in shared memory, and returns all items."""

    location: ranks.ArrayLocation

    def run(self, rank):
        view = self.location.view(rank.segments)
        view[rank.number] = rank.number + 1
        rank.barrier()
        return view.tolist()


def test_segment_is_mapped_on_all_ranks(session):
    segment = session.memory.create_segment(8 * session.size)
    location = ranks.ArrayLocation(segment.key, "i8", (session.size,))
    assert session.run(Fill(location)) == list(range(1, session.size + 1))


MIB = 1 << 20


@pytest.mark.parametrize(
    ("groups", "files", "free"),
    [
        ("0::/\n", {}, 5000),
        ("0::/job/step\n", {"job/step/memory": ("max", 900, 100), "job/memory": (1000, 900, 100)}, 200),
        ("0::/of/the/host\n", {"memory": (1000, 700, 0)}, 300),  # in a container, whose group is the root
        ("0::/job\n", {"job/memory": (1000, 1200, 100)}, 0),
        ("4:cpu:/\n3:memory:/job\n0::/\n", {"memory/job/memory": (800, 500, 50)}, 350),
        ("3:memory:/job\n", {"memory/job/memory": (1 << 43, 500, 50)}, 5000),
    ],
)
def test_free_memory_reads_machine_and_cgroups(tmp_path, groups, files, free):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 4096000 kB\nSwapFree: 1024000 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text(groups)
    names = (".limit_in_bytes", ".usage_in_bytes") if "memory:" in groups else (".max", ".current")
    for path, (limit, used, cache) in files.items():
        group_folder = tmp_path / "sys" / "fs" / "cgroup" / path
        group_folder.parent.mkdir(parents=True, exist_ok=True)
        for name, value in zip(names, (limit, used), strict=True):
            group_folder.with_suffix(name).write_text(f"{value if value == 'max' else value * MIB}\n")
        group_folder.with_suffix(".stat").write_text(f"anon 1\nactive_file {cache * MIB}\ninactive_file 0\n")
    assert segments.get_free_memory(str(tmp_path)) == free * MIB


def test_segments_leave_memory_to_other_programs(monkeypatch):
    monkeypatch.setattr(segments, "get_free_memory", lambda: 128 * MIB)
    opened = []
    monkeypatch.setattr(os, "memfd_create", opened.append)
    message = "^not enough memory for 134,217,728 bytes of shared memory, 125,829,120 bytes are free: "
    with pytest.raises(MemoryError, match=message):
        segments.create_unlinked_file(128 * MIB)
    assert not opened
    segments.check_free_memory(120 * MIB)


def test_segments_are_released_on_all_ranks(session):
    before = session.run(CountOpenFiles())
    for _ in range(300):
        session.memory.release("segment", session.memory.create_segment(100).key)
    session.send_releases()
    assert session.run(CountOpenFiles()) == before


@pytest.mark.parametrize("size", [1, 2])
def test_segments_leave_no_open_files(size):
    """Python would warn of an open file at close, or with one rank immediately."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        session = ranks.start_session(size, 0, False)
        for _ in range(3):
            session.memory.create_segment(100)
        session.close(kill=True)
        del session
        gc.collect()
    assert [str(warning.message) for warning in caught if "FileIO" in str(warning.message)] == []


def test_segment_without_memory_raises_memory_error(session_of_two):
    with pytest.raises(MemoryError, match="not enough memory"):
        session_of_two.memory.create_segment(1 << 50)
    assert session_of_two.run(GatherMessages((3,))) == 2


@pytest.mark.new_ranks
def test_files_in_flight_are_limited():
    """A user's processes can send only `ulimit -n` files that are not received yet, except for privileged ones."""
    code = """
        import array, ctypes, resource, socket, threading
        import synkhronos as synk
        synk.fork(4, use_gpu=False)
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
        header, no_capabilities = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert not ctypes.CDLL(None).capset(header, no_capabilities)
        many = [synk.data([1.0]) for _ in range(60)]
        many[0].free_memory()  # sends the others
        # Another program has sent as many files, and receives them later.
        sender, receiver = socket.socketpair()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [sender.fileno()] * 129))]
        sender.sendmsg([b"files"], rights)
        threading.Timer(0.1, receiver.close).start()
        synk.data([1.0]).free_memory()
        print("sent")
    """
    assert run_code(code, timeout=60) == "sent\n"
