"""Runs with deaths of ranks: restarts from checkpoints, and on_death='continue'."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from launch_interrupts import LIMIT, start_checkpointed_run, wait_until_training
from launch_runs import ENVIRONMENT, read_json_lines, train
from system import wait_until

from synkhronos.launcher.rank_process import master_process, memory_checkpoint_writer
from synkhronos.launcher.supervision import memory_checkpoint_folder
from synkhronos.ranks import WorkerError
from synkhronos.training.checkpoints.checkpoint_folder import list_checkpoints

pytestmark = pytest.mark.starts_programs


def train_with_deaths(folder, victim, epochs, *arguments, status=0, checkpoint=1, **settings):
    """Train with one rank that dies in some epochs; return the command's result."""
    pytest.importorskip("safetensors")
    marks = folder / "marks"
    marks.mkdir(parents=True)
    config = {"config__marks": f"'{marks}'", "config__victim": victim, "config__epochs": epochs}
    return train(folder / "run", "DyingMLP", *arguments, status=status, checkpoint=checkpoint, **config, **settings)


@pytest.fixture(scope="module")
def undisturbed_run(tmp_path_factory):
    """Train without deaths; return the run's folder."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train_with_deaths(folder, 2, [], checkpoint=0)
    return folder / "run"


@pytest.mark.faults
@pytest.mark.parametrize("victim", [0, 1])
def test_restart_uses_the_newest_checkpoint(tmp_path, undisturbed_run, victim):
    done = train_with_deaths(tmp_path, victim, [1, 2], "--restarts=3")
    run = tmp_path / "run"
    newest = [run / "checkpoints" / f"rows-{9 * epoch:012d}" for epoch in (1, 2)]
    assert [line for line in done.stderr.splitlines() if line.startswith("restart ")] == [
        f"restart {i} of 3 from {path}" for i, path in enumerate(newest, 1)
    ]
    record = json.loads((run / "run.json").read_text())
    assert record["status"] == 0 and record["restarts"] == 2
    assert [path.name for path in sorted(run.glob("failure*"))] == ["failure-1.txt", "failure-2.txt"]
    assert f"rank {victim}" in (run / "failure-1.txt").read_text() and "SIGKILL" in (run / "failure-2.txt").read_text()
    whole, parts = (np.load(folder / "params.npz") for folder in (undisturbed_run, run))
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)
    for name in ("reports", "rank-0", "rank-1"):  # as without deaths
        expected_lines, restarted_lines = (read_json_lines(folder, name) for folder in (undisturbed_run, run))
        assert [(report["epoch"], report["loss"]) for report in restarted_lines] == [
            (report["epoch"], report["loss"]) for report in expected_lines
        ]
    log = (run / "rank-0.log").read_text()
    assert log.count("process ") == 3 and "epoch 1 done" in log  # the checkpoint of all three ranks


@pytest.mark.faults
def test_restart_without_a_checkpoint_starts_anew(tmp_path):
    done = train_with_deaths(tmp_path, 1, [0], "--restarts=1", every=1)
    assert "restart 1 of 1 from the beginning, as it has no checkpoint" in done.stderr
    assert [line["step"] for line in read_json_lines(tmp_path / "run", "rank-0")] == list(range(1, 28))


@pytest.mark.faults
def test_restart_limit_reports_the_last_failure(tmp_path):
    done = train_with_deaths(tmp_path, 1, [0, 1, 2], "--restarts=2", status=1, config__raising="true")
    assert done.stderr.rstrip().endswith("ValueError: epoch 2 is damaged")
    assert "epoch 2" in (tmp_path / "run" / "failure.txt").read_text()
    assert "epoch 1" in (tmp_path / "run" / "failure-2.txt").read_text()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["restarts"] == 2


@pytest.mark.faults
def test_restart_of_a_resumed_run_ignores_later_checkpoints(tmp_path):
    train_with_deaths(tmp_path, 2, [])
    first = tmp_path / "run" / "checkpoints" / "rows-000000000009"
    (tmp_path / "marks").rmdir()
    done = train_with_deaths(tmp_path, 1, [1], "--resume", first, "--restarts=1")
    assert f"restart 1 of 1 from {first}" in done.stderr
    assert [report["epoch"] for report in read_json_lines(tmp_path / "run", "reports")] == [1, 2, 3]


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_restart_is_skipped_after_a_signal(tmp_path, number):
    pytest.importorskip("safetensors")
    with start_checkpointed_run(tmp_path, False, checkpoint=1, restarts=3) as process:
        wait_until_training(tmp_path, process)
        process.send_signal(number)
        _, errors = process.communicate(timeout=LIMIT)
        assert process.returncode == 128 + number and "\nrestart " not in f"\n{errors}"


@pytest.mark.faults
@pytest.mark.parametrize("victim", [0, 1])
def test_on_death_continue_equals_an_undisturbed_run(tmp_path, undisturbed_run, victim):
    done = train_with_deaths(tmp_path, victim, [0, 1], "--on-death=continue", checkpoint=0)
    assert (
        "death 1 of at most 100: from " in done.stderr and "death 2 of at most 100: from the checkpoint " in done.stderr
    )
    whole, parts = undisturbed_run, tmp_path / "run"
    record = json.loads((parts / "run.json").read_text())
    assert record["status"] == 0 and record["deaths"] == 2 and "restarts" not in record
    assert not list(parts.glob("failure*")) and not (parts / "checkpoints").exists()
    with np.load(whole / "params.npz") as expected, np.load(parts / "params.npz") as disturbed:
        assert all(np.array_equal(expected[name], disturbed[name]) for name in expected)
    expected, disturbed = (read_json_lines(folder, "reports") for folder in (whole, parts))
    for name in ("epoch", "loss", "validation", "steps"):
        assert [report[name] for report in disturbed] == [report[name] for report in expected]
    deaths = [death for report in disturbed for death in report.get("deaths", [])]
    assert deaths == json.loads((parts / "deaths.json").read_text())
    assert [death["rank"] for death in deaths] == [victim] * 2
    assert all("was killed by SIGKILL" in death["cause"] and death["seconds"] > 0 for death in deaths)
    assert [len(report.get("deaths", [])) for report in disturbed] == [1, 1, 0]
    assert 9 <= deaths[1]["step"] < 12  # the death is in the third step of the second epoch
    for rank in range(2):
        records = read_json_lines(parts, f"rank-{rank}")
        assert records[-1]["step"] == 27 and sum(record["rows"] for record in records) == 270
    assert f"rank {victim} was killed by SIGKILL" in (parts / "rank-0.log").read_text()
    memory_folder = json.loads((tmp_path / "marks" / "died-0").read_text())["memory_checkpoint_folder"]
    assert "synkhronos-copy" in memory_folder and not Path(memory_folder).exists()


@pytest.mark.faults
@pytest.mark.parametrize("rule", ["EASGD", "GoSGD", "Swap"])
def test_on_death_continue_takes_each_step_once_under_other_rules(tmp_path, rule):
    train_with_deaths(tmp_path, 1, [1], "--on-death=continue", checkpoint=0, rule=rule)
    assert [report["epoch"] for report in read_json_lines(tmp_path / "run", "reports")] == [1, 2, 3]
    for rank in range(2):  # each row once
        records = read_json_lines(tmp_path / "run", f"rank-{rank}")
        assert [record["step"] for record in records] == sorted({record["step"] for record in records})
        assert records[-1]["step"] == 27 and sum(record["rows"] for record in records) == 270


@pytest.mark.faults
def test_max_deaths_ends_a_run(tmp_path):
    done = train_with_deaths(tmp_path, 1, [0, 1, 2], "--on-death=continue", checkpoint=0, max_deaths=1, status=1)
    assert done.stderr.endswith("on_death='continue': 2 deaths exceed max_deaths=1\n")
    assert "SIGKILL" in (tmp_path / "run" / "failure.txt").read_text()


def test_session_failure_without_a_death_is_logged(tmp_path, monkeypatch):
    monkeypatch.setattr(master_process, "get_last_session", lambda: None)
    description = "the ranks did not finish within 9 seconds"
    error = WorkerError(f"{description}; the workers were ended.", 1, description=description)
    master_process._log_failure(tmp_path, error, False)
    (death,) = json.loads((tmp_path / "deaths.json").read_text())
    assert (death["rank"], death["host"], death["cause"]) == (1, "", f"ended: {description}")


#: Lets the ranks whose numbers are in the variable GONE fail to start in each recovery.
BROKEN_DEVICES = """
import json, os, sys
if "synkhronos.launcher.rank_process.master_process" in sys.orig_argv:
    from synkhronos.launcher.rank_process import rank_functions
    prepare_rank = rank_functions.prepare_rank
    def start_or_fail(context, settings, arguments):
        is_too_many = context.size > int(os.environ["WORKING"])
        if arguments.is_recovery and is_too_many and context.number == int(os.environ["GONE"]):
            raise OSError(f"{settings.devices[context.number]} has fallen off the bus")
        return prepare_rank(context, settings, arguments)
    rank_functions.prepare_rank = start_or_fail
"""


def train_with_a_broken_device(folder, n_working, gone, **arguments):
    """Train on three ranks; one dies, and a device fails from then on.  Return the command's result."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BROKEN_DEVICES)
    path = f"{folder}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"
    environment = {"PYTHONPATH": path, "GONE": str(gone), "WORKING": str(n_working)}
    words = "--on-death=continue", "--devices=cpu,cpu,cpu"
    return train_with_deaths(folder, 1, [1], *words, checkpoint=0, environment=environment, **arguments)


@pytest.mark.faults
@pytest.mark.parametrize("gone", [0, 2])
def test_on_death_continue_leaves_out_a_broken_device(tmp_path, gone):
    done = train_with_a_broken_device(tmp_path / "a", 2, gone)
    words = f"rank {gone} can't start on cpu, which is left out: the run continues with cpu, cpu\n"
    assert done.stderr.count(words) == 1
    run = tmp_path / "a" / "run"
    assert [report["epoch"] for report in read_json_lines(run, "reports")] == [1, 2, 3]
    assert [report["batch"].split()[0] for report in read_json_lines(run, "reports")] == ["3", "2", "2"]
    deaths = json.loads((run / "deaths.json").read_text())
    assert [death["rank"] for death in deaths] == [1, gone, gone]
    assert [death["is_failed_start"] for death in deaths[:2]] == [False, True]
    assert deaths[1]["cause"].startswith("could not start: ") and "fallen off the bus" in deaths[1]["cause"]
    last = [sum(line["rows"] for line in read_json_lines(run, f"rank-{r}") if line["epoch"] == 2) for r in range(2)]
    assert last == [90, 90]  # in this class each rank has the same number of rows


@pytest.mark.faults
def test_on_death_continue_without_a_device_left_ends_the_run(tmp_path):
    done = train_with_a_broken_device(tmp_path / "a", 0, 0, status=1)
    assert done.stderr.count("which is left out") == 2
    assert done.stderr.endswith("rank 0 can't start on cpu: on_death = 'continue' has no device left\n")
    assert "fallen off the bus" in (tmp_path / "a" / "run" / "failure.txt").read_text()


@pytest.mark.faults
@pytest.mark.parametrize("victim", [0, 1])
def test_on_death_continue_counts_exits_as_deaths(tmp_path, victim):
    done = train_with_deaths(tmp_path, victim, [1], "--on-death=continue", checkpoint=0, config__exit_code="3")
    assert "death 1 of at most 100: from the checkpoint " in done.stderr
    (death,) = json.loads((tmp_path / "run" / "deaths.json").read_text())
    assert death["rank"] == victim and "exited with code 3" in death["cause"]


@pytest.mark.faults
def test_on_death_continue_ends_at_an_exception(tmp_path):
    arguments = "--on-death=continue", "--restarts=1"
    done = train_with_deaths(tmp_path, 1, [0, 1], *arguments, status=1, config__raising="true")
    assert done.stderr.count("restart 1 of 1 from the beginning") == 1 and "death" not in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: epoch 1 is damaged")


@pytest.mark.faults
def test_signal_ends_a_run_with_on_death_continue(tmp_path):
    """Asynchronous ranks end together at a memory checkpoint, as a rank that ended alone would miss it."""
    pytest.importorskip("safetensors")
    with start_checkpointed_run(tmp_path, False, checkpoint=1, rule="EASGD", on_death="continue") as process:
        wait_until_training(tmp_path, process)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=LIMIT)
        assert process.returncode == 143 and "--resume continues from" in errors


@pytest.mark.faults
def test_signal_during_a_recovery_keeps_the_memory_checkpoint(tmp_path):
    """The new ranks have written no checkpoint yet, so the run is resumed from the memory checkpoint."""
    pytest.importorskip("safetensors")
    with start_checkpointed_run(tmp_path, False, checkpoint=500, on_death="continue") as process:
        pids = wait_until_training(tmp_path, process)
        opened = (os.path.realpath(file) for file in Path(f"/proc/{process.pid}/fd").iterdir())
        memory_folder = next(Path(path) for path in opened if path.startswith("/dev/shm/synkhronos-copy-"))
        wait_until(lambda: list_checkpoints(memory_folder), limit=LIMIT)
        os.kill(pids[2], signal.SIGKILL)
        for line in process.stderr:
            if line.startswith("death 1 "):
                break
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=LIMIT)
        assert process.returncode == 143 and "--resume continues from" in errors
        assert len(list((tmp_path / "checkpoints").iterdir())) == 1 and not memory_folder.exists()


def test_memory_folders_of_killed_runs_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_checkpoint_folder, "_PARENT_FOLDER", tmp_path)
    (tmp_path / f"synkhronos-copy-{os.getuid()}-left").mkdir()
    folders = [memory_checkpoint_folder.MemoryCheckpointFolder()]  # the other folder's owner may be about to lock it
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(memory_checkpoint_folder, "_ABANDONED_SECONDS", -1)
    folders.append(memory_checkpoint_folder.MemoryCheckpointFolder())
    assert sorted(tmp_path.iterdir()) == sorted(folder.path for folder in folders)
    for folder in folders:
        folder.remove()
    assert not list(tmp_path.iterdir())


def test_memory_checkpoints_are_rarer_if_slow(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(memory_checkpoint_writer.time, "monotonic", lambda: now[0])
    state = SimpleNamespace(context=SimpleNamespace(broadcast=lambda number: number))
    schedule = memory_checkpoint_writer.MemoryCheckpointWriter("folder", state)
    batch, dues = 0, []
    for _ in range(12):
        dues.append(schedule.due_batch)
        now[0] += (schedule.due_batch - batch) * 0.01  # seconds of the batches
        batch, began = schedule.due_batch, now[0]
        now[0] += 0.5
        schedule._schedule_next(began, batch)
    assert dues[:4] == [1, 3, 7, 15] and dues[-1] - dues[-2] == 500  # ten times as long as a memory checkpoint takes
