"""Errors that ranks raise, and the reports from which the master makes them."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class FailureReport:
    """Description of one rank's failure, as text.

    Attributes
    ----------
    rank : int
    kind : str
        Name of the exception's class.
    message, traceback : str
        Both may have their middle removed.
    host : str
        Name of the rank's machine; "" if there is only one.
    """

    rank: int
    kind: str
    message: str
    traceback: str
    host: str = ""

    @classmethod
    def from_exception(cls, rank: int, error: BaseException, limit: int) -> FailureReport:
        """Build the report of an exception, with at most about ``limit`` characters of message and of traceback."""
        try:
            message = str(error)
        except Exception as another:
            message = f"<no message: its __str__ raised {type(another).__qualname__}>"
        text = "".join(traceback.format_exception(error))
        return cls(rank, type(error).__qualname__, shorten(message, limit), shorten(text, limit))

    @property
    def rank_name(self) -> str:
        """Name of the rank, followed by that of its host if there are several hosts."""
        return f"rank {self.rank}" + (f" on host {self.host}" if self.host else "")

    def summary(self) -> str:
        """Return one line: the rank, the exception's class and the first line of its message."""
        return f"{self.rank_name}: {self.kind}: {(self.message.splitlines() or [''])[0]}"


def shorten(text: str, limit: int) -> str:
    """Return the text without its middle if it is longer than ``limit`` characters."""
    return text if len(text) <= limit else f"{text[: limit // 2]}\n[...]\n{text[-limit // 2 :]}"


class WorkerError(RuntimeError):
    """A worker raised an exception, or died.

    Attributes
    ----------
    rank : int
        Rank that failed; the lowest if several did.
    worker_traceback : str
        Traceback of that worker; "" if it died without one.
    failures : dict of int to str
        One line for each rank that failed.

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
    def _from_reports(cls, reports: Sequence[FailureReport], effect: str = "") -> WorkerError:
        """Build the error for ranks that raised exceptions; ``effect`` says on which ranks updates were applied."""
        first = reports[0]
        head = f"{first.rank_name} raised {first.kind}: {first.message}"
        others = "".join(f"\n  {report.summary()}" for report in reports[1:])
        if others:
            head += f"\nOther ranks failed too:{others}"
        if effect:
            head += f"\n{effect}"
        head += f"\n\nThe traceback of rank {first.rank}:\n{first.traceback}"
        return cls(head, first.rank, first.traceback, {report.rank: report.summary() for report in reports})


#: Beginning of the cause of a `Death` of a worker that could not start.
FAILED_START_PREFIX = "could not start"


class Death(NamedTuple):
    """Exit of a worker that ended a session, or failed start of one.

    Attributes
    ----------
    rank : int
    host : str
        Name of the rank's machine; "" if there is only one.
    pid : int
        Its process id; 0 if the worker could not start.
    cause : str
        Description of the exit, such as "was killed by SIGKILL".
    """

    rank: int
    host: str
    pid: int
    cause: str

    def describe(self) -> str:
        """Return a clause for messages, such as "rank 1 on host b (process 12) was killed by SIGKILL"."""
        place = f" on host {self.host}" if self.host else ""
        return f"rank {self.rank}{place} (process {self.pid}) {self.cause}"


class RemoteFailure(NamedTuple):
    """Failure on another machine that ends a session.

    Attributes
    ----------
    text : str
        Its description for an error message.
    rank : int
        The rank that it concerns, or the first of a lost machine.
    death : Death or None
        If a single worker has exited.
    """

    text: str
    rank: int
    death: Death | None = None


class Cancelled(Exception):
    """Another rank failed; unwinds this rank's part of the command and never leaves the library."""


def describe_effect(
    effect: str | None, partial_effect: str | None, applied: list[int], busy: list[int], size: int
) -> str:
    """Return a sentence on the ranks on which a failed command has applied its effect; "" for one without an effect.

    Parameters
    ----------
    effect, partial_effect : str or None
        As in `synkhronos.ranks.Command`.
    applied, busy : list of int
        Ranks that have applied the effect, and ranks that have not finished the command.
    size : int
        Number of ranks.
    """
    if effect is None:
        return ""
    if undecided := [r for r in busy if r not in applied]:
        on = f"ranks {applied}" if applied else "no rank"
        return f"{effect} on {on} so far; ranks {undecided} are still busy, and may do so yet."
    if not applied:
        return f"{effect} on no rank."
    if partial_effect is not None:
        return partial_effect
    others = [r for r in range(size) if r not in applied]
    if not others:
        return f"{effect} on all ranks."
    return f"{effect} on ranks {applied}, and not on ranks {others}: broadcast() makes them equal again."


#: In place of the exit code of a process whose status was collected elsewhere; larger than any exit code.
UNKNOWN_EXIT_CODE = 1 << 16


def describe_exit(code: int) -> str:
    """Return a description of an exit code of `os.waitstatus_to_exitcode`, such as "was killed by SIGKILL"."""
    if code == UNKNOWN_EXIT_CODE:
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
