"""Timelines: spans of each rank's activities, in Chrome's trace format.

::

    timeline("run.json")          every rank: SpanRecorder.install(), which replaces the methods in TRACED by timed ones
    ...                           each timed call appends one span (name, category, start, end, thread)
    stop, or the ranks' end       every rank: remove(); the master gathers the spans and writes the file
    python -m synkhronos show     report: where each rank's time went, and the critical path of the calls

Without an open timeline nothing is recorded, at no cost.
"""

from synkhronos.tracing.timeline import Timeline, timeline

__all__ = ["Timeline", "timeline"]
