"""What do all ranks see?

`Data`, `data`
    An array in shared memory (`array`).
`rows`
    Which rows of it each rank reads.
`dense`
    Which values are no arrays though NumPy would take them.
"""

from synkhronos.data.array import Data, data

__all__ = ["Data", "data"]
