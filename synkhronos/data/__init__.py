"""What do all ranks see?

`Data`, `data`
    An array in shared memory (`array`).
`FileData`, `data_file`
    One in a file (`file`).
`rows`
    Which rows of it each rank reads.
`dense`
    Which values are no arrays though NumPy would take them.
"""

from synkhronos.data.array import Data, data
from synkhronos.data.file import FileData, data_file

__all__ = ["Data", "FileData", "data", "data_file"]
