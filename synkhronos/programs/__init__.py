"""Programs that run on every rank, each at its own pace.

``run`` sends a Python function of the user, the program, to all ranks.  Its first argument is a `RankContext`, by which
the rank communicates.  The others are local counterparts of the caller's arguments: a `LocalFunction` for a `Function`,
`LocalRows` for `Data`, and the rank's own copy of a shared variable.
"""

from synkhronos.programs.local_function import LocalFunction
from synkhronos.programs.local_rows import LocalRows
from synkhronos.programs.rank_context import Group, RankContext
from synkhronos.programs.run import run
from synkhronos.ranks.program_peers import Lock

__all__ = ["Group", "LocalFunction", "LocalRows", "Lock", "RankContext", "run"]
