"""Report on a recorded run: each rank's time by activity, and the critical path of its calls.

The critical path is found backwards, from the end of the last call.  It follows the work of a rank.  Where the rank
waited, the path continues on the peer whose work ended last before the end of the wait.  Only work on the critical path
determines the duration of the run.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from synkhronos.timelines.chrome_trace import read_trace
from synkhronos.timelines.spans import CALL_NAME, IDLE_NAME, WAIT_CATEGORY

#: Name of the master's activity between its calls.
SCRIPT_NAME = "the script itself"
#: Colour of activities without a colour in `_COLOURS`.
_OTHER_COLOUR = "#9aa5b1"
#: Colours of the categories.
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
#: Categories with a white label.
_DARK_CATEGORIES = {"launch", "exchange", "compute"}
#: Maximal number of lines of a table.
_MAX_LINES = 12
#: Number of calls in the picture.
_N_DRAWN_CALLS = 4
#: Maximal number of activities in a row of the picture.
_MAX_DRAWN_ACTIVITIES = 4000


class Activity(NamedTuple):
    """A span of a rank, or a part of it.  Times are in microseconds."""

    start: float
    end: float
    name: str
    category: str


@dataclass
class RankTimeline:
    """Parts of the spans of a rank's main thread, without overlap; XLA's operations; and the master's calls."""

    activities: list[Activity] = field(default_factory=list)
    xla_operations: list[Activity] = field(default_factory=list)
    calls: list[Activity] = field(default_factory=list)


class CriticalPathStep(NamedTuple):
    """An activity on the critical path."""

    rank: int
    activity: Activity


def read_timelines(path: str) -> dict[int, RankTimeline]:
    """Return the timelines of a trace, by rank; raise ValueError unless `synkhronos.timeline` wrote the file."""
    spans: dict[int, list[Activity]] = defaultdict(list)
    timelines: dict[int, RankTimeline] = defaultdict(RankTimeline)
    for event in read_trace(path):
        if event.get("ph") != "X":
            continue
        span = Activity(event["ts"], event["ts"] + event["dur"], event["name"], event["cat"])
        if span.category == "compute":
            timelines[event["pid"]].xla_operations.append(span)
        elif event["tid"] == 0:
            spans[event["pid"]].append(span)
    for rank, rank_spans in spans.items():
        timelines[rank].activities = flatten_spans(rank_spans)
        timelines[rank].calls = sorted(span for span in rank_spans if span.name == CALL_NAME)
    if not any(timeline.calls for timeline in timelines.values()):
        raise ValueError(f"{path} has no call of a function, a collective or a program")
    return dict(sorted(timelines.items()))


def flatten_spans(spans: Iterable[Activity]) -> list[Activity]:
    """Return the parts of nested spans.  Each moment belongs to the innermost span that contains it."""
    activities: list[Activity] = []
    open_spans: list[Activity] = []
    position = 0.0

    def advance(until: float) -> None:
        nonlocal position
        while open_spans and open_spans[-1].end <= until:
            inner = open_spans.pop()
            if inner.end > position:
                activities.append(inner._replace(start=position))
                position = inner.end
        if open_spans and until > position:
            activities.append(open_spans[-1]._replace(start=position, end=until))
        position = max(position, until)

    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        advance(span.start)
        open_spans.append(span)
    advance(float("inf"))
    return activities


def sum_by_name(activities: Iterable[Activity]) -> dict[str, float]:
    """Return the total time of each name in microseconds, the longest first."""
    totals: dict[str, float] = defaultdict(float)
    for activity in activities:
        totals[activity.name] += activity.end - activity.start
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def find_critical_path(timelines: dict[int, RankTimeline]) -> list[CriticalPathStep]:
    """Return the critical path from the start of the first call to the end of the last, in order."""
    master = next(rank for rank, timeline in timelines.items() if timeline.calls)
    work = {
        rank: [s for s in timeline.activities if s.category != WAIT_CATEGORY] for rank, timeline in timelines.items()
    }
    ends = {rank: [s.end for s in activities] for rank, activities in work.items()}
    starts = {rank: [s.start for s in timeline.activities] for rank, timeline in timelines.items()}
    start_of_run, time = timelines[master].calls[0].start, timelines[master].calls[-1].end
    rank = master
    path: list[CriticalPathStep] = []

    def find_last_work_end(peer: int) -> float:
        """Return the end of a rank's last work before ``time``; ``time`` itself if the rank works then."""
        i = bisect.bisect_left(ends[peer], time)
        if i < len(work[peer]) and work[peer][i].start < time:
            return time
        return ends[peer][i - 1] if i else float("-inf")

    while time > start_of_run:
        i = bisect.bisect_left(starts[rank], time) - 1
        activity = timelines[rank].activities[i] if i >= 0 else None
        if activity is None or activity.end < time:  # between two spans
            name = SCRIPT_NAME if rank == master else "other"
            activity = Activity(start_of_run if activity is None else activity.end, time, name, "call")
        elif activity.category == WAIT_CATEGORY:
            # A wait for a command ends with the master's work, any other wait with the last peer's work.
            peers = [master] if activity.name == IDLE_NAME else [peer for peer in timelines if peer != rank]
            last_peer = max(peers, key=find_last_work_end, default=rank)
            work_end = max(find_last_work_end(last_peer), activity.start, start_of_run)
            if work_end < time:
                path.append(CriticalPathStep(rank, Activity(work_end, time, "wake up", "call")))
                time = work_end
            if time > activity.start:
                rank = last_peer
            continue
        start = max(start_of_run, activity.start)
        path.append(CriticalPathStep(rank, activity._replace(start=start, end=time)))
        time = start
    return path[::-1]


def _get_calls(timelines: dict[int, RankTimeline]) -> list[Activity]:
    """Return the master's calls."""
    return next(timeline.calls for timeline in timelines.values() if timeline.calls)


def format_report(path: str, timelines: dict[int, RankTimeline], critical_path: Sequence[CriticalPathStep]) -> str:
    """Return the tables that ``python -m synkhronos show`` prints."""
    calls = _get_calls(timelines)
    start, end = calls[0].start, calls[-1].end
    total = end - start
    lines = [f"{path}: {len(calls)} calls on {len(timelines)} ranks in {_format_time(total)}"]
    totals: dict[str, float] = defaultdict(float)
    times_by_rank: dict[int, dict[str, float]] = {}
    for rank, timeline in timelines.items():
        clipped = [s._replace(start=max(s.start, start), end=min(s.end, end)) for s in timeline.activities]
        times_by_rank[rank] = sum_by_name(s for s in clipped if s.end > s.start)
        unnamed = total - sum(times_by_rank[rank].values())
        times_by_rank[rank][SCRIPT_NAME if timeline.calls else "other"] = max(unnamed, 0.0)
        for name, time in times_by_rank[rank].items():
            totals[name] += time
    names_shown = sorted(totals, key=lambda name: -totals[name])[:_MAX_LINES]
    width = max(len(name) for name in names_shown)
    lines += ["", "time of each rank, % of the whole", " " * width + "".join(f"{f'rank {r}':>9}" for r in timelines)]
    for name in names_shown:
        cells = (100 * times_by_rank[rank].get(name, 0.0) / total for rank in timelines)
        lines.append(f"{name:<{width}}" + "".join(f"{cell:9.1f}" for cell in cells))
    if any(timeline.xla_operations for timeline in timelines.values()):
        cells = (100 * _measure_union(timeline.xla_operations) / total for timeline in timelines.values())
        lines.append(f"{'XLA computes':<{width}}" + "".join(f"{cell:9.1f}" for cell in cells))
    path_times: dict[tuple[str, int], float] = defaultdict(float)
    for rank, activity in critical_path:
        path_times[activity.name, rank] += activity.end - activity.start
    lines += ["", "critical path: the activities that determine the duration"]
    for (name, rank), time in sorted(path_times.items(), key=lambda item: -item[1])[:_MAX_LINES]:
        lines.append(f"{100 * time / total:5.1f} %  {_format_time(time / len(calls)):>9} a call  {name}, rank {rank}")
    return "\n".join(lines) + "\n"


def _measure_union(activities: Sequence[Activity]) -> float:
    """Return the total length of the union of activities."""
    length, position = 0.0, float("-inf")
    for activity in sorted(activities):
        length += max(0.0, activity.end - max(activity.start, position))
        position = max(position, activity.end)
    return length


def _format_time(microseconds: float) -> str:
    for limit, unit in ((1e3, "us"), (1e6, "ms")):
        if microseconds < limit:
            return f"{microseconds / limit * 1e3:.3g} {unit}"
    return f"{microseconds / 1e6:.3g} s"


def draw_timelines(
    timelines: dict[int, RankTimeline], critical_path: Sequence[CriticalPathStep], picture_path: str | Path
) -> None:
    """Draw the activities of the ranks during some calls from the middle of the run, and the critical path."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("drawing needs matplotlib: pip install 'synkhronos[demos]'") from None
    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    calls = _get_calls(timelines)
    drawn_calls = calls[max(0, len(calls) // 2 - _N_DRAWN_CALLS // 2) :][:_N_DRAWN_CALLS]
    start, end = drawn_calls[0].start, drawn_calls[-1].end
    scale, unit = (1e-3, "ms") if end - start > 2e3 else (1.0, "us")
    rows: list[tuple[str, list[Activity]]] = []
    for rank, timeline in timelines.items():
        rows.append((f"rank {rank}", timeline.activities))
        if timeline.xla_operations:
            rows.append((f"rank {rank}, XLA", timeline.xla_operations))
    rows.append(("critical path", [step.activity for step in critical_path]))
    figure, axis = pyplot.subplots(figsize=(11, 1.2 + 0.55 * len(rows)), layout="constrained")
    drawn_categories: set[str] = set()
    for y, (_, activities) in enumerate(rows):
        drawn_categories |= _draw_row(axis, y, activities, start, end, scale)
    axis.set_yticks(range(len(rows)), [name for name, _ in rows])
    axis.invert_yaxis()
    axis.set_xlim(0, (end - start) * scale)
    axis.set_xlabel(f"{unit} ({len(drawn_calls)} of {len(calls)} calls)")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(left=False)
    handles = [Patch(color=colour, label=name) for name, colour in _COLOURS.items() if name in drawn_categories]
    handles.append(Patch(color=_OTHER_COLOUR, label="the library"))
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), frameon=False, fontsize="small")
    figure.savefig(picture_path, dpi=120)
    pyplot.close(figure)


def _draw_row(axis: Any, y: int, activities: Sequence[Activity], start: float, end: float, scale: float) -> set[str]:
    """Draw the activities between ``start`` and ``end`` as bars at height ``y``, and return their categories."""
    visible = [s for s in activities if s.end > start and s.start < end][:_MAX_DRAWN_ACTIVITIES]
    bars = [((max(s.start, start) - start) * scale, (min(s.end, end) - max(s.start, start)) * scale) for s in visible]
    axis.broken_barh(bars, (y - 0.38, 0.76), color=[_COLOURS.get(s.category, _OTHER_COLOUR) for s in visible])
    for (left, length), activity in zip(bars, visible, strict=True):
        if length > 0.012 * len(activity.name) * (end - start) * scale and activity.category != WAIT_CATEGORY:
            colour = "white" if activity.category in _DARK_CATEGORIES else "black"
            axis.text(left + length / 2, y, activity.name, ha="center", va="center", fontsize=8, color=colour)
    return {s.category for s in visible}
