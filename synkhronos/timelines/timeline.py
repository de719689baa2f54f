"""Start and stop the recording on all ranks, and write the file."""

from __future__ import annotations

import os
import pickle
import statistics
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from synkhronos import ranks
from synkhronos.checks import check_at_least, check_flag
from synkhronos.collectives.commands import gather_pickles
from synkhronos.engines.xla.profile import ProfiledOperation, XlaProfile
from synkhronos.ranks import Command, PendingOperation, Rank
from synkhronos.ranks.session import Session
from synkhronos.timelines.chrome_trace import RankSpans, write_trace
from synkhronos.timelines.spans import CALL_NAME, Span, SpanRecorder

#: Number of readings of two hosts' clocks, from which the clock offset is estimated.
_CLOCK_READINGS = 15
_MAX_SPANS = 250_000


@dataclass(frozen=True, slots=True)
class StartRecording(Command):
    """Start recording on every rank."""

    max_spans: int
    records_xla: bool

    def run(self, rank: Rank) -> None:
        recorder = rank.registry.get_or_create(SpanRecorder)
        if self.records_xla:
            rank.registry.get_or_create(XlaProfile).start()
        rank.barrier()  # so that no rank records another's start
        recorder.install(self.max_spans)


@dataclass(frozen=True, slots=True)
class StopRecording(Command):
    """Stop recording on every rank, and gather the spans in the master."""

    def run(self, rank: Rank) -> list[RankSpans]:
        """Return every rank's spans in the master, in rank order; an empty list in workers."""
        recorder = rank.registry.get_or_create(SpanRecorder)
        recorder.uninstall()
        spans = list(recorder.spans)
        recorder.spans.clear()
        clock_offset_ns = _estimate_clock_offset_ns(rank)
        xla_operations = rank.registry.get_or_create(XlaProfile).stop()
        rank_spans = _make_rank_spans(rank, spans, clock_offset_ns, xla_operations)
        return gather_pickles(rank, pickle.dumps(rank_spans), "the recording")


def _make_rank_spans(
    rank: Rank, spans: Collection[Span], clock_offset_ns: int = 0, xla_operations: Sequence[ProfiledOperation] = ()
) -> RankSpans:
    callers = [thread for name, *_, thread in spans if name == CALL_NAME]  # in the master alone
    thread = statistics.mode(callers or [threading.main_thread().ident or 0])
    return RankSpans(rank.number, os.uname().nodename, thread, clock_offset_ns, list(spans), list(xla_operations))


def _estimate_clock_offset_ns(rank: Rank) -> int:
    """Return the nanoseconds by which the master's clock is ahead of this rank's; 0 on a single machine."""
    if not rank.spans_hosts:
        return 0
    offsets = []
    for _ in range(_CLOCK_READINGS):
        rank.barrier()
        clock_ns = time.monotonic_ns()
        offsets.append(rank.all_gather(clock_ns)[rank.master_rank] - clock_ns)
    return int(statistics.median(offsets))


class _Recording(PendingOperation):
    """A recording in progress.  As a pending operation, it writes its file when the session ends."""

    def __init__(self, path: str, session: Session):
        self._path = path
        #: None once the file is written.
        self.session: Session | None = session

    def finish(self) -> None:
        """Stop recording, and write the file.  The caller holds the call lock."""
        session, self.session = self.session, None
        if session is not None:
            write_trace(self._path, session.run(StopRecording()))

    def close(self) -> None:
        """Write the master's spans after a failure of the session.  The last spans show in which call a worker died."""
        session, self.session = self.session, None
        if session is not None:
            recorder = session.rank.registry.get_or_create(SpanRecorder)
            recorder.uninstall()
            write_trace(self._path, [_make_rank_spans(session.rank, recorder.spans)])


class Timeline:
    """A recording, started by `timeline`.

    Attributes
    ----------
    path : str
        File that `stop` writes.
    """

    def __init__(self, path: str | os.PathLike[str], records_xla: bool, max_spans: int):
        self.path = os.path.abspath(path)
        session = ranks.get_session()
        if any(
            isinstance(pending, _Recording) and pending.session is not None
            for pending in session.rank.pending_operations
        ):
            raise RuntimeError("timeline: another one is being recorded; stop() it first")
        with open(self.path, "a"):  # report a path that can't be written before the run
            pass
        with session.call_lock:
            session.wait_until_idle()
            session.run(StartRecording(max_spans, records_xla))
            self._recording = _Recording(self.path, session)
            session.rank.pending_operations.append(self._recording)  # `synkhronos.close` calls finish()

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop recording, and write the file.  Do nothing after the first call, or if the session has ended.

        Raises
        ------
        OSError
            If the file can't be written.
        """
        session = self._recording.session
        if session is None or session.close_reason is not None:
            return
        with session.call_lock:
            session.wait_until_idle()
            self._recording.finish()
            session.rank.pending_operations.remove(self._recording)


def timeline(path: str | os.PathLike[str], records_xla: bool = False, max_spans: int = _MAX_SPANS) -> Timeline:
    """Record the activities of each rank, and write them to a file in Chrome's trace format.

    Open the file at https://ui.perfetto.dev, or print a report by ``python -m synkhronos show FILE``.  The clocks of
    several hosts are aligned.  A span costs a rank about a microsecond.  Without a timeline there is no cost.

    Parameters
    ----------
    path : path
        File to write; compressed if its name ends in ``.gz``.
    records_xla : bool
        Whether XLA's operations are recorded, too, by JAX's profiler, which slows the run down.
    max_spans : int
        Maximal number of spans of a rank, about 150 bytes each.  The latest are kept.

    Returns
    -------
    Timeline
        ``stop()`` ends the recording and writes the file, as do the end of a ``with`` block and `synkhronos.close`.

    Raises
    ------
    RuntimeError
        If no ranks are running, or if another timeline is being recorded.
    OSError
        If the file can't be written.

    Examples
    --------
    >>> import numpy as np, pytensor.tensor as pt
    >>> import synkhronos as synk
    >>> n = synk.fork(2, use_gpu=False)
    >>> x = pt.dmatrix("x")
    >>> f = synk.function([x], (x.sum(), "sum"))
    >>> with synk.timeline("run.json"):
    ...     total = f(np.ones((4, 2)))
    >>> synk.close()
    """
    check_flag(records_xla, "records_xla")
    check_at_least(max_spans, "max_spans", 1)
    return Timeline(path, records_xla, max_spans)
