"""Checkpoints on disk are complete or absent after kills, damage, a full disk, or two simultaneous writers."""

import contextlib
import copy
import errno
import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal

import numpy as np
import pytest
from system import wait_until

from synkhronos.training import CheckpointError, CheckpointFolder
from synkhronos.training.checkpoints.checkpoint_folder import read_meta

FILES = ["state.safetensors", "meta.json", "SHA256SUMS"]
ARRAYS = {"w": np.arange(1000.0), "n": np.array(3), "t": np.arange(6, dtype="float32").reshape(2, 3).T}


def list_entries(folder):
    return sorted(name for name in os.listdir(folder) if name != ".lock")


def load_seen(checkpoints):
    return [checkpoints.load(path).meta["seen"] for path in checkpoints.list_paths()]


def test_checkpoint_load_returns_the_saved_arrays(tmp_path):
    checkpoints = CheckpointFolder(tmp_path / "new" / "folder")
    path = checkpoints.save(12, ARRAYS, {"epoch": 1, "name": "x"})
    stored = checkpoints.load()
    assert stored.path == path and stored.meta == {"epoch": 1, "name": "x"}
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(stored.arrays[name], array)
        assert stored.arrays[name].dtype == array.dtype


def test_checkpoint_keep_retains_the_newest(tmp_path):
    checkpoints = CheckpointFolder(tmp_path, keep=2)
    for seen in (5, 10, 2000000):
        checkpoints.save(seen, ARRAYS, {"seen": seen})
    assert load_seen(checkpoints) == [10, 2000000]
    checkpoints.save(2000000, ARRAYS, {"seen": "again"})
    assert checkpoints.load().meta["seen"] == "again"
    assert len(list_entries(tmp_path)) == 2


def test_checkpoint_save_removes_later_ones(tmp_path):
    checkpoints = CheckpointFolder(tmp_path, keep=3)
    for seen in (10, 20, 30):
        checkpoints.save(seen, ARRAYS, {"seen": seen})
    checkpoints.save(15, ARRAYS, {"seen": 15})  # on from 10
    assert load_seen(checkpoints) == [10, 15]


def test_checkpoints_sort_by_any_number_of_rows(tmp_path):
    checkpoints = CheckpointFolder(tmp_path)
    for seen in (10**12 - 1, 10**12, 10**15):
        checkpoints.save(seen, ARRAYS, {"seen": seen})
    assert load_seen(checkpoints) == [10**12 - 1, 10**12, 10**15]
    with pytest.raises(CheckpointError, match="another training"):
        checkpoints.check_no_newer(10**12)
    checkpoints.check_no_newer(10**15)
    for wrong, error in [(-1, ValueError), (1.5, TypeError), ("1", TypeError)]:
        with pytest.raises(error, match="n_rows_seen: expected"):
            checkpoints.save(wrong, ARRAYS, {})


@pytest.mark.parametrize(
    "array",
    [np.ones(2, complex), np.ones(2, np.longdouble), np.array(["a"]), np.array([None]), np.ma.array([1], mask=[1])],
    ids=lambda array: f"{type(array).__name__} {array.dtype}",
)
def test_checkpoint_refuses_lossy_arrays(tmp_path, array):
    with pytest.raises(TypeError, match="arrays: expected booleans, integers, floats or complex64, got .* for 'odd'"):
        CheckpointFolder(tmp_path).save(1, {"w": np.ones(1), "odd": array}, {})
    assert list_entries(tmp_path) == []


CALLS = ("mkdir", "open", "write", "fsync", "close", "rename", "unlink", "rmdir")


def save_and_die(folder, call_number, seen, keep=1):
    """Save in a new process that exits at system call `call_number`, if possible in the middle of it; return the calls."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        with open(reading, "rb") as pipe:
            calls = len(pipe.read())
        return calls, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    tell, end = os.write, os._exit
    count = 0

    def fatal(name, real):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            tell(writing, b".")
            if count == call_number:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                end(9)
            return real(*args, **kwargs)

        return call

    try:
        for name in CALLS:
            setattr(os, name, fatal(name, getattr(os, name)))
        CheckpointFolder(folder, keep=keep).save(seen, {"w": np.full(1000, 2.0)}, {"number": 2})
        end(0)
    finally:
        end(1)


@pytest.mark.parametrize("seen", [200, 100], ids=["another", "in place of the same"])
@pytest.mark.slow
def test_checkpoint_survives_a_kill_at_any_call(tmp_path, seen):
    CheckpointFolder(tmp_path / "before", keep=1).save(100, {"w": np.full(1000, 1.0)}, {"number": 1})

    def run(folder, call_number):
        shutil.copytree(tmp_path / "before", folder)
        return save_and_die(folder, call_number, seen)

    calls, status = run(tmp_path / "whole", -1)
    assert calls >= 20 and status == 0
    checkpoints = []
    for call_number in range(1, calls + 1):
        folder = tmp_path / str(call_number)
        assert run(folder, call_number)[1] == 9
        stored = CheckpointFolder(folder).load()
        assert stored.arrays["w"].tolist() == [float(stored.meta["number"])] * 1000
        checkpoints.append(stored.meta["number"])
        # The next checkpoint is written as usual.
        CheckpointFolder(folder, keep=1).save(300, {"w": np.zeros(1)}, {"number": 3})
        assert CheckpointFolder(folder).load().meta["number"] == 3
        assert len(list_entries(folder)) == 1
    assert checkpoints == sorted(checkpoints) and checkpoints[0] == 1 and checkpoints[-1] == 2


@pytest.mark.slow
def test_checkpoint_kill_leaves_no_later_stale_checkpoint(tmp_path):
    for seen in (10, 20, 30):
        CheckpointFolder(tmp_path / "before").save(seen, {"w": np.ones(1000)}, {})

    def run(folder, call_number):
        shutil.copytree(tmp_path / "before", folder)
        return save_and_die(folder, call_number, 15, keep=3)[0]

    for call_number in range(1, run(tmp_path / "whole", -1) + 1):
        folder = tmp_path / str(call_number)
        run(folder, call_number)
        names = [int(path.name.removeprefix("rows-")) for path in CheckpointFolder(folder).list_paths()]
        assert names in ([10, 20, 30], [10, 20], [10], [10, 15])
        for path in CheckpointFolder(folder).list_paths():
            CheckpointFolder(folder).load(path)  # no checkpoint is removed in part


def test_checkpoint_survives_a_full_disk(tmp_path, monkeypatch):
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save(1, ARRAYS, {"number": 1})

    def full(file, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            checkpoints.save(2, ARRAYS, {"number": 2})
    assert checkpoints.load().meta["number"] == 1
    assert len(list_entries(tmp_path)) == 1


def test_checkpoint_load_refuses_other_files(tmp_path):
    checkpoints = CheckpointFolder(tmp_path)
    with pytest.raises(FileNotFoundError, match="expected a checkpoint, found none"):
        checkpoints.load()
    path = checkpoints.save(1, ARRAYS, {})
    for damaged in (b"{", b"[]", b"\xff", b"{}"):
        (path / "meta.json").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"is damaged: .*take an older one"):
            checkpoints.load()
    content = (path / "state.safetensors").read_bytes()
    for damaged in (content[:-8], b"", b"\xff" * 100, content[8:]):
        (path / "state.safetensors").write_bytes(damaged)
        with pytest.raises(CheckpointError, match="is damaged"):
            checkpoints.load()
    (path / "state.safetensors").unlink()
    with pytest.raises(CheckpointError, match="expected a checkpoint, with state.safetensors"):
        checkpoints.load()
    with pytest.raises(ValueError, match="keep: expected at least 1, got 0"):
        CheckpointFolder(tmp_path, keep=0)


def test_checkpoint_of_equal_rows_is_not_later(tmp_path):
    checkpoints = CheckpointFolder(tmp_path)
    path = checkpoints.save(1000, {"w": np.ones(1)}, {})
    checkpoints.unlock()
    os.rename(path, f"{path}.old")  # as after a kill between two renames
    checkpoints.check_no_newer(1000)
    with pytest.raises(CheckpointError, match="another training"):
        checkpoints.check_no_newer(999)


# -- damage ----------------------------------------------------------------------------------------------------


def write_right_digests(path):
    """Replace the digests by those of the present files."""
    digests = [f"{hashlib.sha256((path / name).read_bytes()).hexdigest()}  {name}\n" for name in FILES[:2]]
    (path / FILES[2]).write_text("".join(digests))


def test_checkpoint_load_refuses_earlier_versions(tmp_path):
    path = CheckpointFolder(tmp_path).save(1, ARRAYS, {})
    (path / "meta.json").write_text(json.dumps({"format": 1}))
    (path / "SHA256SUMS").unlink()
    with pytest.raises(CheckpointError, match="it has no SHA256SUMS if an earlier version wrote it"):
        read_meta(path)
    (path / "meta.json").write_text(json.dumps({"format": 1, "meta": {}, "metrics": {}}))
    write_right_digests(path)
    with pytest.raises(CheckpointError, match="has format 1: this version reads 2 and 3"):
        read_meta(path)


SMALL = {"w": np.linspace(1, 2, 40), "n": np.array([3], "int8")}
META = {"epoch": 1, "best": 0.5}


@pytest.fixture(scope="module")
def sound_checkpoint(tmp_path_factory):
    return CheckpointFolder(tmp_path_factory.mktemp("sound")).save(7, SMALL, META, {"mse": 0.5})


def is_sound_or_refused(path):
    """Return True if a checkpoint equals the saved one, False if loading raises CheckpointError."""
    with contextlib.suppress(CheckpointError):
        stored = CheckpointFolder(path.parent).load(path)
        assert stored.arrays.keys() == SMALL.keys() and stored.meta == META and stored.metrics == {"mse": 0.5}
        for name, array in SMALL.items():
            assert stored.arrays[name].dtype == array.dtype and stored.arrays[name].tolist() == array.tolist()
        return True
    assert CheckpointFolder(path.parent, keep_best="mse").find_best() in (path, None)  # listing reads no arrays
    return False


@pytest.mark.parametrize("name", FILES)
def test_checkpoint_load_detects_damage_of_any_byte(tmp_path, sound_checkpoint, name):
    path = tmp_path / sound_checkpoint.name
    shutil.copytree(sound_checkpoint, path)
    content = (path / name).read_bytes()
    for i in range(len(content)):
        flipped = bytearray(content)
        flipped[i] ^= 1 << i % 8
        for damaged in (bytes(flipped), content[:i], content[:i] + b"\0" + content[i:]):
            (path / name).write_bytes(damaged)
            is_whole = is_sound_or_refused(path)
            assert not is_whole or name == "SHA256SUMS" and i >= len(content) - 1, i  # the last line's end
    for other in set(FILES) - {name}:
        shutil.copy(path / other, path / name)
        assert not is_sound_or_refused(path)
    (path / name).unlink()
    assert not is_sound_or_refused(path)
    (path / name).mkdir()
    assert not is_sound_or_refused(path)


# -- two writers -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def process(function):
    """Run a function in a new process, with a pipe for its results; yield the process ID and the pipe."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(reading)
            with open(writing, "w") as pipe:
                function(pipe)
        finally:
            os._exit(0)
    os.close(writing)
    try:
        with open(reading) as pipe:
            yield pid, pipe
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def write_many(folder, number):
    """Return a function that writes checkpoints as a trainer does, and reports which are refused."""

    def run(pipe):
        checkpoints = CheckpointFolder(folder, keep=50)
        for seen in range(1, 21):
            try:
                checkpoints.save(seen, {"w": np.full(20000, float(number))}, {"number": number})
            except CheckpointError as error:
                pipe.write(f"{error}\n")
        pipe.flush()
        signal.pause()  # this process has the lock until it is killed

    return run


def test_checkpoint_folder_lock_excludes_a_second_process(tmp_path):
    """One writer is refused, with the other's process ID and host; no checkpoint mixes both."""
    with (
        process(write_many(tmp_path, 1)) as (first_pid, first_pipe),
        process(write_many(tmp_path, 2)) as (other, second_pipe),
    ):
        reader = CheckpointFolder(tmp_path)

        def has_all():  # readers need no lock
            with contextlib.suppress(FileNotFoundError):
                reader.load()
            return len(reader.list_paths()) == 20

        wait_until(has_all, limit=60)
        stored = [reader.load(path) for path in reader.list_paths()]
        writer = int(stored[0].meta["number"])
        pid, pipe = (first_pid, second_pipe) if writer == 1 else (other, first_pipe)
        for checkpoint in stored:
            assert checkpoint.meta["number"] == writer and set(checkpoint.arrays["w"]) == {float(writer)}
        refusals = [pipe.readline() for _ in range(20)]
        words = f"{tmp_path} is the folder of a training run of %s"
        named, unnamed = words % f"process {pid} on host {platform.node()}", words % "another process"
        # The writer locks the file first, and then writes its name into it.
        assert named in refusals[-1] and all(named in line or unnamed in line for line in refusals), refusals
    with process(write_many(tmp_path, 3)):  # the writer's death has released the lock
        wait_until(lambda: reader.load().meta["number"] == 3)


def test_checkpoint_folder_lock_ends_with_a_killed_writer(tmp_path):
    def run(pipe):
        checkpoints = CheckpointFolder(tmp_path)
        checkpoints.save(1, {"w": np.ones(10)}, {})
        (tmp_path / "unfinished-1234").mkdir()
        (tmp_path / "unfinished-1234" / "state.safetensors").touch()
        pipe.write("saved\n")
        pipe.flush()
        signal.pause()

    with process(run) as (pid, pipe):
        assert pipe.readline() == "saved\n"
        with pytest.raises(CheckpointError, match=f"process {pid} on host {platform.node()}: wait for"):
            CheckpointFolder(tmp_path).lock()
        assert "unfinished-1234" in list_entries(tmp_path)
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save(2, ARRAYS, {})
    assert list_entries(tmp_path) == ["rows-000000000001", "rows-000000000002"]


def test_checkpoint_folder_lock_belongs_to_one_object(tmp_path):
    first, second = CheckpointFolder(tmp_path), CheckpointFolder(tmp_path)
    first.save(1, ARRAYS, {})
    first.lock()
    for other in (second, copy.deepcopy(first)):
        with pytest.raises(
            CheckpointError, match=rf"process {os.getpid()} on host {platform.node()} \(this one\): wait for"
        ):
            other.save(2, ARRAYS, {})
    assert second.load().arrays["n"] == 3
    first.unlock()
    second.save(2, ARRAYS, {})
    del second
    first.save(3, ARRAYS, {})


def test_checkpoint_folder_lock_is_not_inherited(tmp_path):
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save(1, ARRAYS, {})

    def run(pipe):
        try:
            checkpoints.save(2, ARRAYS, {})
        except CheckpointError as error:
            pipe.write(f"{error}\n")
        pipe.flush()
        signal.pause()

    with process(run) as (_, pipe):
        assert f"process {os.getpid()} on host" in pipe.readline()
        checkpoints.unlock()
        CheckpointFolder(tmp_path).lock()  # though the other process is alive


def test_checkpoint_on_a_file_system_without_locks_warns(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / "unfinished-1234").mkdir()
    with pytest.warns(RuntimeWarning, match="its file system has no locks .*: let one run write there"):
        CheckpointFolder(tmp_path).save(1, ARRAYS, {})
    assert list_entries(tmp_path) == ["rows-000000000001", "unfinished-1234"]  # another process may be writing it


# -- the best --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep_best", "best"), [("error", 2), (("error", "min"), 2), (["accuracy", "max"], 3)])
def test_checkpoint_keeps_the_best(tmp_path, keep_best, best):
    checkpoints = CheckpointFolder(tmp_path, keep=2, keep_best=keep_best)
    assert checkpoints.find_best() is None
    values = [(0.5, 0.1), (0.1, 0.2), (0.3, 0.9), (0.1, 0.9), (0.2, 0.5), (0.4, 0.4), (float("nan"), float("nan"))]
    for seen, (error, accuracy) in enumerate(values, 1):
        checkpoints.save(seen, ARRAYS, {"seen": seen}, {"error": error, "accuracy": accuracy})
    assert load_seen(checkpoints) == [best, 6, 7] and checkpoints.load(checkpoints.find_best()).meta["seen"] == best
    checkpoints.save(8, ARRAYS, {"seen": 8})  # without metrics
    assert load_seen(checkpoints) == [best, 7, 8]
    again = CheckpointFolder(tmp_path, keep=1, keep_best=keep_best)
    checkpoints.unlock()
    again.save(9, ARRAYS, {"seen": 9}, {"error": 0.0, "accuracy": 1.0})
    assert load_seen(again) == [9]


def test_checkpoint_best_ignores_damaged_files(tmp_path):
    checkpoints = CheckpointFolder(tmp_path, keep_best="error")
    for seen, error in (1, 0.5), (2, 0.1):
        path = checkpoints.save(seen, ARRAYS, {}, {"error": error})
    (path / "meta.json").write_bytes(b"{}")
    assert checkpoints.find_best() == checkpoints.list_paths()[0]
    assert CheckpointFolder(tmp_path).find_best() is None


@pytest.mark.parametrize("wrong", [3, ("error", "least"), ("error",), (3, "max"), {"error": "max"}])
def test_checkpoint_refuses_wrong_metrics(tmp_path, wrong):
    with pytest.raises(TypeError, match="keep_best: expected a metric's name, or a pair such as"):
        CheckpointFolder(tmp_path, keep_best=wrong)
