"""Failing runs: the last line is the first failure, the exit status is not 0, and nothing is left."""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from launch_runs import ENVIRONMENT, command, lines, train
from paths import SUPPORT
from system import children_of, lives, names, names_left

from synkhronos.launch import copies, output, supervisor
from synkhronos.launch.settings import Settings
from synkhronos.training.checkpoint import list_checkpoints

pytestmark = pytest.mark.any_library

LIMIT = 60


def test_first_failure_is_printed_last(tmp_path):
    done = train(tmp_path, "FailsOnOne", status=1)
    said = done.stderr.rstrip().splitlines()
    assert said[-1] == "ValueError: the third batch is damaged" and said[0] == "rank 1:"
    assert "others.py" in done.stderr and "train_iter" in done.stderr
    assert (tmp_path / "failure.txt").read_text().strip() == done.stderr.strip()
    assert json.loads((tmp_path / "run.json").read_text())["status"] == 1


def test_rank_that_exits_by_itself(tmp_path):
    done = train(tmp_path, "Exits", status=1)
    assert re.search(r"rank 1 .* exited with code 7", done.stderr)


def train_with_deaths(folder, victim, epochs, *arguments, status=0, checkpoint=1, **settings):
    """Train with one rank that dies in some epochs; return the command's result."""
    pytest.importorskip("safetensors")
    marks = folder / "marks"
    marks.mkdir(parents=True)
    config = {"config__marks": f"'{marks}'", "config__victim": victim, "config__epochs": epochs}
    return train(folder / "run", "DiesOnce", *arguments, status=status, checkpoint=checkpoint, **config, **settings)


@pytest.mark.faults
@pytest.mark.parametrize("victim", [0, 1])
def test_restart_from_the_newest_checkpoint(tmp_path, victim):
    train_with_deaths(tmp_path / "whole", 2, [])
    done = train_with_deaths(tmp_path / "parts", victim, [1, 2], "--restarts=3")
    run = tmp_path / "parts" / "run"
    newest = [run / "checkpoints" / f"rows-{9 * epoch:012d}" for epoch in (1, 2)]
    assert [line for line in done.stderr.splitlines() if line.startswith("restart ")] == [
        f"restart {i} of 3 from {path}" for i, path in enumerate(newest, 1)
    ]
    noted = json.loads((run / "run.json").read_text())
    assert noted["status"] == 0 and noted["restarts"] == 2
    assert [path.name for path in sorted(run.glob("failure*"))] == ["failure-1.txt", "failure-2.txt"]
    assert f"rank {victim}" in (run / "failure-1.txt").read_text() and "SIGKILL" in (run / "failure-2.txt").read_text()
    whole, parts = (np.load(folder / "params.npz") for folder in (tmp_path / "whole" / "run", run))
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)
    for name in ("reports", "rank-0", "rank-1"):  # as if nothing had happened
        of_whole, of_parts = (lines(folder, name) for folder in (tmp_path / "whole" / "run", run))
        assert [(each["epoch"], each["loss"]) for each in of_parts] == [
            (each["epoch"], each["loss"]) for each in of_whole
        ]
    log = (run / "rank-0.log").read_text()
    assert log.count("process ") == 3 and "epoch 1 done" in log  # that of all three


@pytest.mark.faults
def test_restart_without_a_checkpoint(tmp_path):
    done = train_with_deaths(tmp_path, 1, [0], "--restarts=1", every=1)
    assert "restart 1 of 1 from the beginning, as it has no checkpoint" in done.stderr
    assert [line["step"] for line in lines(tmp_path / "run", "rank-0")] == list(range(1, 28))


@pytest.mark.faults
def test_restart_limit_reports_the_last_failure(tmp_path):
    done = train_with_deaths(tmp_path, 1, [0, 1, 2], "--restarts=2", status=1, config__raising="true")
    assert done.stderr.rstrip().endswith("ValueError: epoch 2 is damaged")
    assert "epoch 2" in (tmp_path / "run" / "failure.txt").read_text()
    assert "epoch 1" in (tmp_path / "run" / "failure-2.txt").read_text()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["restarts"] == 2


@pytest.mark.faults
def test_restart_of_a_resumed_run(tmp_path):
    """Later checkpoints than the one to resume from are of a training that was left."""
    train_with_deaths(tmp_path, 2, [])
    first = tmp_path / "run" / "checkpoints" / "rows-000000000009"
    (tmp_path / "marks").rmdir()
    done = train_with_deaths(tmp_path, 1, [1], "--resume", first, "--restarts=1")
    assert f"restart 1 of 1 from {first}" in done.stderr
    assert [report["epoch"] for report in lines(tmp_path / "run", "reports")] == [1, 2, 3]


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_restart_after_a_signal(tmp_path, number):
    pytest.importorskip("safetensors")
    with start_checkpointed_run(tmp_path, False, checkpoint=1, restarts=3) as process:
        wait_until_training(tmp_path, process)
        process.send_signal(number)
        _, said = process.communicate(timeout=LIMIT)
        assert process.returncode == 128 + number and "\nrestart " not in f"\n{said}"


def list_copies():
    return set(Path("/dev/shm").glob("synkhronos-copy-*"))


@pytest.mark.faults
@pytest.mark.parametrize("victim", [0, 1])
def test_on_death_continue_equals_an_undisturbed_run(tmp_path, victim):
    before = list_copies()
    train_with_deaths(tmp_path / "whole", 2, [], checkpoint=0)
    done = train_with_deaths(tmp_path / "parts", victim, [0, 1], "--on-death=continue", checkpoint=0)
    assert "death 1 of at most 100: from " in done.stderr and "death 2 of at most 100: from the copy " in done.stderr
    whole, parts = tmp_path / "whole" / "run", tmp_path / "parts" / "run"
    noted = json.loads((parts / "run.json").read_text())
    assert noted["status"] == 0 and noted["deaths"] == 2 and "restarts" not in noted
    assert not list(parts.glob("failure*")) and not (parts / "checkpoints").exists()
    with np.load(whole / "params.npz") as expected, np.load(parts / "params.npz") as found:
        assert all(np.array_equal(expected[name], found[name]) for name in expected)
    expected, found = (lines(folder, "reports") for folder in (whole, parts))
    for name in ("epoch", "loss", "validation", "steps"):
        assert [report[name] for report in found] == [report[name] for report in expected]
    deaths = [death for report in found for death in report.get("deaths", [])]
    assert deaths == json.loads((parts / "deaths.json").read_text())
    assert [death["rank"] for death in deaths] == [victim] * 2
    assert all("was killed by SIGKILL" in death["cause"] and death["seconds"] > 0 for death in deaths)
    assert [len(report.get("deaths", [])) for report in found] == [1, 1, 0]
    assert 9 <= deaths[1]["step"] < 12  # the death is in the third step of the second epoch
    for rank in range(2):
        records = lines(parts, f"rank-{rank}")
        assert records[-1]["step"] == 27 and sum(record["rows"] for record in records) == 270
    assert f"rank {victim} was killed by SIGKILL" in (parts / "rank-0.log").read_text()
    assert list_copies() == before


@pytest.mark.faults
@pytest.mark.parametrize("rule", ["EASGD", "GoSGD", "Swap"])
def test_on_death_continue_under_other_rules(tmp_path, rule):
    train_with_deaths(tmp_path, 1, [1], "--on-death=continue", checkpoint=0, rule=rule)
    assert [report["epoch"] for report in lines(tmp_path / "run", "reports")] == [1, 2, 3]
    for rank in range(2):  # no row twice, none left out
        records = lines(tmp_path / "run", f"rank-{rank}")
        assert [record["step"] for record in records] == sorted({record["step"] for record in records})
        assert records[-1]["step"] == 27 and sum(record["rows"] for record in records) == 270


@pytest.mark.faults
def test_max_deaths_ends_a_run(tmp_path):
    done = train_with_deaths(tmp_path, 1, [0, 1, 2], "--on-death=continue", checkpoint=0, max_deaths=1, status=1)
    assert done.stderr.endswith("on_death = 'continue' goes on after max_deaths = 1 of them, and this is one more\n")
    assert "SIGKILL" in (tmp_path / "run" / "failure.txt").read_text()


#: Has some ranks fail to start in each recovery: those whose numbers are in the variable GONE.
BROKEN_DEVICES = """
import json, os, sys
if "synkhronos.launch.master" in sys.orig_argv:
    from synkhronos.launch import class_loop
    start_rank = class_loop.start_rank
    recovers = json.loads(sys.orig_argv[-1])["recovers"]
    def start_or_fail(worker, consoles, masks, devices, by_host):
        if recovers and worker.size > int(os.environ["WORKING"]) and worker.number == int(os.environ["GONE"]):
            raise OSError(f"{devices[worker.number]} has fallen off the bus")
        return start_rank(worker, consoles, masks, devices, by_host)
    class_loop.start_rank = start_or_fail
"""


def train_with_a_broken_device(folder, n_working, gone, **arguments):
    """Train on three ranks, of which one dies, and some device can't be used any more."""
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
    words = f"rank {gone} can't start on cpu, which is left out: the run goes on with cpu, cpu\n"
    assert done.stderr.count(words) == 1
    run = tmp_path / "a" / "run"
    assert [report["epoch"] for report in lines(run, "reports")] == [1, 2, 3]
    assert [report["batch"].split()[0] for report in lines(run, "reports")] == ["3", "2", "2"]
    deaths = json.loads((run / "deaths.json").read_text())
    assert [death["rank"] for death in deaths] == [1, gone, gone]
    assert deaths[1]["cause"].startswith("could not start: ") and "fallen off the bus" in deaths[1]["cause"]
    last = [sum(line["rows"] for line in lines(run, f"rank-{r}") if line["epoch"] == 2) for r in range(2)]
    assert last == [90, 90]  # each rank of the class has as many rows


@pytest.mark.faults
def test_on_death_continue_without_a_device_left(tmp_path):
    done = train_with_a_broken_device(tmp_path / "a", 0, 0, status=1)
    assert done.stderr.count("which is left out") == 2
    assert done.stderr.endswith("rank 0 can't start on cpu: on_death = 'continue' has no device left\n")
    assert "fallen off the bus" in (tmp_path / "a" / "run" / "failure.txt").read_text()


@pytest.mark.faults
def test_on_death_continue_ends_at_an_exception(tmp_path):
    arguments = "--on-death=continue", "--restarts=1"
    done = train_with_deaths(tmp_path, 1, [0, 1], *arguments, status=1, config__raising="true")
    assert done.stderr.count("restart 1 of 1 from the beginning") == 1 and "death" not in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: epoch 1 is damaged")


@pytest.mark.faults
def test_signal_ends_a_run_with_on_death_continue(tmp_path):
    """Ranks at their own pace end together at a copy: one that ended alone would miss it."""
    pytest.importorskip("safetensors")
    with start_checkpointed_run(tmp_path, False, checkpoint=1, rule="EASGD", on_death="continue") as process:
        wait_until_training(tmp_path, process)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=LIMIT)
        assert process.returncode == 143 and "--resume goes on from" in said


@pytest.mark.faults
def test_signal_during_a_recovery_keeps_the_copy(tmp_path):
    """The new ranks have written no checkpoint yet: the copy in memory is all that there is."""
    pytest.importorskip("safetensors")
    before = list_copies()
    with start_checkpointed_run(tmp_path, False, checkpoint=500, on_death="continue") as process:
        pids = wait_until_training(tmp_path, process)
        deadline = time.monotonic() + LIMIT
        while not any(list_checkpoints(folder) for folder in list_copies() - before):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(pids[2], signal.SIGKILL)
        for line in process.stderr:
            if line.startswith("death 1 "):
                break
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=LIMIT)
        assert process.returncode == 143 and "--resume goes on from" in said
        assert len(list((tmp_path / "checkpoints").iterdir())) == 1 and list_copies() == before


def test_folders_of_copies_that_killed_runs_left_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(copies, "_SHM", tmp_path)
    (tmp_path / f"synkhronos-copy-{os.getuid()}-left").mkdir()
    folders = [copies.CopyFolder()]  # the other may be locked in a moment
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(copies, "_ABANDONED", -1)
    folders.append(copies.CopyFolder())
    assert sorted(tmp_path.iterdir()) == sorted(folder.path for folder in folders)
    for folder in folders:
        folder.remove()
    assert not list(tmp_path.iterdir())


def test_copies_are_rarer_where_they_take_long(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(copies.time, "monotonic", lambda: now[0])
    state = SimpleNamespace(worker=SimpleNamespace(broadcast=lambda number: number))
    schedule = copies.RankCopies("folder", state)
    batch, dues = 0, []
    for _ in range(12):
        dues.append(schedule.due)
        now[0] += (schedule.due - batch) * 0.01  # seconds of the batches
        batch, began = schedule.due, now[0]
        now[0] += 0.5
        schedule._adapt(began, batch)
    assert dues[:4] == [1, 3, 7, 15] and dues[-1] - dues[-2] == 500  # ten times as long as a copy


def test_nan_cost_is_not_saved(tmp_path):
    done = train(tmp_path, "Diverges", status=1, checkpoint=1)
    assert done.stderr.rstrip().endswith("FloatingPointError: the cost is nan in epoch 1: nothing of it was saved")
    assert not (tmp_path / "params.npz").exists() and not (tmp_path / "checkpoints").exists()


def test_full_disk_still_reports_failure_and_status(tmp_path, capfd):
    settings = Settings("module", "Class", ".", ("cpu",), folder=str(tmp_path))
    with supervisor.prepare(settings, ["command"]):
        (tmp_path / "failure.txt").symlink_to("/dev/full")
        run = supervisor.Supervisor(settings)
        run._master = SimpleNamespace(pid=1234, wait=lambda: -9)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:  # no file can grow
            resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "run.json").stat().st_size, before[1]))
            end = run._end()
            run._record(end)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "rank 0 (process 1234) was killed by SIGKILL" in capfd.readouterr().err
    noted = json.loads((tmp_path / "run.json").read_text())
    assert noted["status"] == 137 and noted["ended"] >= noted["began"] and noted["command"] == ["command"]


#: Begins a program with its standard output as it is given.
OUTPUT = {"closed": 'exec "$@" >&-', "all closed": 'exec "$@" <&- >&- 2>&-', "full": 'exec "$@" >/dev/full 2>&1'}


@pytest.mark.parametrize("console", [*OUTPUT, "of another encoding"])
@pytest.mark.slow
def test_broken_console_does_not_stop_a_run(tmp_path, console):
    sets = ["--set", "model='launch_models/others.py:Speaks'", "--set=epochs=1", "--set=every=9"]
    words = command("train", "--devices=cpu", "--folder", tmp_path / "run", *sets)
    if console in OUTPUT:
        words = ["sh", "-c", OUTPUT[console], "sh", *words]
    done = subprocess.run(
        words, cwd=SUPPORT, env=ENVIRONMENT | {"PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == 0
    assert "größer → \\udcff\n" in (tmp_path / "run" / "rank-0.log").read_text("utf-8")
    assert (tmp_path / "run" / "params.npz").exists()
    if console not in OUTPUT:
        assert rb"[rank 0] gr\xf6\xdfer \u2192 \udcff" in done.stdout


@pytest.mark.parametrize("console", ["all closed", "full"])
@pytest.mark.slow
def test_broken_console_does_not_stop_a_script(tmp_path, console):
    settings = {"modelfile": "launch_models.others", "modelclass": "Speaks", "devices": "cpu", "epochs": 1}
    code = f"from synkhronos.rules import BSP; r = BSP(); print(3); r.init(**{settings | {'folder': str(tmp_path)}!r}); r.wait()"
    words = ["sh", "-c", OUTPUT[console], "sh", sys.executable, "-c", f"{code}; import os; os._exit(5)"]
    done = subprocess.run(words, cwd=SUPPORT, env=ENVIRONMENT | {"PYTHONUNBUFFERED": ""}, timeout=LIMIT)
    assert done.returncode == 5  # without a flush of what was printed
    assert json.loads((tmp_path / "run.json").read_text())["status"] == 0
    assert (tmp_path / "rank-0.log").read_text("utf-8").startswith("process ")


class Fake(supervisor.Supervisor):
    """A supervisor of a shell command in the place of ranks."""

    def __init__(self, folder, script, **settings):
        super().__init__(Settings("module", "Class", ".", ("cpu",), folder=str(folder), **settings))
        self.script = script
        supervisor.prepare(self.settings, []).close()

    def _start(self, consoles):
        # Signals come when the supervisor knows whom to pass them on to.
        script = f"until [ -e {self.folder}/started ]; do sleep 0.01; done; {self.script}"
        self._master = subprocess.Popen(["sh", "-c", script], stdout=consoles[0], start_new_session=True)
        (self.folder / "started").touch()

    def noted(self):
        return json.loads((self.folder / "run.json").read_text())


def test_full_disk_log_does_not_stop_a_run(tmp_path, capfd):
    run = Fake(tmp_path, "echo one; echo two; exit 3")
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    assert run.run() == 3
    said = capfd.readouterr()
    assert said.out == "[rank 0] one\n[rank 0] two\n"
    assert said.err.count("rank-0.log lacks lines: [Errno 28] No space left on device") == 1
    assert run.noted()["status"] == 3


def test_full_disk_log_loses_only_its_torn_line(tmp_path, capfd):
    console = output.Console(1, bool)
    logs = output.RunOutput(tmp_path, False, console, output.Console(2, bool))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (7, before[1]))
        for line in ("one", "two", "three"):
            logs.write("rank-0.log", line)
            logs.write("rank-1.jsonl", line)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for name in ("rank-0.log", "rank-1.jsonl"):
        logs.write(name, "four")
        assert (tmp_path / name).read_text() == "one\ntwo\nfour\n"
    logs.close()


def test_supervisor_error_is_recorded(tmp_path, monkeypatch):
    run = Fake(tmp_path, "sleep 60")
    monkeypatch.setattr(run, "_read", lambda pipes: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.run()
    noted = run.noted()
    assert noted["status"] == 1 and noted["error"].startswith("ZeroDivisionError") and "ended" in noted


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_run_status_is_always_recorded(tmp_path, number):
    run = Fake(tmp_path, f"kill -{int(number)} {os.getpid()}; sleep 60")
    assert run.run() == 128 + number
    noted = run.noted()
    assert (noted["status"], noted["signal"], noted["checkpoint"]) == (128 + number, number.name, None)
    assert noted["ended"] and signal.getsignal(number) == signal.SIG_DFL


def test_ignored_signal_stays_ignored(tmp_path):
    run = Fake(tmp_path, f"kill -HUP {os.getpid()}; exit 3")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert run.run() == 3 and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


#: Passes a signal on to the supervisor twice, as a scheduler's that is sent to all, and ends as a master does behind it.
SAVES = """
trap 'mkdir -p {folder}/checkpoints/rows-000000000007; exit 143' TERM
kill -TERM {pid}; kill -TERM {pid}
for i in $(seq 600); do sleep 0.1; done
"""


def test_signal_lets_ranks_write_a_checkpoint(tmp_path, capfd):
    run = Fake(tmp_path, SAVES.format(folder=tmp_path, pid=os.getpid()), checkpoint=1)
    assert run.run() == 143
    noted, path = run.noted(), str(tmp_path / "checkpoints" / "rows-000000000007")
    assert (noted["status"], noted["signal"], noted["checkpoint"]) == (143, "SIGTERM", path)
    assert f"the run was ended by SIGTERM; --resume goes on from {path}" in capfd.readouterr().err


def test_signal_ends_slow_ranks_after_the_grace_period(tmp_path, capfd):
    run = Fake(tmp_path, f"trap '' TERM; kill -TERM {os.getpid()}; sleep 60", checkpoint=1, grace=0.3)
    began = time.monotonic()
    assert run.run() == 143
    assert 0.3 < time.monotonic() - began < 30
    assert run.noted()["checkpoint"] is None
    assert "ended by SIGTERM, before it had written a checkpoint" in capfd.readouterr().err


def test_signal_after_the_end_keeps_the_exit_status(tmp_path):
    run = Fake(tmp_path, f"trap 'exit 0' TERM; kill -TERM {os.getpid()}; sleep 60 & wait", checkpoint=1)
    assert run.run() == 0 and "signal" not in run.noted()


def test_signal_ends_a_run_with_an_unread_console(tmp_path):
    reading, writing = os.pipe()
    try:
        os.set_blocking(writing, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, b"x" * 4096)
        os.set_blocking(writing, True)
        run = Fake(tmp_path, f"echo one; kill -TERM {os.getpid()}; sleep 60")
        run._console._fd = writing
        assert run.run() == 143
        assert run.noted()["status"] == 143
    finally:
        os.close(reading)
        os.close(writing)


def test_other_hosts_may_print_anything():
    mark = output._MARK
    assert output.split_name(f"{mark}rank-3.log{mark}a {mark}b") == ("rank-3.log", f"a {mark}b")
    for line in ("plain", mark, f"{mark}rank-1.log", f"{mark}../../rank-1.log{mark}text", ""):
        assert output.split_name(line) == ("", line)


def test_console_copies_long_lines_in_linear_time():
    taken, piece = [], b"x" * (1 << 16)
    lines = output.LineSplitter("rank-0.log", SimpleNamespace(write=lambda name, text: taken.append(len(text))))

    def seconds(end, pieces):
        began = time.perf_counter()
        for _ in range(pieces):
            lines.feed(piece + end)
        return time.perf_counter() - began

    with_newlines = min(seconds(b"\n", 64) for _ in range(3))
    taken.clear()
    assert seconds(b"", 640) < 0.5 + 40 * with_newlines  # quadratically it would be ten times as much
    lines.feed(b"")
    assert sum(taken) == 640 << 16 and max(taken) <= (1 << 20) + (1 << 16)  # and bounded in memory


def test_console_keeps_multibyte_characters():
    taken = []
    lines = output.LineSplitter("", SimpleNamespace(write=lambda name, text: taken.append(text)))
    for byte in "größer → 日本\n".encode() + b"\xff\n":
        assert lines.feed(bytes([byte]))
    assert not lines.feed(b"")
    assert taken == ["größer → 日本", "\\xff"]


@pytest.mark.faults
def test_repeated_interrupts_while_ranks_end(tmp_path, monkeypatch):
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
def test_interrupt_before_ranks_start(tmp_path, monkeypatch):
    (tmp_path / "run.json").write_text("{}")
    run = supervisor.Supervisor(Settings("module", "Class", ".", ("cpu",), folder=str(tmp_path)))

    def start(consoles):
        signal.raise_signal(signal.SIGINT)
        run._master = subprocess.Popen(["sleep", "60"], stdout=consoles[0], start_new_session=True)

    monkeypatch.setattr(run, "_start", start)
    began = time.monotonic()
    assert run.run() == 128 + signal.SIGINT
    assert time.monotonic() - began < LIMIT


def list_process_tree(pid):
    found = [pid]
    for child in children_of(pid):
        found += list_process_tree(child)
    return found


def wait_until_training(folder, process):
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
def test_kill_of_any_process_leaves_nothing(tmp_path, who, script):
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
        words, cwd=SUPPORT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        first, *ranks = wait_until_training(folder, process)
        everyone = list_process_tree(process.pid)
        assert set(ranks) < set(everyone) and len(everyone) == (4 if script else 3)
        supervisor = children_of(process.pid)[0] if script else process.pid
        victim = {"script": first, "supervisor": supervisor, "rank 0": ranks[0], "rank 1": ranks[1]}.get(who, first)
        os.kill(victim, {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM}.get(who, signal.SIGKILL))
        began = time.monotonic()
        _, said = process.communicate(timeout=LIMIT)
        assert process.returncode != 0
        assert time.monotonic() - began < LIMIT
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


@contextlib.contextmanager
def start_checkpointed_run(tmp_path, script, name="Slow", **settings):
    """Start a run that writes checkpoints; kill its supervisor, if that still runs, at the end of the block."""
    settings = {"modelfile": "launch_models.others", "modelclass": name, "every": 1, "epochs": 1000, **settings}
    if script:
        settings = {**settings, "devices": ["cpu", "cpu"], "folder": str(tmp_path)}
        words = [sys.executable, "-c", f"from synkhronos.rules import BSP\nr = BSP()\nr.init(**{settings!r})\nr.wait()"]
    else:
        sets = [f"--set={name}={value}" for name, value in settings.items()]
        words = command("train", "--devices=cpu,cpu", "--folder", tmp_path, *sets)
    process = subprocess.Popen(
        words, cwd=SUPPORT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.faults
@pytest.mark.parametrize("script", [False, True])
def test_signal_to_all_processes_of_a_run(tmp_path, script):
    pytest.importorskip("safetensors")
    with start_checkpointed_run(tmp_path, script, checkpoint=1) as process:
        wait_until_training(tmp_path, process)
        everyone = list_process_tree(process.pid)
        for pid in reversed(everyone):  # the ranks first
            os.kill(pid, signal.SIGUSR1)
        _, said = process.communicate(timeout=LIMIT)
        assert process.returncode == (-signal.SIGUSR1 if script else 128 + signal.SIGUSR1), said
        noted = json.loads((tmp_path / "run.json").read_text())
        assert noted["status"] == 128 + signal.SIGUSR1 and noted["signal"] == "SIGUSR1"
        assert (Path(noted["checkpoint"]) / "meta.json").exists()
        deadline = time.monotonic() + LIMIT
        while any(lives(pid) for pid in everyone):
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.faults
def test_second_signal_ends_a_run_at_once(tmp_path):
    pytest.importorskip("safetensors")
    with start_checkpointed_run(tmp_path, False, "Stuck", checkpoint=1, grace=600) as process:
        wait_until_training(tmp_path, process)
        while any(len((tmp_path / f"rank-{r}.jsonl").read_text().splitlines()) < 3 for r in range(2)):
            time.sleep(0.05)
        time.sleep(0.5)  # both are in the fourth step, which has no end
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(supervisor.ECHO + 0.5)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=LIMIT)
        assert process.returncode == 143 and "before it had written a checkpoint" in said
