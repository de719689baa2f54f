"""Checkpoints on the disk: whole or not there, whenever the process is killed; what happens when the disk is full."""

import errno
import json
import os

import numpy as np
import pytest

from synkhronos.training import Checkpoint, CheckpointError

ARRAYS = {"w": np.arange(1000.0), "n": np.array(3), "t": np.arange(6, dtype="float32").reshape(2, 3).T}


def test_what_is_saved_is_read(tmp_path):
    checkpoint = Checkpoint(tmp_path / "new" / "folder")
    path = checkpoint.save(12, ARRAYS, {"epoch": 1, "name": "x"})
    stored = checkpoint.load()
    assert stored.path == path and stored.meta == {"epoch": 1, "name": "x"}
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(stored.arrays[name], array)
        assert stored.arrays[name].dtype == array.dtype


def test_the_newest_few_are_kept(tmp_path):
    checkpoint = Checkpoint(tmp_path, keep=2)
    for seen in (5, 10, 2000000):
        checkpoint.save(seen, ARRAYS, {"seen": seen})
    assert [checkpoint.load(path).meta["seen"] for path in checkpoint.paths()] == [10, 2000000]
    checkpoint.save(2000000, ARRAYS, {"seen": "again"})
    assert checkpoint.load().meta["seen"] == "again"
    assert len(os.listdir(tmp_path)) == 2


def test_a_training_that_went_back_leaves_none_behind_it(tmp_path):
    checkpoint = Checkpoint(tmp_path, keep=3)
    for seen in (10, 20, 30):
        checkpoint.save(seen, ARRAYS, {"seen": seen})
    checkpoint.save(15, ARRAYS, {"seen": 15})  # on from 10
    assert [checkpoint.load(path).meta["seen"] for path in checkpoint.paths()] == [10, 15]


CALLS = ("mkdir", "open", "write", "fsync", "close", "rename", "unlink", "rmdir")


def killed(folder, at, seen):
    """Save in a process of its own that ends at a call of the system's, in its middle where it can; return the calls."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        with open(reading, "rb") as told:
            calls = len(told.read())
        return calls, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    tell, end = os.write, os._exit
    count = 0

    def fatal(name, real):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            tell(writing, b".")
            if count == at:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                end(9)
            return real(*args, **kwargs)

        return call

    try:
        for name in CALLS:
            setattr(os, name, fatal(name, getattr(os, name)))
        Checkpoint(folder, keep=1).save(seen, {"w": np.full(1000, 2.0)}, {"number": 2})
        end(0)
    finally:
        end(1)


@pytest.mark.parametrize("seen", [200, 100], ids=["another", "in the place of the same"])
def test_a_kill_at_any_call_leaves_the_last_one(tmp_path, seen):
    def run(folder, at):
        Checkpoint(folder, keep=1).save(100, {"w": np.full(1000, 1.0)}, {"number": 1})
        return killed(folder, at, seen)

    calls, status = run(tmp_path / "whole", -1)
    assert calls >= 12 and status == 0
    found = []
    for at in range(1, calls + 1):
        folder = tmp_path / str(at)
        assert run(folder, at)[1] == 9
        stored = Checkpoint(folder).load()
        assert stored.arrays["w"].tolist() == [float(stored.meta["number"])] * 1000
        found.append(stored.meta["number"])
        # The next one is written as if nothing had happened.
        Checkpoint(folder, keep=1).save(300, {"w": np.zeros(1)}, {"number": 3})
        assert Checkpoint(folder).load().meta["number"] == 3
        assert len(os.listdir(folder)) == 1
    assert found == sorted(found) and found[0] == 1 and found[-1] == 2


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(1, ARRAYS, {"number": 1})

    def full(file, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            checkpoint.save(2, ARRAYS, {"number": 2})
    assert checkpoint.load().meta["number"] == 1
    assert len(os.listdir(tmp_path)) == 1


def test_what_is_no_checkpoint_is_refused(tmp_path):
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match="expected a checkpoint, found none"):
        checkpoint.load()
    path = checkpoint.save(1, ARRAYS, {})
    (path / "meta.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"is damaged: .*take an older one"):
        checkpoint.load()
    (path / "meta.json").write_text(json.dumps({}))
    content = (path / "state.safetensors").read_bytes()
    for damaged in (content[:-8], b"", b"\xff" * 100, content[8:]):
        (path / "state.safetensors").write_bytes(damaged)
        with pytest.raises(CheckpointError, match="is damaged"):
            checkpoint.load()
    (path / "state.safetensors").unlink()
    with pytest.raises(CheckpointError, match="expected a checkpoint, with state.safetensors"):
        checkpoint.load()
    with pytest.raises(ValueError, match="keep: expected at least 1, got 0"):
        Checkpoint(tmp_path, keep=0)


def test_one_of_as_many_rows_is_no_later_one(tmp_path):
    checkpoint = Checkpoint(tmp_path)
    path = checkpoint.save(1000, {"w": np.ones(1)}, {})
    os.rename(path, f"{path}.old")  # as a kill leaves it, between two renames
    checkpoint.refuse_others(1000)
    with pytest.raises(CheckpointError, match="another training"):
        checkpoint.refuse_others(999)
