"""Programs that run on every rank, each at its own pace.

``run`` sends a Python function of the user, the program, to all ranks.  On each rank it is called with a `Worker`, the
rank's view of the program, and with local counterparts of its arguments: a `LocalFunction` for a `Function`,
`LocalRows` for `Data`, and the rank's own copy of a shared variable.
"""

from synkhronos.programs.local_function import LocalFunction, LocalRows
from synkhronos.programs.run import run
from synkhronos.programs.worker import Group, Worker
from synkhronos.ranks.rank_program import Lock

__all__ = ["Group", "LocalFunction", "LocalRows", "Lock", "Worker", "run"]
