"""Start and stop the recording on all ranks, and write the file."""

from __future__ import annotations

import os
import pickle
import statistics
import threading
import time
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from synkhronos import ranks
from synkhronos.checks import check_at_least, check_flag
from synkhronos.engines.xla.profile import Operation, XlaProfile
from synkhronos.ranks import MAX_SLOT_NBYTES, Command, PendingOperation, Rank
from synkhronos.ranks.session import Session
from synkhronos.tracing.chrome import RankSpans, write_trace
from synkhronos.tracing.spans import Span, SpanRecorder

#: Readings of two clocks from which the offset between hosts is estimated.
_CLOCK_READINGS = 15
_MAX_SPANS = 250_000


class _StartFields(NamedTuple):
    max_spans: int
    compute: bool


class StartRecording(_StartFields, Command):
    """Start to record on every rank."""

    __slots__ = ()

    def run(self, rank: Rank) -> None:
        """Install the timed methods, and start XLA's profiler if it is asked for."""
        recorder = rank.registry.get(SpanRecorder)
        if self.compute:
            rank.registry.get(XlaProfile).start()
        rank.barrier()  # no rank records the start of another
        recorder.install(self.max_spans)


class _StopFields(NamedTuple):
    compute: bool


class StopRecording(_StopFields, Command):
    """Stop to record on every rank, and gather the spans in the master."""

    __slots__ = ()

    def run(self, rank: Rank) -> list[RankSpans] | None:
        """Return every rank's spans in the master, in rank order; None in workers."""
        recorder = rank.registry.get(SpanRecorder)
        recorder.remove()
        spans = list(recorder.spans)
        recorder.spans.clear()
        offset = _estimate_clock_offset(rank)
        compute = rank.registry.get(XlaProfile).stop() if self.compute else []
        return _gather(rank, _to_rank_spans(rank, spans, offset, compute))


def _to_rank_spans(rank: Rank, spans: Sequence[Span], offset: int = 0, compute: Sequence[Operation] = ()) -> RankSpans:
    thread = threading.main_thread().ident or 0
    return RankSpans(rank.number, os.uname().nodename, thread, offset, list(spans), list(compute))


def _estimate_clock_offset(rank: Rank) -> int:
    """Return the nanoseconds to add to this rank's clock for the master's; 0 on one machine, which has one clock."""
    if not rank.spans_hosts:
        return 0
    offsets = []
    for _ in range(_CLOCK_READINGS):
        rank.barrier()
        clock = time.monotonic_ns()
        offsets.append(rank.all_gather(clock)[rank.root] - clock)
    return int(statistics.median(offsets))


def _gather(rank: Rank, spans: RankSpans) -> list[RankSpans] | None:
    """Gather a value of any size in the master."""
    payload = zlib.compress(pickle.dumps(spans, pickle.HIGHEST_PROTOCOL), 1)
    max_nbytes = max(rank.all_gather(len(payload)))
    payloads: list[list[bytes]] = [[] for _ in range(rank.size)]
    for start in range(0, max_nbytes, MAX_SLOT_NBYTES):
        chunks_by_rank = rank.gather_bytes(payload[start : start + MAX_SLOT_NBYTES])
        if chunks_by_rank is not None:
            for chunks, chunk in zip(payloads, chunks_by_rank, strict=True):
                chunks.append(chunk)
    return [pickle.loads(zlib.decompress(b"".join(chunks))) for chunks in payloads] if rank.is_master else None


class _Recording(PendingOperation):
    """A recording in progress: an end of the ranks writes its file."""

    def __init__(self, path: str, compute: bool, session: Session):
        self._path, self._compute = path, compute
        #: None once the file is written.
        self.session: Session | None = session

    def finish(self) -> None:
        """Stop to record, and write the file, while this thread holds the session's lock."""
        session, self.session = self.session, None
        if session is not None:
            write_trace(self._path, session.run(StopRecording(self._compute)))

    def end(self) -> None:
        """Write the master's spans if the ranks end otherwise: the last ones show in which call a worker died."""
        session, self.session = self.session, None
        if session is not None:
            recorder = session.rank.registry.get(SpanRecorder)
            recorder.remove()
            write_trace(self._path, [_to_rank_spans(session.rank, recorder.spans)])


class Timeline:
    """A recording, as `timeline` starts it.

    Attributes
    ----------
    path : str
        File that `stop` writes.
    """

    def __init__(self, path: str | os.PathLike[str], compute: bool, max_spans: int):
        self.path = os.fspath(path)
        session = ranks.get_session()
        if any(isinstance(pending, _Recording) and pending.session is not None for pending in session.rank.pending):
            raise RuntimeError("timeline: another one is being recorded; stop() it first")
        with open(self.path, "a"):  # a path that can't be written is reported before the run, not after it
            pass
        with session.call_lock:
            session.wait_until_idle()
            session.run(StartRecording(max_spans, compute))
            self._recording = _Recording(self.path, compute, session)
            session.rank.pending.append(self._recording)  # an orderly end of the ranks calls finish()

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop to record, and write the file.  It does nothing if the ranks have ended, or after the first call.

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
            session.rank.pending.remove(self._recording)


def timeline(path: str | os.PathLike[str], compute: bool = False, max_spans: int = _MAX_SPANS) -> Timeline:
    """Record what each rank does and when, and write it in Chrome's trace format.

    Open the file at https://ui.perfetto.dev, or let ``python -m synkhronos show FILE`` say where the time went.  The
    clocks of several hosts are aligned.  Without a timeline nothing is recorded, at no cost; a recorded span costs a
    rank about a microsecond.

    Parameters
    ----------
    path : path
        File to write; compressed if its name ends in ``.gz``.
    compute : bool
        Record XLA's operations too, with JAX's profiler.  It slows the run down.
    max_spans : int
        Number of spans that a rank keeps: the newest, of about 150 bytes each.

    Returns
    -------
    Timeline
        ``stop()`` ends the recording and writes the file; so does the end of a ``with`` block, and `synkhronos.close`.

    Raises
    ------
    RuntimeError
        If no ranks are running, or another timeline is being recorded.
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
    check_flag(compute, "compute")
    check_at_least(max_spans, "max_spans", 1)
    return Timeline(path, compute, max_spans)
