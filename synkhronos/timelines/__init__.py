"""Timelines: spans of each rank's activities, in Chrome's trace format.

::

    timeline("run.json")          each rank: SpanRecorder.install() wraps the traced methods
    calls                         each call of a wrapped method appends a span
    stop(), or close()            each rank: SpanRecorder.uninstall(); the master gathers the spans and writes the file
    python -m synkhronos show     report: each rank's time by activity, and the critical path of the calls

Without a timeline there is no cost.
"""

from synkhronos.timelines.timeline import Timeline, timeline

__all__ = ["Timeline", "timeline"]
