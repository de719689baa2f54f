"""Recorders' files and plots."""

import csv
import itertools
import math
import subprocess
import sys

import numpy as np
import pytest

from synkhronos.training import CheckpointFolder, Recorder, TensorBoard
from synkhronos.training.monitoring import show_command
from synkhronos.training.monitoring.recorder import read_records


def write_records(folder, n=4):
    recorder = Recorder(folder)
    for i in range(1, n + 1):
        for rank in range(2):
            recorder.write_rank_record(
                rank, {"epoch": 0, "step": i, "seen": 10 * i, "rows": 5, "loss": np.float32(1 / i)}
            )
        recorder.write(
            {
                "epoch": i / n,
                "seen": 10 * i,
                "loss": 1 / i,
                "validation": {"error": 0.5},
                "rows_per_second": 100.0 * i,
                "batch": "2 x 5 = 10",
                "seconds": {"compute": 1.0},
            }
        )
    return recorder


def test_recorder_appends_and_truncates_lines(tmp_path):
    write_records(tmp_path)
    recorder = write_records(tmp_path)
    files = read_records(tmp_path)
    assert sorted(files) == ["rank-0", "rank-1", "reports"]
    assert [line["seen"] for line in files["rank-1"]] == [10, 20, 30, 40] * 2
    with open(tmp_path / "reports.jsonl", "a") as file:
        file.write('{"time": 3, "se')  # killed in the middle of a line
    assert len(read_records(tmp_path)["reports"]) == 8
    recorder.truncate(20)
    files = read_records(tmp_path)
    assert {name: [line["seen"] for line in lines] for name, lines in files.items()} == {
        "rank-0": [10, 20, 10, 20], "rank-1": [10, 20, 10, 20], "reports": [10, 20, 10, 20],
    }  # fmt: skip


def test_files_stay_where_they_are_when_the_working_directory_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder, checkpoints = write_records("records"), CheckpointFolder("checkpoints")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    recorder.write({"epoch": 2})
    checkpoints.save(10, {"w": np.ones(3)}, {})
    checkpoints.unlock()
    assert read_records(tmp_path / "records")["reports"][-1]["epoch"] == 2
    assert [path.parent for path in CheckpointFolder(tmp_path / "checkpoints").list_paths()] == [
        tmp_path / "checkpoints"
    ]


def test_recorder_loses_only_a_torn_line(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.write({"seen": 1})
    with open(tmp_path / "reports.jsonl", "a") as file:
        file.write('{"seen": 2, "lo')  # as after a kill
    for seen in (3, 4):
        recorder.write({"seen": seen})
    assert [line["seen"] for line in read_records(tmp_path)["reports"]] == [1, 3, 4]


def test_recorder_writes_nan_as_null(tmp_path):
    Recorder(tmp_path).write({"loss": math.nan, "validation": {"x": np.float64(math.inf)}, "seen": np.int64(3)})
    line = read_records(tmp_path)["reports"][0]
    assert (line["loss"], line["validation"]["x"], line["seen"]) == (None, None, 3)


def test_show_draws_runs_and_writes_a_table(tmp_path):
    pytest.importorskip("matplotlib")
    write_records(tmp_path / "one")
    write_records(tmp_path / "two", 3)
    command = [sys.executable, "-m", "synkhronos", "show", str(tmp_path / "one"), str(tmp_path / "two")]
    shown = subprocess.run(
        [*command, "--csv", str(tmp_path / "t.csv"), "--picture", str(tmp_path / "p.png")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert shown.returncode == 0, shown.stderr
    assert "4 reports, epoch 1, loss 0.25, validation error 0.5, 400 rows/s, batch 2 x 5 = 10" in shown.stdout
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with open(tmp_path / "t.csv") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 3 * 4 + 3 * 3
    assert {row["run"] for row in table} == {str(tmp_path / "one"), str(tmp_path / "two")}
    assert all(float(row["loss"]) > 0 and float(row["seconds"]) >= 0 for row in table)
    wrong = subprocess.run([*command[:4], str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert wrong.returncode == 2
    assert "expected a recorder's folder" in wrong.stderr


def test_show_prints_only_the_table(tmp_path, capfd):
    write_records(tmp_path)
    show_command.main([str(tmp_path), "--csv", "-"])
    shown = capfd.readouterr()
    assert len(list(csv.DictReader(shown.out.splitlines()))) == 3 * 4
    assert shown.out.startswith("run,file,time") and "4 reports" in shown.err


def test_show_reads_own_records(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for record in ({"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": None, "rows_per_second": math.inf}):
        Recorder(tmp_path).write(record)
    show_command.main([str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[0] == f"{tmp_path}: 2 reports, epoch 2, 0 rows/s, batch ?"
    assert (tmp_path / "show.png").exists()


def test_show_distinguishes_runs(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    monkeypatch.chdir(tmp_path)
    for name in ("a/logs", "b/logs", "."):
        write_records(tmp_path / name)
    show_command.main(["a/logs", "b/logs", "."])
    texts = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert texts == ["a/logs", "b/logs", "."]


def test_show_picture_has_no_overlaps(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    records = [
        {"time": i, "loss": 1 / i, "seen": 20_000 * i, "rows_per_second": 1e5 + i, "validation": {"error": 0.1 / i}}
        for i in range(1, 9)
    ]
    show_command.draw_picture({"run": {"reports": records}, "other": {"reports": records}}, tmp_path / "p.png")
    (figure,) = figures
    assert len({round(axis.get_position().x0, 1) for axis in figure.axes}) == 3  # more panels: further rows
    assert [axis.get_ylabel() for axis in figure.axes] == ["loss", "loss", "validation error", "rows per second"]
    legend = figure.legends[0].get_window_extent()
    assert not any(legend.overlaps(axis.get_window_extent()) for axis in figure.axes)
    for axis in figure.axes:
        left, right = sorted(axis.get_xlim())
        boxes = [
            label.get_window_extent()
            for label in axis.get_xticklabels()
            if left <= label.get_position()[0] <= right and label.get_text()
        ]
        assert len(boxes) > 1 and not any(box.x1 >= next_box.x0 for box, next_box in itertools.pairwise(boxes))


LOSSES = [
    ((0.6, 0.4), ["0.4", "0.45", "0.5", "0.55", "0.6"]),
    ((0.6, 0.05), ["0.05", "0.1", "0.2", "0.5"]),
    ((6.0, 0.02), ["0.02", "0.05", "0.1", "0.2", "0.5", "1", "2", "5"]),
    ((50.0, 0.002), ["0.01", "0.1", "1", "10"]),
]


@pytest.mark.parametrize(("losses", "labels"), LOSSES)
def test_show_labels_losses(tmp_path, monkeypatch, losses, labels):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    records = [{"time": i, "loss": loss, "seen": i, "rows_per_second": 1} for i, loss in enumerate(losses)]
    show_command.draw_picture({"run": {"reports": records}}, tmp_path / "p.png")
    axis = figures[0].axes[0].yaxis
    low, high = axis.get_view_interval()
    shown = {}
    for minor in (False, True):
        texts = [label.get_text() for label in axis.get_ticklabels(minor=minor)]
        shown.update(zip(axis.get_ticklocs(minor=minor), texts, strict=True))
    assert [shown[position] for position in sorted(shown) if low < position < high and shown[position]] == labels


def test_recorder_writes_tensorboard_files(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    record = {"loss": np.float32(0.5), "validation": {"error": 0.25}, "seen": 10, "rule": "BSP", "lr": np.array(0.125)}
    recorder = TensorBoard(tmp_path / "new")
    recorder.truncate(5)
    recorder.write(record)
    (file,) = (tmp_path / "new").iterdir()  # the file is flushed
    content, written = file.read_bytes(), {}
    while content:  # an event: 8 bytes of length, 4 of checksum, the data, 4 of checksum
        length = int.from_bytes(content[:8], "little")
        event = Event.FromString(content[12 : 12 + length])
        written.update({(value.tag, event.step): value.simple_value for value in event.summary.value})
        if event.HasField("session_log"):
            written["purged from"] = event.step
        content = content[16 + length :]
    numbers = {"loss": 0.5, "validation/error": 0.25, "seen": 10.0, "lr": 0.125}
    assert written == {"purged from": 5, **{(name, 10): value for name, value in numbers.items()}}
