"""Who runs, and how do they stay in step?

Processes, commands, errors, liveness, and the shared memory that ranks map.  This room knows nothing of arrays'
meaning, graphs or devices.

`fork`, `close`, `session`
    The running ranks (`session`).
`Rank`, `Command`
    What runs on each of them (`rank`).
`SharedArray`
    Where an array lies in memory that all ranks see (`segments`).
`Read`
    What a command reads of such an array (`reads`).
`PendingOperation`
    What may outlast the command that started it (`kept`).
`WorkerError`, `Cancelled`
    What went wrong (`errors`).
`available_cores`
    How many cores there are to share (`threads`).
`WeakKeys`
    What is noted of objects without keeping them (`weak`).
"""

from synkhronos.ranks.errors import Cancelled, WorkerError
from synkhronos.ranks.rank import ROOM, Command, Rank
from synkhronos.ranks.registry import PendingOperation
from synkhronos.ranks.row_access import RowAccess
from synkhronos.ranks.segments import Segment, SharedArray
from synkhronos.ranks.session import Session, check_free, close, fork, session
from synkhronos.ranks.threads import available_cores
from synkhronos.ranks.weak import WeakKeys

__all__ = [
    "ROOM",
    "Cancelled",
    "Command",
    "Rank",
    "RowAccess",
    "Segment",
    "Session",
    "SharedArray",
    "PendingOperation",
    "WeakKeys",
    "WorkerError",
    "available_cores",
    "check_free",
    "close",
    "fork",
    "session",
]
