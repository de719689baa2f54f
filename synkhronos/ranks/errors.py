"""The errors that ranks raise.

`WorkerError`
    A worker raised an exception or died; what the master's caller sees.
`Cancelled`
    Another rank failed; what unwinds a rank's part of a command.  Never leaves the library.
`Report`
    What one rank has to say of its failure.
`cut`
    Shortens what is too long to be said.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """One rank's account of its failure: small, picklable, plain text."""

    rank: int
    kind: str
    message: str
    traceback: str
    host: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException, limit: int) -> Report:
        """Describe ``error``, with about ``limit`` characters of its message and of its traceback at most."""
        try:
            message = str(error)
        except Exception as another:
            message = f"<no message: its __str__ raised {type(another).__qualname__}>"
        text = "".join(traceback.format_exception(error))
        return cls(rank, type(error).__qualname__, cut(message, limit), cut(text, limit))

    @property
    def who(self) -> str:
        """The rank, and, where there are several hosts, the host."""
        return f"rank {self.rank}" + (f" on host {self.host}" if self.host else "")

    def summary(self) -> str:
        """One line: the rank, the exception's class and the first line of its message."""
        return f"{self.who}: {self.kind}: {(self.message.splitlines() or [''])[0]}"


def cut(text: str, limit: int) -> str:
    """Leave out the middle of what is too long: its beginning and its end say most."""
    return text if len(text) <= limit else f"{text[: limit // 2]}\n[...]\n{text[-limit // 2 :]}"


class WorkerError(RuntimeError):
    """A worker raised an exception, or died.

    Attributes
    ----------
    rank : int
        The rank that failed (the lowest, when several did).
    worker_traceback : str
        The worker's own traceback; empty when the worker died without one.
    failures : dict of int to str
        One line for every rank that failed.

    Notes
    -----
    After an exception the ranks stay usable.  After a death they are closed: call `synkhronos.fork` again.
    """

    def __init__(self, message: str, rank: int, worker_traceback: str = "", failures: dict[int, str] | None = None):
        super().__init__(message)
        self.rank = rank
        self.worker_traceback = worker_traceback
        self.failures = {rank: message} if failures is None else failures

    def __reduce__(self) -> tuple[type[WorkerError], tuple[str, int, str, dict[int, str]]]:
        return type(self), (str(self), self.rank, self.worker_traceback, self.failures)

    @classmethod
    def of(cls, reports: Sequence[Report], effect: str = "") -> WorkerError:
        """Make the error for ranks that raised exceptions and are still there."""
        first = reports[0]
        head = f"{first.who} raised {first.kind}: {first.message}"
        others = "".join(f"\n  {report.summary()}" for report in reports[1:])
        if others:
            head += f"\nIt was not alone:{others}"
        if effect:
            head += f"\n{effect}"
        head += f"\n\nThe traceback of rank {first.rank}:\n{first.traceback}"
        return cls(head, first.rank, first.traceback, {report.rank: report.summary() for report in reports})


class Cancelled(Exception):
    """Another rank failed, and this one leaves the command."""


#: Stands for the exit code of a process that somebody else has waited for; no exit code is as large.
UNKNOWN = 1 << 16


def cause_of_death(code: int) -> str:
    """Say in words what ``os.waitstatus_to_exitcode`` says in a number."""
    if code == UNKNOWN:
        return (
            "ended (how is not known: this process ignores SIGCHLD, or something in it, such as os.wait(), "
            "has taken the exit code)"
        )
    if code >= 0:
        return f"exited with code {code} (something in it ended the process; see what it printed)"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = {
        "SIGKILL": " (the kernel does this to a process when memory runs out)",
        "SIGSEGV": " (a crash in compiled code)",
        "SIGBUS": " (a crash in compiled code, or /dev/shm was full)",
    }.get(name, "")
    return f"was killed by {name}{hint}"
