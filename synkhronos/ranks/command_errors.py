"""The exception that a failed command raises in the master, made of the reports of the ranks."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace

from synkhronos.ranks.command import Command
from synkhronos.ranks.control_memory import ControlMemory
from synkhronos.ranks.errors import Cancelled, FailureReport, WorkerError, describe_effect
from synkhronos.ranks.link import Link


def read_reports(control: ControlMemory, command_number: int, master_rank: int, link: Link) -> list[FailureReport]:
    """Return the reports of the workers whose part of a command raised an exception."""
    return [
        replace(pickle.loads(control.read_report(r)), host=link.get_host_name(r))
        for r in range(control.size)
        if r != master_rank
        and control.done[r] == command_number == control.words[ControlMemory.POSTED]
        and control.report_nbytes[r]
    ]


def make_command_error(
    command: Command,
    command_number: int,
    control: ControlMemory,
    master_error: BaseException | None,
    reports: Sequence[FailureReport],
) -> BaseException:
    """Return the exception that a failed command raises for the user.

    ``master_error`` is the exception of the master's part or None, ``reports`` are those of the workers.
    """
    size = control.size
    applied_ranks = [r for r in range(size) if control.committed[r] == command_number]
    is_posted = control.words[ControlMemory.POSTED] == command_number
    # An interrupted master does not wait for ranks that have not finished.
    busy_ranks = [r for r in range(size) if control.done[r] < command_number] if is_posted else []
    effect = describe_effect(command.effect, command.partial_effect, applied_ranks, busy_ranks, size)
    if reports and (master_error is None or isinstance(master_error, Cancelled)):
        error = WorkerError._from_reports(reports, effect)
        error.__cause__ = None
        return error
    assert master_error is not None
    waits = f"The next call waits for ranks {busy_ranks}, which are still busy with this one; close() ends them."
    for note in [*(report.summarize() for report in reports), effect, waits if busy_ranks else ""]:
        if note:
            master_error.add_note(note)
    return master_error
