"""Where the time of a recorded run went: each rank's shares, and the critical path of its calls.

The critical path goes backwards from the end of the last call.  On a rank it follows what the rank did; where the rank
waited, it continues on the rank for which it waited: the one whose work ended last before the wait did.  Work on the
path delays the run, and other work does not.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from synkhronos.tracing.chrome import read_trace
from synkhronos.tracing.spans import CALL, IDLE, WAIT

#: Name of the master's time between its calls.
OWN = "the script itself"
#: Colours of the categories in a picture.
_LIBRARY = "#9aa5b1"
_COLOURS = {
    "post": "#b48ead",
    "step": "#81a1c1",
    "wait": "#e8e8e8",
    "compile": "#d08770",
    "copy": "#ebcb8b",
    "launch": "#5e81ac",
    "exchange": "#bf616a",
    "load": "#a3be8c",
    "compute": "#2e4a6b",
}
_DARK = {"launch", "exchange", "compute"}
#: Number of lines of a table.
_MAX_LINES = 12
#: Spans that a picture shows of a rank at most.
_MAX_DRAWN = 4000


class Activity(NamedTuple):
    """A time in which a rank did one thing: the part of a span in which no inner span ran; microseconds."""

    start: float
    end: float
    name: str
    category: str


@dataclass
class RankTimeline:
    """Activities of one rank.

    Attributes
    ----------
    name : str
        The rank and its host.
    segments : list of Activity
        What the main thread did, without overlaps, in order.
    compute : list of Activity
        XLA's operations, of all threads.
    calls : list of Activity
        The master's calls; empty for workers.
    """

    name: str = ""
    segments: list[Activity] = field(default_factory=list)
    compute: list[Activity] = field(default_factory=list)
    calls: list[Activity] = field(default_factory=list)


class PathStep(NamedTuple):
    """A part of the critical path, in microseconds."""

    rank: int
    name: str
    start: float
    end: float


def read_timelines(path: str) -> dict[int, RankTimeline]:
    """Return the timelines of a trace, by rank.

    Raises
    ------
    ValueError
        If the file is no trace of `synkhronos.timeline`.
    """
    spans: dict[int, list[Activity]] = defaultdict(list)
    ranks: dict[int, RankTimeline] = defaultdict(RankTimeline)
    for event in read_trace(path):
        if event.get("name") == "process_name":
            ranks[event["pid"]].name = event["args"]["name"]
        if event.get("ph") != "X":
            continue
        span = Activity(event["ts"], event["ts"] + event["dur"], event["name"], event["cat"])
        if span.category == "compute":
            ranks[event["pid"]].compute.append(span)
        elif event["tid"] == 0:
            spans[event["pid"]].append(span)
    for rank, mine in ranks.items():
        mine.segments = split_nested(spans[rank])
        mine.calls = sorted(span for span in spans[rank] if span.name == CALL)
    if not any(mine.calls for mine in ranks.values()):
        raise ValueError(f"{path} has no call of a function, a collective or a task")
    return dict(sorted(ranks.items()))


def split_nested(spans: Iterable[Activity]) -> list[Activity]:
    """Return the segments of nested spans: each moment belongs to the innermost span that contains it."""
    segments: list[Activity] = []
    open_spans: list[Activity] = []
    position = 0.0

    def advance(until: float) -> None:
        nonlocal position
        while open_spans and open_spans[-1].end <= until:
            inner = open_spans.pop()
            if inner.end > position:
                segments.append(inner._replace(start=position))
                position = inner.end
        if open_spans and until > position:
            segments.append(open_spans[-1]._replace(start=position, end=until))
        position = max(position, until)

    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        advance(span.start)
        open_spans.append(span)
    advance(float("inf"))
    return segments


def sum_by_name(segments: Iterable[Activity]) -> dict[str, float]:
    """Return the time of each name, the longest first, in microseconds."""
    totals: dict[str, float] = defaultdict(float)
    for segment in segments:
        totals[segment.name] += segment.end - segment.start
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def find_critical_path(ranks: dict[int, RankTimeline]) -> list[PathStep]:
    """Return the critical path from the start of the first call to the end of the last, in order."""
    master = next(rank for rank, mine in ranks.items() if mine.calls)
    work = {rank: [s for s in mine.segments if s.category != WAIT] for rank, mine in ranks.items()}
    ends = {rank: [s.end for s in segments] for rank, segments in work.items()}
    starts = {rank: [s.start for s in mine.segments] for rank, mine in ranks.items()}
    first, now = ranks[master].calls[0].start, ranks[master].calls[-1].end
    rank, path = master, []

    def find_last_work(on: int) -> float:
        """Return until when a rank worked, at this moment."""
        i = bisect.bisect_left(ends[on], now)
        if i < len(work[on]) and work[on][i].start < now:
            return now
        return ends[on][i - 1] if i else float("-inf")

    while now > first:
        i = bisect.bisect_left(starts[rank], now) - 1
        segment = ranks[rank].segments[i] if i >= 0 else None
        if segment is None or segment.end < now:  # between two spans
            name = OWN if rank == master else "other"
            start = max(first, segment.end if segment is not None else first)
            path.append(PathStep(rank, name, start, now))
            now = start
        elif segment.category != WAIT:
            start = max(first, segment.start)
            path.append(PathStep(rank, segment.name, start, now))
            now = start
        else:
            # A worker that waits for a command waits for the master; all other waits end with the last peer's work.
            others = [master] if segment.name == IDLE else [other for other in ranks if other != rank]
            last = max(others, key=find_last_work, default=rank)
            until = max(find_last_work(last), segment.start, first)
            if until < now:
                path.append(PathStep(rank, "wake up", until, now))
                now = until
            if now > segment.start:
                rank = last
    return path[::-1]


def _get_calls(ranks: dict[int, RankTimeline]) -> list[Activity]:
    """Return the master's calls."""
    return next(mine.calls for mine in ranks.values() if mine.calls)


def format_report(path: str, ranks: dict[int, RankTimeline], critical_path: Sequence[PathStep]) -> str:
    """Return the tables that ``python -m synkhronos show`` prints."""
    calls = _get_calls(ranks)
    begin, end = calls[0].start, calls[-1].end
    total = end - begin
    lines = [f"{path}: {len(calls)} calls on {len(ranks)} ranks in {_format_time(total)}"]
    names: dict[str, float] = defaultdict(float)
    shares: dict[int, dict[str, float]] = {}
    for rank, mine in ranks.items():
        cut = [s._replace(start=max(s.start, begin), end=min(s.end, end)) for s in mine.segments]
        shares[rank] = sum_by_name(s for s in cut if s.end > s.start)
        unnamed = total - sum(shares[rank].values())
        shares[rank][OWN if mine.calls else "other"] = max(unnamed, 0.0)
        for name, time in shares[rank].items():
            names[name] += time
    shown = sorted(names, key=lambda name: -names[name])[:_MAX_LINES]
    width = max(len(name) for name in shown)
    lines += ["", "time of each rank, % of the whole", " " * width + "".join(f"{f'rank {r}':>9}" for r in ranks)]
    for name in shown:
        cells = (100 * shares[rank].get(name, 0.0) / total for rank in ranks)
        lines.append(f"{name:<{width}}" + "".join(f"{cell:9.1f}" for cell in cells))
    if any(mine.compute for mine in ranks.values()):
        cells = (100 * _measure_union(mine.compute) / total for mine in ranks.values())
        lines.append(f"{'XLA computes':<{width}}" + "".join(f"{cell:9.1f}" for cell in cells))
    on_path: dict[tuple[str, int], float] = defaultdict(float)
    for step in critical_path:
        on_path[step.name, step.rank] += step.end - step.start
    lines += ["", "critical path: the activities that determine the duration"]
    for (name, rank), time in sorted(on_path.items(), key=lambda item: -item[1])[:_MAX_LINES]:
        lines.append(f"{100 * time / total:5.1f} %  {_format_time(time / len(calls)):>9} a call  {name}, rank {rank}")
    return "\n".join(lines) + "\n"


def _measure_union(segments: Sequence[Activity]) -> float:
    """Return the length of the union of some segments."""
    length, position = 0.0, float("-inf")
    for segment in sorted(segments):
        length += max(0.0, segment.end - max(segment.start, position))
        position = max(position, segment.end)
    return length


def _format_time(microseconds: float) -> str:
    for limit, unit in ((1e3, "us"), (1e6, "ms")):
        if microseconds < limit:
            return f"{microseconds / limit * 1e3:.3g} {unit}"
    return f"{microseconds / 1e6:.3g} s"


def draw_timelines(
    ranks: dict[int, RankTimeline], critical_path: Sequence[PathStep], picture: str | Path, n_calls: int = 4
) -> None:
    """Draw the ranks during some calls from the middle of the run, with the critical path below."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("drawing needs matplotlib: pip install 'synkhronos[demos]'") from None
    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    calls = _get_calls(ranks)
    middle = len(calls) // 2
    chosen = calls[max(0, middle - n_calls // 2) :][:n_calls]
    begin, end = chosen[0].start, chosen[-1].end
    scale, unit = (1e-3, "ms") if end - begin > 2e3 else (1.0, "us")
    rows: list[tuple[str, list[Activity]]] = []
    for rank, mine in ranks.items():
        rows.append((f"rank {rank}", mine.segments))
        if mine.compute:
            rows.append((f"rank {rank}, XLA", mine.compute))
    categories = {s.name: s.category for mine in ranks.values() for s in mine.segments}
    path = [Activity(s.start, s.end, s.name, categories.get(s.name, "call")) for s in critical_path]
    rows.append(("critical path", path))
    figure, axis = pyplot.subplots(figsize=(11, 1.2 + 0.55 * len(rows)), layout="constrained")
    used = set()
    for y, (_, segments) in enumerate(rows):
        visible = [s for s in segments if s.end > begin and s.start < end][:_MAX_DRAWN]
        used |= {s.category for s in visible}
        spans = [
            ((max(s.start, begin) - begin) * scale, (min(s.end, end) - max(s.start, begin)) * scale) for s in visible
        ]
        axis.broken_barh(spans, (y - 0.38, 0.76), color=[_COLOURS.get(s.category, _LIBRARY) for s in visible])
        for (start, length), segment in zip(spans, visible, strict=True):
            if length > 0.012 * len(segment.name) * (end - begin) * scale and segment.category != WAIT:
                colour = "white" if segment.category in _DARK else "black"
                axis.text(start + length / 2, y, segment.name, ha="center", va="center", fontsize=8, color=colour)
    axis.set_yticks(range(len(rows)), [name for name, _ in rows])
    axis.invert_yaxis()
    axis.set_xlim(0, (end - begin) * scale)
    axis.set_xlabel(f"{unit} ({len(chosen)} of {len(calls)} calls)")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(left=False)
    handles = [Patch(color=colour, label=name) for name, colour in _COLOURS.items() if name in used]
    handles.append(Patch(color=_LIBRARY, label="the library"))
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), frameon=False, fontsize="small")
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
