"""What is written down while a network learns.

`Recorder`
    Lines of JSON in a folder, a file for each rank.
`TensorBoard`
    The same numbers for TensorBoard.
`read`
    The lines of a folder.

A recorder is anything with ``write(record)``, which takes a dict.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from synkhronos.checks import check_at_least, import_package

#: Of what a rank writes down.
RANK_FILE, REPORT_FILE = "rank-{}.jsonl", "reports.jsonl"


class Recorder:
    """Appends records to files as lines of JSON.

    Each rank writes a file of its own, ``rank-0.jsonl`` and so on, while it trains: epoch, step, rows, loss, learning
    rate, rows a second, and seconds since its last line in computing, exchanging, waiting for others, and loading rows.
    The master writes ``reports.jsonl``: what `Trainer.epochs` returns.  When training goes on from a checkpoint, lines
    behind it are cut off.

    Parameters
    ----------
    folder : path
        Made if it is not there.
    every : int
        The number of a rank's steps between two lines.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> recorder = Recorder(folder)
    >>> recorder.write({"epoch": 1, "loss": 0.5})
    >>> [line["loss"] for line in read(folder)["reports"]]
    [0.5]
    """

    def __init__(self, folder: str | os.PathLike[str], every: int = 40):
        self.folder, self.every = Path(folder), check_at_least(every, "every", 1, "a number of steps")
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a record of the master's."""
        self._append(REPORT_FILE, record)

    def write_rank(self, rank: int, record: Mapping[str, Any]) -> None:
        """Write a rank's record."""
        self._append(RANK_FILE.format(rank), record)

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        line = line_of(record)
        # Opened anew each time, for a line every so many steps: no rank has a file open when it is ended.
        with open(self.folder / name, "ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # half a line, of a process that was killed: it would take this one along
                    line = "\n" + line
            file.write(f"{line}\n".encode())

    def cut(self, seen: int) -> None:
        """Leave out all lines of more rows than these: training goes on from there."""
        for path in [self.folder / REPORT_FILE, *self.folder.glob(RANK_FILE.format("*"))]:
            if path.exists():
                cut(path, lambda record: record.get("seen", math.inf) <= seen)


def cut(path: Path, stays: Callable[[dict[str, Any]], bool]) -> None:
    """Leave the lines in a file whose records stay; a line that was cut short is an empty record."""
    lines = [line for line in path.read_text().splitlines() if stays(_parsed(line))]
    beside = path.with_suffix(".cut")
    beside.write_text("".join(line + "\n" for line in lines))
    os.replace(beside, path)


def line_of(record: Mapping[str, Any]) -> str:
    """Return a record as a line of JSON, with the time."""
    return json.dumps({"time": round(time.time(), 3), **_plain(record)})


class TensorBoard:
    """Writes the numbers of records for TensorBoard; needs the package tensorboardX.

    Parameters
    ----------
    folder : path
    purge : int, optional
        The number of rows from which on older numbers are dropped, when training goes on from a checkpoint.
    """

    def __init__(self, folder: str | os.PathLike[str], purge: int | None = None):
        import_package("tensorboardX", "TensorBoard needs tensorboardX", "tensorboard")
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto import event_pb2

        self._scalar, self._proto = summary.scalar, event_pb2
        os.makedirs(folder, exist_ok=True)
        # Not a SummaryWriter, by whose thread numbers come to the file at some time later, or not at all.
        self._file = event_file_writer.EventsWriter(os.path.join(folder, "events"))
        if purge is not None:
            log = event_pb2.SessionLog
            self._file.write_event(event_pb2.Event(step=purge, session_log=log(status=log.START)))

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a record's numbers, at the rows seen so far."""
        step = int(record.get("seen", 0))
        for name, value in _flat(_plain(record)):
            event = self._proto.Event(wall_time=time.time(), step=step, summary=self._scalar(name, value))
            self._file.write_event(event)
        self._file.flush()


def read(folder: str | os.PathLike[str]) -> dict[str, list[dict[str, Any]]]:
    """Return a folder's records: ``reports``, and for each rank ``rank-0`` and so on.

    A last line that was cut short, because the process was killed, is left out.
    """
    folder = Path(folder)
    files = sorted(folder.glob(RANK_FILE.format("*"))) + [folder / REPORT_FILE]
    found = {path.stem: path for path in files if path.exists()}
    if not found:
        raise FileNotFoundError(f"{folder}: expected a recorder's folder, with {REPORT_FILE} or rank-0.jsonl in it")
    return {
        name: [record for line in path.read_text().splitlines() if (record := _parsed(line))]
        for name, path in found.items()
    }


def _parsed(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with Python's numbers: arrays of none dimensions become floats; what JSON can't say, None."""
    plain: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            plain[name] = _plain(value)
        elif isinstance(value, str | bool | int | list) or value is None:
            plain[name] = value
        else:
            number = float(value)
            plain[name] = number if math.isfinite(number) else None
    return plain


def _flat(record: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    pairs = []
    for name, value in record.items():
        if isinstance(value, Mapping):
            pairs += _flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            pairs.append((prefix + name, float(value)))
    return pairs
