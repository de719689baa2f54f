"""Processes that run commands together: commands, barriers, shared memory, liveness and errors.

A *host* is a machine; its ranks share memory.  This package is independent of graphs and of the meaning of arrays.
"""

from synkhronos.ranks.command import Command, RowAccess
from synkhronos.ranks.current_session import (
    check_no_session,
    close_session,
    get_inherited_session,
    get_last_session,
    get_session,
    start_session,
)
from synkhronos.ranks.errors import Cancelled, Death, WorkerError
from synkhronos.ranks.pending_operation import PendingOperation
from synkhronos.ranks.rank import MAX_PAYLOAD_NBYTES, Rank
from synkhronos.ranks.segments import ArrayLocation, Segment
from synkhronos.ranks.session import Session
from synkhronos.ranks.thread_limit import count_available_cores

__all__ = [
    "MAX_PAYLOAD_NBYTES",
    "Cancelled",
    "Command",
    "Death",
    "Rank",
    "RowAccess",
    "Segment",
    "Session",
    "ArrayLocation",
    "PendingOperation",
    "WorkerError",
    "count_available_cores",
    "check_no_session",
    "close_session",
    "get_inherited_session",
    "get_session",
    "get_last_session",
    "start_session",
]
