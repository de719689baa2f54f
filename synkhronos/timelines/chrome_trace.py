"""Chrome's trace format, which https://ui.perfetto.dev and ``chrome://tracing`` display.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.  Each rank is a process of
the trace, with the rank's threads and then XLA's threads.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import IO, Any, cast

from synkhronos.engines.xla.profile import ProfiledOperation
from synkhronos.timelines.spans import Span


@dataclass(frozen=True, slots=True)
class RankSpans:
    """Spans of one rank, XLA's operations, and the nanoseconds by which the master's clock is ahead.

    ``main_thread`` is the thread of the rank's commands; in the master, the one that has made most calls.
    """

    rank: int
    host: str
    main_thread: int
    clock_offset_ns: int
    spans: list[Span]
    xla_operations: list[ProfiledOperation]


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
    starts = (
        start_ns + rank_spans.clock_offset_ns
        for rank_spans in spans_by_rank
        for _, _, start_ns, _, _ in rank_spans.spans
    )
    origin_ns = min(starts, default=0)
    for rank_spans in spans_by_rank:
        pid, threads = rank_spans.rank, {rank_spans.main_thread: 0}  # type: int, dict[Any, int]
        name = f"rank {pid} on {rank_spans.host}"
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": 0, "args": {"name": "main thread"}}
        operations = (
            (operation.name, "compute", operation.start_ns, operation.end_ns, operation.thread_name)
            for operation in rank_spans.xla_operations
        )
        for name, category, start_ns, end_ns, thread in chain(rank_spans.spans, operations):
            is_new = thread not in threads
            tid = threads.setdefault(thread, len(threads))
            if is_new and isinstance(thread, str):  # a thread of XLA
                yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}}
            event = {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid}
            ts = (start_ns + rank_spans.clock_offset_ns - origin_ns) / 1000
            yield {**event, "ts": ts, "dur": (end_ns - start_ns) / 1000}
