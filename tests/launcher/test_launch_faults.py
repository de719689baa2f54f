"""Failed runs print the first failure last, return a nonzero status, and leave no process and no memory."""

import json
import re
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest
from launch_interrupts import LIMIT, ShellSupervisor
from launch_runs import ENVIRONMENT, make_synkhronos_command, train
from paths import SUPPORT

from synkhronos.launcher.configuration.settings import Settings
from synkhronos.launcher.supervision import rank_output, run_folder, supervisor

pytestmark = pytest.mark.starts_programs


def test_first_failure_is_printed_last(tmp_path):
    done = train(tmp_path, "FailingMLP", status=1)
    lines = done.stderr.rstrip().splitlines()
    assert lines[-1] == "ValueError: the third batch is damaged" and lines[0] == "rank 1:"
    assert "mlp_variants.py" in done.stderr and "train_iter" in done.stderr
    assert (tmp_path / "failure.txt").read_text().strip() == done.stderr.strip()
    assert json.loads((tmp_path / "run.json").read_text())["status"] == 1


@pytest.mark.parametrize(("model", "rank", "code"), [("ExitingMLP", 1, 7), ("ExitingWithoutErrorMLP", 0, 0)])
def test_rank_that_exits_by_itself_is_named(tmp_path, model, rank, code):
    done = train(tmp_path, model, status=1)
    assert re.search(f"rank {rank} .* exited with code {code}", done.stderr)


def test_nan_cost_is_not_saved(tmp_path):
    done = train(tmp_path, "DivergingMLP", status=1, checkpoint=1)
    assert done.stderr.rstrip().endswith("FloatingPointError: the cost is nan in epoch 1: nothing of it was saved")
    assert not (tmp_path / "params.npz").exists() and not (tmp_path / "checkpoints").exists()


def test_full_disk_still_reports_failure_and_status(tmp_path, capfd):
    settings = Settings("module", "Class", ".", ("cpu",), folder=str(tmp_path))
    with run_folder.create_and_lock_run_folder(settings, ["command"]):
        (tmp_path / "failure.txt").symlink_to("/dev/full")
        run = supervisor.Supervisor(settings)
        run._master = SimpleNamespace(pid=1234, wait=lambda: -9)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:  # writes to files fail
            resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "run.json").stat().st_size, before[1]))
            end = run._report_master_exit(-9)
            run._record_exit(end)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "rank 0 (process 1234) was killed by SIGKILL" in capfd.readouterr().err
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["status"] == 137 and record["ended"] >= record["began"] and record["command"] == ["command"]


#: Starts a program whose standard output is set up by `console`.
OUTPUT = {"closed": 'exec "$@" >&-', "all closed": 'exec "$@" <&- >&- 2>&-', "full": 'exec "$@" >/dev/full 2>&1'}


@pytest.mark.parametrize("console", [*OUTPUT, "of another encoding"])
@pytest.mark.slow
def test_broken_console_does_not_stop_a_run(tmp_path, console):
    sets = ["--set", "model='launch_models/mlp_variants.py:UnicodePrintingMLP'", "--set=epochs=1", "--set=every=9"]
    words = make_synkhronos_command("train", "--devices=cpu", "--folder", tmp_path / "run", *sets)
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
    settings = {
        "modelfile": "launch_models.mlp_variants",
        "modelclass": "UnicodePrintingMLP",
        "devices": "cpu",
        "epochs": 1,
        "folder": str(tmp_path),
    }
    code = "from synkhronos.exchange_rules import BSP; from synkhronos.launcher import start_run; print(3); "
    code += f"start_run(BSP(), **{settings!r}).wait()"
    words = ["sh", "-c", OUTPUT[console], "sh", sys.executable, "-c", f"{code}; import os; os._exit(5)"]
    done = subprocess.run(words, cwd=SUPPORT, env=ENVIRONMENT | {"PYTHONUNBUFFERED": ""}, timeout=LIMIT)
    assert done.returncode == 5  # without flushing its output
    assert json.loads((tmp_path / "run.json").read_text())["status"] == 0
    assert (tmp_path / "rank-0.log").read_text("utf-8").startswith("process ")


def test_full_disk_log_does_not_stop_a_run(tmp_path, capfd):
    run = ShellSupervisor(tmp_path, "echo one; echo two; exit 3")
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    assert run.run() == 3
    captured = capfd.readouterr()
    assert captured.out == "[rank 0] one\n[rank 0] two\n"
    assert captured.err.count("rank-0.log lacks lines: [Errno 28] No space left on device") == 1
    assert run.read_record()["status"] == 3


def test_full_disk_log_loses_only_its_torn_line(tmp_path, capfd):
    console = rank_output.Console(1, bool)
    logs = rank_output.OutputWriter(tmp_path, False, console, rank_output.Console(2, bool))
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


def test_dangling_link_to_a_checkpoint_does_not_stop_a_run(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "rows-000000000009").symlink_to("removed")
    assert ShellSupervisor(tmp_path, "exit 3").run() == 3


def test_supervisor_error_is_recorded(tmp_path, monkeypatch):
    run = ShellSupervisor(tmp_path, "sleep 60")
    monkeypatch.setattr(run, "_supervise_until_exit", lambda pipes: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.run()
    record = run.read_record()
    assert record["status"] == 1 and record["error"].startswith("ZeroDivisionError") and "ended" in record


def test_other_hosts_may_print_anything():
    mark = rank_output.FILE_NAME_MARK
    assert rank_output.split_file_name(f"{mark}rank-3.log{mark}a {mark}b") == ("rank-3.log", f"a {mark}b")
    for line in ("plain", mark, f"{mark}rank-1.log", f"{mark}../../rank-1.log{mark}text", ""):
        assert rank_output.split_file_name(line) == ("", line)


def test_console_splits_long_lines():
    sizes = []
    lines = rank_output.LineSplitter("rank-0.log", SimpleNamespace(write=lambda name, text: sizes.append(len(text))))
    for _ in range(64):
        lines.feed(b"x" * (1 << 16))
    lines.feed(b"")
    assert sum(sizes) == 64 << 16 and max(sizes) <= (1 << 20) + (1 << 16)  # memory is bounded


def test_console_keeps_multibyte_characters():
    chunks = []
    lines = rank_output.LineSplitter("", SimpleNamespace(write=lambda name, text: chunks.append(text)))
    for byte in "größer → 日本\n".encode() + b"\xff\n":
        assert lines.feed(bytes([byte]))
    assert not lines.feed(b"")
    assert chunks == ["größer → 日本", "\\xff"]
