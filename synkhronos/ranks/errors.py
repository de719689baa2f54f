"""Errors that ranks raise, and descriptions of failed ranks.

- A rank raises an exception: the command *fails*.  The rank writes an `ExceptionReport`; the session continues.
- A worker exits or can't start, or a host is lost: a `Death`, of a `DeathKind`.
- A death, or a rank that does not finish in time, ends the session: a `SessionFailure`.

The master raises a `WorkerError` in all of these cases.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

#: Maximal number of characters of a module's and of a class's name in a report.
_MAX_NAME_CHARS = 500


@dataclass(frozen=True)
class ExceptionReport:
    """Description of a rank's exception, from which the master makes a `WorkerError`.

    ``module`` and ``class_name`` belong to the exception's class.  Long texts are shortened, as a report has to fit
    into a slot.  ``host`` is "" if there is only one.
    """

    rank: int
    module: str
    class_name: str
    message: str
    traceback: str
    host: str = ""

    @classmethod
    def from_exception(cls, rank: int, error: BaseException, max_chars: int) -> ExceptionReport:
        """Build the report of an exception.  Message and traceback get about ``max_chars`` characters each."""
        try:
            message = str.__str__(str(error))  # __str__ may return a string of a class that can't be pickled
        except BaseException as str_error:  # a rank whose report fails would exit
            message = f"<no message: its __str__ raised {type(str_error).__qualname__}>"
        text = "".join(traceback.format_exception(error))
        error_class = type(error)
        names = str(error_class.__module__)[:_MAX_NAME_CHARS], error_class.__qualname__[:_MAX_NAME_CHARS]
        return cls(rank, *names, shorten_middle(message, max_chars), shorten_middle(text, max_chars))

    def summarize(self) -> str:
        """Return a line with the rank, the exception's class and the first line of its message."""
        return f"{describe_rank(self.rank, self.host)}: {self.class_name}: {(self.message.splitlines() or [''])[0]}"


def describe_rank(rank: int, host: str) -> str:
    """Return the name of a rank, followed by its host's name if there are several hosts."""
    return f"rank {rank}" + (f" on host {host}" if host else "")


def shorten_middle(text: str, max_chars: int) -> str:
    """Return the text, with its middle replaced by "[...]" if it is longer than ``max_chars`` characters."""
    return text if len(text) <= max_chars else f"{text[: max_chars // 2]}\n[...]\n{text[-max_chars // 2 :]}"


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
    reports : sequence of ExceptionReport
        Descriptions of the exceptions of these ranks; empty after a death.
    description : str
        Clause that names the rank and its failure, such as "rank 1 (process 12) was killed by SIGKILL".

    Notes
    -----
    After an exception the ranks stay usable.  After a death they are closed: call `synkhronos.fork` again.
    """

    def __init__(self, message: str, rank: int, reports: Sequence[ExceptionReport] = (), description: str = ""):
        super().__init__(message)
        self.rank = rank
        self.reports = reports
        self.description = description or message.partition("\n")[0]
        self.worker_traceback = reports[0].traceback if reports else ""
        self.failures = {report.rank: report.summarize() for report in reports} or {rank: message}

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.rank, self.reports, self.description)


def make_worker_error(reports: Sequence[ExceptionReport], effect: str) -> WorkerError:
    """Return the error for ranks that raised exceptions.  ``effect`` is a sentence of `describe_effect`."""
    first = reports[0]
    head = f"{describe_rank(first.rank, first.host)} raised {first.class_name}: {first.message}"
    others = "".join(f"\n  {report.summarize()}" for report in reports[1:])
    if others:
        head += f"\nOther ranks failed too:{others}"
    if effect:
        head += f"\n{effect}"
    head += f"\n\nThe traceback of rank {first.rank}:\n{first.traceback}"
    return WorkerError(head, first.rank, reports)


class DeathKind(StrEnum):
    """Kind of a `Death`.  Agents send it to the master as a string."""

    #: The process of a worker has exited.
    EXIT = "exit"
    #: A worker, or the agent of its host, could not start.
    FAILED_START = "failed start"
    #: A host, with all of its ranks, does not answer.
    LOST_HOST = "lost host"
    #: The session has ended for another reason: the connection of the hosts was lost, or a rank was late.
    ENDED_SESSION = "ended session"


class Death(NamedTuple):
    """Loss of one or more ranks, after which new workers may start in their place.

    ``rank`` is the worker's, or the first of a lost host.  ``exit_description`` is a verb phrase, such as "was killed
    by SIGKILL".  ``pid`` is 0 unless the process of the worker has exited.  ``lost_ranks`` are ranks that can't start
    again: all ranks of a lost host, or those that a host can't start.
    """

    kind: DeathKind
    rank: int
    host: str
    exit_description: str
    pid: int = 0
    lost_ranks: Sequence[int] = ()

    @classmethod
    def from_exit(cls, rank: int, host: str, pid: int, code: int) -> Death:
        """Return the death of a process with an exit code of `os.waitstatus_to_exitcode`."""
        return cls(DeathKind.EXIT, rank, host, describe_exit(code), pid)

    @classmethod
    def from_failed_start(cls, rank: int, host: str, reason: str, lost_ranks: Sequence[int] = ()) -> Death:
        """Return the death of a worker that could not start."""
        return cls(DeathKind.FAILED_START, rank, host, f"could not start: {reason}", lost_ranks=lost_ranks)

    @classmethod
    def from_lost_host(cls, ranks: range, host: str, exit_description: str) -> Death:
        """Return the death of all ranks of a host."""
        return cls(DeathKind.LOST_HOST, ranks.start, host, exit_description, lost_ranks=ranks)

    @classmethod
    def from_ended_session(cls, rank: int, reason: str) -> Death:
        """Return the death of a rank in a session that has ended, without a lost process or host that is known."""
        return cls(DeathKind.ENDED_SESSION, rank, "", f"ended: {reason}")

    @property
    def is_failed_start(self) -> bool:
        """Whether a worker, or the agent of its host, could not start."""
        return self.kind == DeathKind.FAILED_START

    def describe(self) -> str:
        """Return a clause for messages, such as "rank 1 on host b (process 12) was killed by SIGKILL"."""
        process = f" (process {self.pid})" if self.pid else ""
        return f"{describe_rank(self.rank, self.host)}{process} {self.exit_description}"


class SessionFailure(NamedTuple):
    """Failure of a worker or of a host that ends the session, with the worker's rank or the host's first one.

    ``description`` is a clause, such as "rank 1 (process 12) was killed by SIGKILL".  ``death`` is None if no process
    has died, or if new workers would fail in the same way.
    """

    description: str
    rank: int
    death: Death | None = None

    @property
    def message(self) -> str:
        """The sentence for an error."""
        has_exited = self.death is not None and self.death.kind == DeathKind.EXIT
        ended = "other workers" if has_exited else "workers"
        return f"{self.description}; the {ended} were ended."


class ReconnectError(RuntimeError):
    """The hosts of a session can't be connected again.  ``death`` names the ranks that can't start."""

    def __init__(self, message: str, death: Death):
        super().__init__(message)
        self.death = death


class Cancelled(Exception):
    """Ends this rank's part of a command after another rank has failed.  Synkhronos catches it."""


def describe_effect(
    effect_sentence: str | None,
    partial_effect_sentence: str | None,
    applied_ranks: list[int],
    busy_ranks: list[int],
    size: int,
) -> str:
    """Return a sentence on the ranks that have applied the effect of a failed command, or "" without an effect."""
    if effect_sentence is None:
        return ""
    if undecided := [r for r in busy_ranks if r not in applied_ranks]:
        applied = f"ranks {applied_ranks}" if applied_ranks else "no rank"
        return (
            f"{effect_sentence} on {applied} so far; ranks {undecided} are still running the command, and may follow."
        )
    if not applied_ranks:
        return f"{effect_sentence} on no rank."
    if partial_effect_sentence is not None:
        return partial_effect_sentence
    others = [r for r in range(size) if r not in applied_ranks]
    if not others:
        return f"{effect_sentence} on all ranks."
    return f"{effect_sentence} on ranks {applied_ranks}, and not on ranks {others}: broadcast() makes them equal again."


#: Exit code of a process whose exit status was collected elsewhere; larger than any real exit code.
UNKNOWN_EXIT_CODE = 1 << 16


def describe_exit(code: int) -> str:
    """Return a description of an exit code of `os.waitstatus_to_exitcode`, such as "was killed by SIGKILL"."""
    if code == UNKNOWN_EXIT_CODE:
        return (
            "ended with an unknown exit status (this process ignores SIGCHLD, or a call in it, such as os.wait(), has "
            "collected the status)"
        )
    if code >= 0:
        return f"exited with code {code} (see its output for the cause)"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = {
        "SIGKILL": " (the kernel does this to a process when memory runs out)",
        "SIGSEGV": " (a crash in compiled code)",
        "SIGBUS": " (a crash in compiled code, or a mapped file was truncated)",
    }.get(name, "")
    return f"was killed by {name}{hint}"
