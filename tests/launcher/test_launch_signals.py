"""Runs that signals end: they write checkpoints, have grace periods, and leave no process."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launch_interrupts import LIMIT, ShellSupervisor, start_checkpointed_run, wait_until_training
from launch_runs import ENVIRONMENT, make_synkhronos_command
from paths import SUPPORT
from system import list_children, wait_until_ended

from synkhronos.launcher.configuration.settings import Settings
from synkhronos.launcher.supervision import supervisor
from synkhronos.launcher.supervision.master_arguments import COMPLETE_EXIT_CODE

pytestmark = pytest.mark.starts_programs


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_run_status_is_always_recorded(tmp_path, number):
    run = ShellSupervisor(tmp_path, f"kill -{int(number)} {os.getpid()}; sleep 60")
    assert run.run() == 128 + number
    record = run.read_record()
    assert (record["status"], record["signal"], record["checkpoint"]) == (128 + number, number.name, None)
    assert record["ended"] and signal.getsignal(number) == signal.SIG_DFL


def test_ignored_signal_stays_ignored(tmp_path):
    run = ShellSupervisor(tmp_path, f"kill -HUP {os.getpid()}; exit 3")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert run.run() == 3 and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


#: A master that sends SIGTERM to the supervisor twice, as a scheduler does, and exits with 143 after it has written a
#: checkpoint.
CHECKPOINTING_MASTER = """
trap 'mkdir -p {folder}/checkpoints/rows-000000000007; exit 143' TERM
kill -TERM {pid}; kill -TERM {pid}
for i in $(seq 600); do sleep 0.1; done
"""


def test_signal_lets_ranks_write_a_checkpoint(tmp_path, capfd):
    run = ShellSupervisor(tmp_path, CHECKPOINTING_MASTER.format(folder=tmp_path, pid=os.getpid()), checkpoint=1)
    assert run.run() == 143
    record, path = run.read_record(), str(tmp_path / "checkpoints" / "rows-000000000007")
    assert (record["status"], record["signal"], record["checkpoint"]) == (143, "SIGTERM", path)
    assert f"the run was ended by SIGTERM; --resume continues from {path}" in capfd.readouterr().err


def test_signal_ends_slow_ranks_after_the_grace_period(tmp_path, capfd):
    run = ShellSupervisor(tmp_path, f"trap '' TERM; kill -TERM {os.getpid()}; sleep 60", checkpoint=1, grace=0.3)
    began = time.monotonic()
    assert run.run() == 143
    assert 0.3 < time.monotonic() - began < 30
    assert run.read_record()["checkpoint"] is None
    assert "ended by SIGTERM, before it had written a checkpoint" in capfd.readouterr().err


def test_signal_after_the_end_keeps_the_exit_status(tmp_path):
    run = ShellSupervisor(
        tmp_path, f"trap 'exit {COMPLETE_EXIT_CODE}' TERM; kill -TERM {os.getpid()}; sleep 60 & wait", checkpoint=1
    )
    assert run.run() == 0 and "signal" not in run.read_record()


def test_signal_ends_a_run_with_an_unread_console(tmp_path):
    reading, writing = os.pipe()
    try:
        os.set_blocking(writing, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, b"x" * 4096)
        os.set_blocking(writing, True)
        run = ShellSupervisor(tmp_path, f"echo one; kill -TERM {os.getpid()}; sleep 60")
        run._console._fd = writing
        assert run.run() == 143
        assert run.read_record()["status"] == 143
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.faults
def test_repeated_interrupts_leave_no_rank(tmp_path, monkeypatch):
    (tmp_path / "run.json").write_text("{}")
    run = supervisor.Supervisor(Settings("module", "Class", ".", ("cpu",), folder=str(tmp_path)))

    def start(consoles):
        run._master = subprocess.Popen(
            ["sh", "-c", "trap '' INT; exec sleep 60"], stdout=consoles[0], start_new_session=True
        )

    def interrupt_repeatedly():
        for _ in range(4):
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)

    kill, killers = os.killpg, []

    def kill_later(pid, number):
        """Kill a second later, as if the kernel took long to release memory."""
        if not killers:
            killers.append(threading.Timer(1.0, kill, (pid, number)))
            killers[0].start()

    monkeypatch.setattr(run, "_start_master", start)
    monkeypatch.setattr(os, "killpg", kill_later)
    thread = threading.Thread(target=interrupt_repeatedly)
    thread.start()
    assert run.run() == 128 + signal.SIGINT
    thread.join()
    assert run._master.returncode == -signal.SIGKILL


@pytest.mark.faults
def test_interrupt_before_ranks_start_ends_the_run(tmp_path, monkeypatch):
    (tmp_path / "run.json").write_text("{}")
    run = supervisor.Supervisor(Settings("module", "Class", ".", ("cpu",), folder=str(tmp_path)))

    def start(consoles):
        signal.raise_signal(signal.SIGINT)
        run._master = subprocess.Popen(["sleep", "60"], stdout=consoles[0], start_new_session=True)

    monkeypatch.setattr(run, "_start_master", start)
    began = time.monotonic()
    assert run.run() == 128 + signal.SIGINT
    assert time.monotonic() - began < LIMIT


def list_process_tree(pid):
    pids = [pid]
    for child in list_children(pid):
        pids += list_process_tree(child)
    return pids


@pytest.mark.faults
@pytest.mark.parametrize(
    ("target", "script"),
    [
        *((target, False) for target in ("supervisor", "rank 0", "rank 1", "Ctrl-C", "SIGTERM")),
        *((target, True) for target in ("script", "supervisor", "Ctrl-C")),
    ],
)
def test_kill_of_any_process_leaves_nothing(tmp_path, target, script):
    folder = tmp_path / "run"
    model = {"modelfile": "launch_models.mlp_variants", "modelclass": "StuckMLP"}
    if script:
        settings = {**model, "devices": ["cpu", "cpu"], "folder": str(folder), "every": 1, "epochs": 1000}
        code = (
            "from synkhronos.exchange_rules import EASGD\nfrom synkhronos.launcher import start_run\n"
            f"start_run(EASGD(), **{settings!r}).wait()"
        )
        words = [sys.executable, "-c", code]
    else:
        sets = [
            f"--set={name}={value}" for name, value in {**model, "every": 1, "epochs": 1000, "rule": "EASGD"}.items()
        ]
        words = make_synkhronos_command("train", "--devices=cpu,cpu", "--folder", folder, *sets)
    process = subprocess.Popen(
        words, cwd=SUPPORT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        first, *ranks = wait_until_training(folder, process)
        everyone = list_process_tree(process.pid)
        assert set(ranks) < set(everyone) and len(everyone) == (4 if script else 3)
        supervisor = list_children(process.pid)[0] if script else process.pid
        victim = {"script": first, "supervisor": supervisor, "rank 0": ranks[0], "rank 1": ranks[1]}.get(target, first)
        os.kill(victim, {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM}.get(target, signal.SIGKILL))
        began = time.monotonic()
        _, errors = process.communicate(timeout=LIMIT)
        assert process.returncode != 0
        assert time.monotonic() - began < LIMIT
        assert ("Ctrl-C once more" in errors) == (target == "Ctrl-C")
        if target == "rank 1":
            assert process.returncode == 1 and "was killed by SIGKILL" in errors
        if target == "rank 0":
            assert process.returncode == 137 and "rank 0" in errors and "was killed by SIGKILL" in errors
        wait_until_ended(everyone)
    finally:
        process.kill()
        process.wait()


@pytest.mark.faults
@pytest.mark.parametrize("script", [False, True])
def test_signal_to_all_processes_still_writes_a_checkpoint(tmp_path, script):
    pytest.importorskip("safetensors")
    with start_checkpointed_run(tmp_path, script, checkpoint=1) as process:
        wait_until_training(tmp_path, process)
        everyone = list_process_tree(process.pid)
        for pid in reversed(everyone):  # the ranks first
            os.kill(pid, signal.SIGUSR1)
        _, errors = process.communicate(timeout=LIMIT)
        assert process.returncode == (-signal.SIGUSR1 if script else 128 + signal.SIGUSR1), errors
        record = json.loads((tmp_path / "run.json").read_text())
        assert record["status"] == 128 + signal.SIGUSR1 and record["signal"] == "SIGUSR1"
        assert (Path(record["checkpoint"]) / "meta.json").exists()
        wait_until_ended(everyone)


@pytest.mark.faults
def test_second_signal_ends_a_run_at_once(tmp_path):
    pytest.importorskip("safetensors")
    with start_checkpointed_run(tmp_path, False, "StuckMLP", checkpoint=1, grace=600) as process:
        wait_until_training(tmp_path, process)
        while any(len((tmp_path / f"rank-{r}.jsonl").read_text().splitlines()) < 3 for r in range(2)):
            time.sleep(0.05)
        time.sleep(0.5)  # both ranks are in the fourth step, which never ends
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(supervisor.DUPLICATE_SIGNAL_SECONDS + 0.5)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=LIMIT)
        assert process.returncode == 143 and "before it had written a checkpoint" in errors
