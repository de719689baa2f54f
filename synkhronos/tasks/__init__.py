"""How does a rank go its own way?

`run`
    Runs a program of the user's on every rank, each at its own pace (`run`).
`Worker`
    What the program gets: its rank, and what it does together with others (`worker`).
`Group`
    The same for some of the ranks.
`Lock`
    A lock that ranks share, on one host or several.
`LocalFunction`, `LocalRows`
    A compiled function, and a Data object, on one rank alone (`local`).
"""

from synkhronos.ranks.task import Lock
from synkhronos.tasks.local import LocalFunction, LocalRows
from synkhronos.tasks.run import run
from synkhronos.tasks.worker import Group, Worker

__all__ = ["Group", "LocalFunction", "LocalRows", "Lock", "Worker", "run"]
