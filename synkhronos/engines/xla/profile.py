"""Recording of XLA's operations on a rank, by JAX's profiler."""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from synkhronos.checks import import_package

#: Start of the name of events that contain the time of this process's clock, to align the profiler's clock with it.
_CLOCK_MARK = "synkhronos clock "


class ProfiledOperation(NamedTuple):
    """An operation of XLA.  Times are in nanoseconds of this process's monotonic clock."""

    name: str
    start_ns: int
    end_ns: int
    thread_name: str


class XlaProfile:
    """A recording of JAX's profiler, from `start` to `stop`."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> None:
        """Start the profiler.  Raise ImportError if JAX is not installed."""
        profiler = import_package("jax.profiler", "timeline(records_xla=True)", "jax")
        self._folder = tempfile.TemporaryDirectory(prefix="synkhronos-profile-")
        profiler.start_trace(self._folder.name, create_perfetto_trace=False)
        for _ in range(3):
            with profiler.TraceAnnotation(f"{_CLOCK_MARK}{time.monotonic_ns()}"):
                time.sleep(0.001)

    def stop(self) -> list[ProfiledOperation]:
        """Stop the profiler, if it runs, and return the operations of XLA."""
        folder, self._folder = self._folder, None
        if folder is None:
            return []
        from jax import profiler

        with folder:
            profiler.stop_trace()
            files = sorted(Path(folder.name).rglob("*.trace.json.gz"))
            events = []
            for path in files:
                with gzip.open(path, "rt") as file:
                    events += json.load(file)["traceEvents"]
        return _read_operations(events)


def _read_operations(events: list[dict[str, Any]]) -> list[ProfiledOperation]:
    """Return the operations of devices and of XLA's threads, without those of Python."""
    names: dict[Any, str] = {}
    for event in events:
        if event.get("name") == "process_name":
            names[event["pid"], None] = event["args"]["name"]
        elif event.get("name") == "thread_name":
            names[event["pid"], event["tid"]] = event["args"]["name"]
    marks = [e for e in events if e.get("ph") == "X" and str(e["name"]).startswith(_CLOCK_MARK)]
    if not marks:
        return []
    # The clock was read just before the event began, so the smallest difference is the most precise.
    offset = min(e["ts"] * 1000 - int(str(e["name"])[len(_CLOCK_MARK) :]) for e in marks)
    operations = []
    for event in events:
        if event.get("ph") != "X" or not event.get("dur"):
            continue
        process, thread = names.get((event["pid"], None), ""), names.get((event["pid"], event["tid"]), "")
        is_device = "/device:" in process
        if not is_device and "hlo_op" not in event.get("args", {}):
            continue
        start = int(event["ts"] * 1000 - offset)
        thread_name = f"{process.rpartition('/')[2]} {thread}" if is_device else f"XLA {thread}"
        end = start + int(event["dur"] * 1000)
        operations.append(ProfiledOperation(str(event["name"]), start, end, thread_name.strip()))
    return operations
