"""Chrome's trace format, which https://ui.perfetto.dev and ``chrome://tracing`` display.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.  Each rank is a process of
the trace, with the rank's threads and then XLA's threads.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

from synkhronos.engines.xla.profile import Operation
from synkhronos.timelines.spans import Span


@dataclass(frozen=True, slots=True)
class RankSpans:
    """Spans of one rank, XLA's operations, and the nanoseconds by which the master's clock is ahead."""

    rank: int
    host: str
    main_thread: int
    clock_offset_ns: int
    spans: list[Span]
    xla_operations: list[Operation]


def write_trace(path: str, spans_by_rank: Sequence[RankSpans]) -> None:
    """Write a trace of all ranks to a file, which is compressed if its name ends in ``.gz``."""
    with _open(path, "wt") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for i, event in enumerate(_make_events(spans_by_rank)):
            file.write((",\n" if i else "") + json.dumps(event))
        file.write("\n]}\n")


def read_trace(path: str) -> list[dict[str, Any]]:
    """Return the events of a trace that `write_trace` wrote; raise ValueError for another file."""
    with _open(path, "rt") as file:
        try:
            events: list[dict[str, Any]] = json.load(file)["traceEvents"]
        except (ValueError, TypeError, KeyError, EOFError) as error:
            raise ValueError(f"{path} is not a trace in Chrome's format: {error}") from error
    return events


def _open(path: str, mode: str) -> IO[str]:
    return cast(IO[str], gzip.open(path, mode) if path.endswith(".gz") else open(path, mode))


def _make_events(spans_by_rank: Sequence[RankSpans]) -> Iterator[dict[str, Any]]:
    """Yield the events of all ranks: names of processes and threads, and a complete event for each span."""
    starts = [
        start + rank_spans.clock_offset_ns for rank_spans in spans_by_rank for _, _, start, _, _ in rank_spans.spans
    ]
    origin = min(starts, default=0)
    for rank_spans in spans_by_rank:
        pid, threads = rank_spans.rank, {rank_spans.main_thread: 0}  # type: int, dict[Any, int]
        name = f"rank {pid} on {rank_spans.host}"
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": 0, "args": {"name": "main thread"}}
        operations = [(label, "compute", start, end, lane) for lane, label, start, end in rank_spans.xla_operations]
        for label, category, start, end, thread in (*rank_spans.spans, *operations):
            is_new = thread not in threads
            tid = threads.setdefault(thread, len(threads))
            if is_new and isinstance(thread, str):  # a thread of XLA
                yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}}
            event = {"ph": "X", "name": label, "cat": category, "pid": pid, "tid": tid}
            yield {**event, "ts": (start + rank_spans.clock_offset_ns - origin) / 1000, "dur": (end - start) / 1000}
