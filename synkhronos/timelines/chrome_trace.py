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
    """The spans of one rank.

    Attributes
    ----------
    offset : int
        Nanoseconds by which the master's clock is ahead of the rank's.
    xla_operations : list of Operation
        XLA's operations.
    """

    rank: int
    host: str
    main_thread: int
    offset: int
    spans: list[Span]
    xla_operations: list[Operation]


def write_trace(path: str, ranks: Sequence[RankSpans]) -> None:
    """Write a trace of all ranks to a file, which is compressed if its name ends in ``.gz``."""
    with _open(path, "wt") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for i, event in enumerate(_make_events(ranks)):
            file.write((",\n" if i else "") + json.dumps(event))
        file.write("\n]}\n")


def read_trace(path: str) -> list[dict[str, Any]]:
    """Return the events of a trace that `write_trace` wrote.

    Raises
    ------
    ValueError
        If the file is not a trace.
    """
    with _open(path, "rt") as file:
        try:
            events: list[dict[str, Any]] = json.load(file)["traceEvents"]
        except (ValueError, TypeError, KeyError, EOFError) as error:
            raise ValueError(f"{path} is not a trace in Chrome's format: {error}") from error
    return events


def _open(path: str, mode: str) -> IO[str]:
    return cast(IO[str], gzip.open(path, mode) if path.endswith(".gz") else open(path, mode))


def _make_events(ranks: Sequence[RankSpans]) -> Iterator[dict[str, Any]]:
    """Yield the events of all ranks: names of processes and threads, and a complete event for each span."""
    starts = [start + rank_spans.offset for rank_spans in ranks for _, _, start, _, _ in rank_spans.spans]
    origin = min(starts, default=0)
    for rank_spans in ranks:
        name = f"rank {rank_spans.rank} on {rank_spans.host}"
        yield {"ph": "M", "name": "process_name", "pid": rank_spans.rank, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank_spans.rank, "args": {"sort_index": rank_spans.rank}}
        threads: dict[Any, int] = {rank_spans.main_thread: 0}
        yield {"ph": "M", "name": "thread_name", "pid": rank_spans.rank, "tid": 0, "args": {"name": "main thread"}}

        def number_thread(key: Any, threads: dict[Any, int] = threads) -> int:
            return threads.setdefault(key, len(threads))

        def make_event(
            label: str, category: str, start: int, end: int, thread: int, rank_spans: RankSpans = rank_spans
        ) -> dict[str, Any]:
            ts = (start + rank_spans.offset - origin) / 1000
            event = {"ph": "X", "name": label, "cat": category, "ts": ts, "dur": (end - start) / 1000}
            return {**event, "pid": rank_spans.rank, "tid": thread}

        for label, category, start, end, thread in rank_spans.spans:
            yield make_event(label, category, start, end, number_thread(thread))
        for lane, label, start, end in rank_spans.xla_operations:
            is_new = lane not in threads
            number = number_thread(lane)
            if is_new:
                yield {"ph": "M", "name": "thread_name", "pid": rank_spans.rank, "tid": number, "args": {"name": lane}}
            yield make_event(label, "compute", start, end, number)
