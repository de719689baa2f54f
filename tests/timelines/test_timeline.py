"""Timelines: records of each rank, the format of the file, and the report."""

import collections
import gzip
import json
import os
import signal
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from library import XLA, shared
from library import tensor as T

import synkhronos as synk
from synkhronos import __main__ as command_line
from synkhronos.ranks.command_runner import CommandRunner
from synkhronos.ranks.control_memory import ControlMemory
from synkhronos.timelines import timeline_report
from synkhronos.timelines.spans import _time_calls, register_traced_method
from synkhronos.timelines.timeline_report import (
    Activity,
    RankTimeline,
    find_critical_path,
    flatten_spans,
)


@pytest.fixture
def step(fork):
    """Give a function with an update, which two ranks have called once."""
    fork(2)
    x, w = T.dmatrix("x"), shared(np.ones(3), "w")
    f = synk.function([x], (x.sum(), "sum"), updates=[(w, w * 2)], name="step")
    f(np.ones((4, 3)))
    return f, w


def call_and_all_reduce(step, times=3):
    f, w = step
    for _ in range(times):
        float(f(np.ones((4, 3))))
        synk.all_reduce(w, op="avg")


def test_timeline_records_every_rank(step, tmp_path):
    path = tmp_path / "run.json"
    with synk.timeline(path):
        call_and_all_reduce(step)
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    for rank in (0, 1):
        names = {event["name"] for event in spans if event["pid"] == rank}
        assert {"run step", "copy rows", "launch", "run AllReduce", "all_reduce"} <= names
    assert sum(event["name"] == "run step" for event in spans) == 6
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    # A rank's spans are nested, as Perfetto draws one within another.
    ranks = timeline_report.read_timelines(str(path))
    for timeline_of_rank in ranks.values():
        assert all(
            a.end <= b.start for a, b in zip(timeline_of_rank.activities, timeline_of_rank.activities[1:], strict=False)
        )


def test_timeline_of_calls_in_a_thread_has_a_report(step, tmp_path):
    path = tmp_path / "run.json"
    with synk.timeline(path):
        thread = threading.Thread(target=call_and_all_reduce, args=(step,))
        thread.start()
        thread.join()
    timelines = timeline_report.read_timelines(str(path))
    assert len(timelines[0].calls) >= 6 and not timelines[1].calls


def test_timeline_records_every_collective(step, tmp_path):
    path, w = tmp_path / "run.json", shared(np.ones(1000), "w")
    synk.function([], w.sum())
    synk.distribute()
    with synk.timeline(path):
        synk.broadcast(w)
        synk.all_reduce(w, op="sum")
        synk.reduce(w, op="sum")
        synk.gather(w)
        synk.reduce_scatter(w, op="sum")
        synk.all_gather(w)
    events = json.loads(path.read_text())["traceEvents"]
    for rank in (0, 1):
        names = {event["name"] for event in events if event["pid"] == rank and event.get("cat") == "exchange"}
        assert names == {"broadcast", "all_reduce", "reduce", "gather", "reduce_scatter", "all_gather"}


def test_register_traced_method_refuses_names_that_do_not_exist():
    with pytest.raises(AttributeError, match="CommandRunner has no method '_perform' to trace"):
        register_traced_method(CommandRunner, "_perform", "call", "call")


def test_an_error_in_a_namer_keeps_the_error_of_the_call():
    def fail(divisor):
        return 1 / divisor

    def name_call(divisor):
        raise KeyError(divisor)

    spans = collections.deque()
    with pytest.raises(ZeroDivisionError):
        _time_calls(fail, "call", name_call, spans)(0)
    ((name, *_),) = spans
    assert name == fail.__qualname__


def test_timeline_restores_the_methods(step, tmp_path):
    before = [vars(CommandRunner)["run_without_releases"], vars(ControlMemory)["wait"]]
    with synk.timeline(tmp_path / "run.json.gz"):
        assert vars(CommandRunner)["run_without_releases"] is not before[0]
        call_and_all_reduce(step, 1)
    assert [vars(CommandRunner)["run_without_releases"], vars(ControlMemory)["wait"]] == before
    with gzip.open(tmp_path / "run.json.gz", "rt") as file:
        assert json.load(file)["traceEvents"]
    with synk.timeline(tmp_path / "again.json"):  # the workers' methods are the original ones, too
        call_and_all_reduce(step, 1)
    events = json.loads((tmp_path / "again.json").read_text())["traceEvents"]
    assert sum(event["name"] == "run step" and event["pid"] == 1 for event in events) == 1


def test_timeline_stays_where_it_is_when_the_working_directory_changes(step, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with synk.timeline("run.json"):
        call_and_all_reduce(step)
        monkeypatch.chdir("/")
    assert json.loads((tmp_path / "run.json").read_text())["traceEvents"]


def test_close_writes_the_timeline(step, tmp_path):
    path = tmp_path / "run.json"
    timeline = synk.timeline(path)
    call_and_all_reduce(step, 1)
    synk.close()
    assert json.loads(path.read_text())["traceEvents"]
    timeline.stop()  # too late, which is not an error


def test_timeline_keeps_the_newest_spans(step, tmp_path):
    path = tmp_path / "run.json"
    with synk.timeline(path, max_spans=5):
        call_and_all_reduce(step)
    events = json.loads(path.read_text())["traceEvents"]
    assert [sum(event["ph"] == "X" and event["pid"] == rank for event in events) for rank in (0, 1)] == [5, 5]


def test_timeline_refuses_wrong_arguments_and_a_second_one(step, tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        synk.timeline(tmp_path / "nowhere" / "run.json")
    with pytest.raises(ValueError, match="max_spans"):
        synk.timeline(tmp_path / "run.json", max_spans=0)
    with pytest.raises(TypeError, match="records_xla"):
        synk.timeline(tmp_path / "run.json", records_xla="yes")
    with synk.timeline(tmp_path / "run.json"), pytest.raises(RuntimeError, match="another"):
        synk.timeline(tmp_path / "second.json")
    synk.close()
    with pytest.raises(RuntimeError, match=r"fork\(\)"):
        synk.timeline(tmp_path / "run.json")


@pytest.mark.new_ranks
def test_death_of_a_worker_ends_the_timeline(step, tmp_path):
    from synkhronos import ranks

    original = vars(CommandRunner)["run_without_releases"]
    with pytest.raises(synk.WorkerError), synk.timeline(tmp_path / "run.json"):
        os.kill(ranks.get_session().worker_pids[1], signal.SIGKILL)
        call_and_all_reduce(step)
    assert vars(CommandRunner)["run_without_releases"] is original
    assert json.loads((tmp_path / "run.json").read_text())["traceEvents"]  # the master's spans


@pytest.mark.skipif(not XLA, reason="JAX's profiler")
def test_timeline_records_xla_computations(tmp_path, two_ranks_per_test):
    x = T.dmatrix("x")
    f = synk.function([x], (T.tanh(x.dot(x.T)).sum(), "sum"))
    float(f(np.ones((8, 30))))
    with synk.timeline(tmp_path / "run.json", records_xla=True):
        float(f(np.ones((8, 30))))
    ranks = timeline_report.read_timelines(str(tmp_path / "run.json"))
    for spans in ranks.values():
        begin, end = min(s.start for s in spans.activities), max(s.end for s in spans.activities)
        assert spans.xla_operations
        # The two clocks agree: XLA copies the rows and computes between the start of the call and the read of the result.
        outside = [s for s in spans.xla_operations if s.start < begin or s.end > end]
        assert not outside, (begin, end, outside)


# -- the report ----------------------------------------------------------------------------------------------


def test_flatten_spans_splits_nested_spans():
    spans = [Activity(0, 10, "a", "x"), Activity(2, 5, "b", "x"), Activity(3, 4, "c", "x"), Activity(12, 13, "d", "x")]
    assert [(s.start, s.end, s.name) for s in flatten_spans(spans)] == [
        (0, 2, "a"),
        (2, 3, "b"),
        (3, 4, "c"),
        (4, 5, "b"),
        (5, 10, "a"),
        (12, 13, "d"),
    ]


@given(st.data())
def test_flatten_spans_assigns_each_moment_to_the_innermost_span(data):
    def draw(start, end, depth):
        """Draw spans within an interval, one after another, each with spans within it."""
        spans, position = [], start
        for _ in range(data.draw(st.integers(0, 3)) if depth and end - start > 4 else 0):
            if end - position < 2:
                break
            first = data.draw(st.integers(position, end - 2))
            last = data.draw(st.integers(first + 1, end))
            spans += [Activity(first, last, f"{depth}", "x"), *draw(first, last, depth - 1)]
            position = last
        return spans

    spans = draw(0, 60, 3)
    segments = flatten_spans(spans)
    assert all(a.end <= b.start for a, b in zip(segments, segments[1:], strict=False))
    for t in range(60):
        covering = [s for s in spans if s.start <= t < s.end]
        segments_at_t = [s for s in segments if s.start <= t < s.end]
        assert len(segments_at_t) == bool(covering)
        if covering:  # the innermost, which is the one with the smallest number in its name
            assert segments_at_t[0].name == min(s.name for s in covering)


def make_timelines(*ranks):
    """Return timelines from tuples (start, end, name, category); the first rank is the master, with one call."""
    timelines = {number: RankTimeline([Activity(*s) for s in rank]) for number, rank in enumerate(ranks)}
    timelines[0].calls = [Activity(ranks[0][0][0], ranks[0][-1][1], "call", "call")]
    return timelines


def test_critical_path_goes_through_the_slowest_rank():
    ranks = make_timelines(
        [(0, 1, "post", "post"), (1, 4, "launch", "launch"), (4, 9, "wait for the ranks", "wait")],
        [(0, 1, "wait for a command", "wait"), (1, 8, "launch", "launch"), (8, 9, "wait for a command", "wait")],
    )
    assert find_critical_path(ranks) == [
        (0, Activity(0, 1, "post", "post")),
        (1, Activity(1, 8, "launch", "launch")),
        (0, Activity(8, 9, "wake up", "call")),
    ]


def test_critical_path_changes_ranks_at_a_barrier():
    ranks = make_timelines(
        [(0, 6, "launch", "launch"), (6, 7, "all_reduce", "exchange"), (7, 12, "wait for the ranks", "wait")],
        [(0, 2, "launch", "launch"), (2, 6, "wait for a peer", "wait"), (6, 12, "all_reduce", "exchange")],
    )
    assert find_critical_path(ranks) == [
        (0, Activity(0, 6, "launch", "launch")),
        (1, Activity(6, 12, "all_reduce", "exchange")),
    ]


def test_critical_path_covers_the_run(step, tmp_path):
    with synk.timeline(tmp_path / "run.json"):
        call_and_all_reduce(step, 5)
    ranks = timeline_report.read_timelines(str(tmp_path / "run.json"))
    path = [activity for _, activity in find_critical_path(ranks)]
    assert all(a.end == b.start for a, b in zip(path, path[1:], strict=False))
    assert (path[0].start, path[-1].end) == (ranks[0].calls[0].start, ranks[0].calls[-1].end)


def test_timeline_show_prints_and_draws(step, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    with synk.timeline(tmp_path / "run.json"):
        call_and_all_reduce(step)
    command_line.main(["show", str(tmp_path / "run.json")])
    printed = capsys.readouterr().out
    assert "calls on 2 ranks" in printed
    assert "critical path" in printed
    assert (tmp_path / "run.png").stat().st_size > 1000


def test_timeline_show_refuses_other_files(tmp_path, capsys):
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(SystemExit):
        command_line.main(["show", str(tmp_path / "run.json")])
    assert "run.json" in capsys.readouterr().err
