"""How runs fail: the first failure is told last, the status says so, and whoever is killed leaves nothing behind."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from launch_runs import ENVIRONMENT, TESTS, command, train
from system import children_of, lives, names, names_left

from synkhronos.launch import supervisor
from synkhronos.launch.settings import Settings

pytestmark = pytest.mark.any_library

LIMIT = 60


def test_the_first_failure_comes_last(tmp_path):
    done = train(tmp_path, "FailsOnOne", status=1)
    said = done.stderr.rstrip().splitlines()
    assert said[-1] == "ValueError: the third batch is damaged" and said[0] == "rank 1:"
    assert "others.py" in done.stderr and "train_iter" in done.stderr
    assert (tmp_path / "failure.txt").read_text().strip() == done.stderr.strip()
    assert json.loads((tmp_path / "run.json").read_text())["status"] == 1


def test_a_rank_that_ends_by_itself(tmp_path):
    done = train(tmp_path, "Exits", status=1)
    assert re.search(r"rank 1 .* exited with code 7", done.stderr)


def test_a_cost_that_is_no_number_is_not_saved(tmp_path):
    done = train(tmp_path, "Diverges", status=1, checkpoint=1)
    assert done.stderr.rstrip().endswith("FloatingPointError: the cost is nan in epoch 1: nothing of it was saved")
    assert not (tmp_path / "params.npz").exists() and not (tmp_path / "checkpoints").exists()


def test_the_failure_is_told_on_a_full_disk(tmp_path, capsys):
    (tmp_path / "failure.txt").touch()
    (tmp_path / "run.json").touch()  # neither could be written
    run = supervisor.Supervisor(Settings("module", "Class", ".", ("cpu",), folder=str(tmp_path)))
    run._master = SimpleNamespace(pid=1234, wait=lambda: -9)
    with pytest.raises(ValueError):  # noqa: PT011 - JSON's
        run._end()
    assert "rank 0 (process 1234) was killed by SIGKILL" in capsys.readouterr().err


@pytest.mark.faults
def test_ctrl_c_over_and_over_while_ranks_take_long_to_end(tmp_path, monkeypatch):
    (tmp_path / "run.json").write_text("{}")
    run = supervisor.Supervisor(Settings("module", "Class", ".", ("cpu",), folder=str(tmp_path)))

    def start(consoles):
        run._master = subprocess.Popen(
            ["sh", "-c", "trap '' INT; exec sleep 60"], stdout=consoles[0], start_new_session=True
        )

    def press():
        for _ in range(4):
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)

    kill, killers = os.killpg, []

    def killed(pid, number):
        """Memory that is given back takes its time."""
        if not killers:
            killers.append(threading.Timer(1.0, kill, (pid, number)))
            killers[0].start()

    monkeypatch.setattr(run, "_start", start)
    monkeypatch.setattr(os, "killpg", killed)
    thread = threading.Thread(target=press)
    thread.start()
    assert run.run() == 128 + signal.SIGINT
    thread.join()


@pytest.mark.faults
def test_ctrl_c_before_ranks_are_started(tmp_path, monkeypatch):
    (tmp_path / "run.json").write_text("{}")
    run = supervisor.Supervisor(Settings("module", "Class", ".", ("cpu",), folder=str(tmp_path)))

    def start(consoles):
        signal.raise_signal(signal.SIGINT)
        run._master = subprocess.Popen(["sleep", "60"], stdout=consoles[0], start_new_session=True)

    monkeypatch.setattr(run, "_start", start)
    began = time.monotonic()
    assert run.run() == 128 + signal.SIGINT
    assert time.monotonic() - began < 5


def family(pid):
    found = [pid]
    for child in children_of(pid):
        found += family(child)
    return found


def started(folder, process):
    """Wait until all ranks train; return the processes: supervisor, master, worker."""
    deadline = time.monotonic() + LIMIT
    while not (folder / "rank-1.jsonl").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return process.pid, *json.loads((folder / "processes.json").read_text())


@pytest.mark.faults
@pytest.mark.parametrize(
    ("who", "script"),
    [
        *((who, False) for who in ("supervisor", "rank 0", "rank 1", "Ctrl-C", "SIGTERM")),
        *((who, True) for who in ("script", "supervisor", "Ctrl-C")),
    ],
)
def test_a_kill_of_any_process_leaves_nothing_behind(tmp_path, who, script):
    before = names()
    folder = tmp_path / "run"
    model = {"modelfile": "launch_models.others", "modelclass": "Stuck"}
    if script:
        settings = {**model, "devices": ["cpu", "cpu"], "folder": str(folder), "every": 1, "epochs": 1000}
        code = f"from synkhronos.rules import EASGD\nrule = EASGD()\nrule.init(**{settings!r})\nrule.wait()"
        words = [sys.executable, "-c", code]
    else:
        sets = [
            f"--set={name}={value}" for name, value in {**model, "every": 1, "epochs": 1000, "rule": "EASGD"}.items()
        ]
        words = command("train", "--devices=cpu,cpu", "--folder", folder, *sets)
    process = subprocess.Popen(
        words, cwd=TESTS, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        first, *ranks = started(folder, process)
        everyone = family(process.pid)
        assert set(ranks) < set(everyone) and len(everyone) == (4 if script else 3)
        supervisor = children_of(process.pid)[0] if script else process.pid
        victim = {"script": first, "supervisor": supervisor, "rank 0": ranks[0], "rank 1": ranks[1]}.get(who, first)
        os.kill(victim, {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM}.get(who, signal.SIGKILL))
        began = time.monotonic()
        _, said = process.communicate(timeout=LIMIT)
        assert process.returncode != 0
        assert time.monotonic() - began < 10
        assert ("Ctrl-C once more" in said) == (who == "Ctrl-C")
        if who == "rank 1":
            assert process.returncode == 1 and "was killed by SIGKILL" in said
        if who == "rank 0":
            assert process.returncode == 137 and "rank 0" in said and "was killed by SIGKILL" in said
        deadline = time.monotonic() + LIMIT
        while any(lives(pid) for pid in everyone):
            assert time.monotonic() < deadline, [pid for pid in everyone if lives(pid)]
            time.sleep(0.05)
        assert not names_left(before)
    finally:
        process.kill()
        process.wait()
