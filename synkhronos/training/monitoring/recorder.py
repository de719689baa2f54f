"""Records of a training run: dicts of numbers, as lines of JSON in a folder or as events for TensorBoard.

A recorder is any object with ``write(record)``, which takes a dict.  `Recorder` writes a file per rank, so that ranks
need not wait for each other::

    folder/
        rank-0.jsonl      lines of rank 0, one per `every` of its steps
        rank-1.jsonl
        reports.jsonl     a line per report, written by the master

A process may be killed in the middle of a line.  For this reason, each line is appended by one write to a file opened
for it.  A writer ends an incomplete line before its own, and readers skip lines that are not JSON.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from synkhronos.checks import check_at_least, import_package

#: Name of a rank's file in a recorder's folder, to be formatted with the rank.
RANK_FILE_TEMPLATE = "rank-{}.jsonl"
#: Name of the file of reports.
REPORT_FILE = "reports.jsonl"


class Recorder:
    """Recorder that appends lines of JSON to files in a folder.

    During training each rank writes its own file: epoch, step, rows, loss, learning rate, rows per second, and the
    seconds since its last line by activity.  The master writes the reports of `Trainer.epochs` to ``reports.jsonl``.
    In both, ``epoch`` is the number of complete epochs: 0 in the lines of the first epoch, 1 in the report at its end.
    When a run is resumed from a checkpoint, later lines are removed.

    Parameters
    ----------
    folder : path
        Created if it does not exist.
    every : int
        Number of a rank's steps between two lines.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> recorder = Recorder(folder)
    >>> recorder.write({"epoch": 1, "loss": 0.5})
    >>> [line["loss"] for line in read_records(folder)["reports"]]
    [0.5]
    """

    def __init__(self, folder: str | os.PathLike[str], every: int = 40):
        self.folder, self.every = Path(folder).absolute(), check_at_least(every, "every", 1, "a number of steps")
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record to the master's file of reports."""
        self._append(REPORT_FILE, record)

    def write_rank_record(self, rank: int, record: Mapping[str, Any]) -> None:
        """Append a record to the file of a rank."""
        self._append(RANK_FILE_TEMPLATE.format(rank), record)

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        # The file is opened for each line: lines are few, and `filter_lines` may replace the file.
        with open(self.folder / name, "ab+", buffering=0) as file:
            append_line(file, format_record(record))

    def truncate(self, n_rows_seen: int) -> None:
        """Remove all lines after ``n_rows_seen`` rows, where training resumes, and all lines without ``seen``."""
        for path in [self.folder / REPORT_FILE, *self.folder.glob(RANK_FILE_TEMPLATE.format("*"))]:
            if path.exists():
                filter_lines(path, lambda record: record.get("seen", math.inf) <= n_rows_seen)


def append_line(file: IO[bytes], line: str) -> None:
    """Append a line to an unbuffered file by one write.  First end a line that a kill or a full disk has cut."""
    data = f"{line}\n".encode(errors="backslashreplace")
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            data = b"\n" + data
    if file.write(data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def filter_lines(path: Path, is_kept: Callable[[dict[str, Any]], bool]) -> None:
    """Remove lines, except those for whose record ``is_kept`` is true, by an atomic replacement of the file."""
    lines = [line for line in path.read_text().splitlines() if is_kept(_parse_line(line))]
    temporary = path.with_suffix(".cut")
    temporary.write_text("".join(line + "\n" for line in lines))
    os.replace(temporary, path)


def format_record(record: Mapping[str, Any]) -> str:
    """Return a record as a line of JSON, with the present time as ``time``, in seconds since 1970."""
    return json.dumps({"time": round(time.time(), 3), **_to_json_values(record)})


class TensorBoard:
    """Recorder that writes the numbers of records as events for TensorBoard.  It needs the package tensorboardX.

    Parameters
    ----------
    folder : path
        Created if it does not exist.

    Raises
    ------
    ImportError
        If tensorboardX is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        import_package("tensorboardX", "TensorBoard needs tensorboardX", "tensorboard")
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto import event_pb2

        self._scalar, self._proto = summary.scalar, event_pb2
        os.makedirs(folder, exist_ok=True)
        # A SummaryWriter would write later, from a thread, so a killed process would lose events.
        self._file = event_file_writer.EventsWriter(os.path.join(folder, "events"))

    def truncate(self, n_rows_seen: int) -> None:
        """Make TensorBoard drop all events after ``n_rows_seen`` rows, where training resumes."""
        log = self._proto.SessionLog
        self._file.write_event(self._proto.Event(step=n_rows_seen, session_log=log(status=log.START)))

    def write(self, record: Mapping[str, Any]) -> None:
        """Write an event for each number of a record; the step is the number of rows seen so far."""
        step = int(record.get("seen", 0))
        for name, value in _flatten(_to_json_values(record)):
            event = self._proto.Event(wall_time=time.time(), step=step, summary=self._scalar(name, value))
            self._file.write_event(event)
        self._file.flush()


def read_records(folder: str | os.PathLike[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the complete records in a recorder's folder by file: ``rank-0`` and so on, and ``reports``."""
    folder = Path(folder)
    paths = sorted(folder.glob(RANK_FILE_TEMPLATE.format("*"))) + [folder / REPORT_FILE]
    files = {path.stem: path for path in paths if path.exists()}
    if not files:
        raise FileNotFoundError(f"{folder}: expected a recorder's folder, with {REPORT_FILE} or rank-0.jsonl in it")
    return {
        name: [record for line in path.read_text().splitlines() if (record := _parse_line(line))]
        for name, path in files.items()
    }


def _parse_line(line: str) -> dict[str, Any]:
    """Return the record of a line, or an empty one if the line is not a JSON object."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _to_json_values(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record that JSON can represent: scalar arrays become floats, and NaN and infinity become None."""
    plain: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            plain[name] = _to_json_values(value)
        elif isinstance(value, str | bool | int | list) or value is None:
            plain[name] = value
        else:
            number = float(value)
            plain[name] = number if math.isfinite(number) else None
    return plain


def _flatten(record: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """Return the names and values of a record's numbers.  Names in nested records are joined by ``/``."""
    pairs = []
    for name, value in record.items():
        if isinstance(value, Mapping):
            pairs += _flatten(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            pairs.append((prefix + name, float(value)))
    return pairs
