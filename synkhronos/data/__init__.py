"""What do all ranks see?

`Data`, `data`
    An array in shared memory (`array`).
`FileData`, `data_file`
    One in a file (`file`).
`PartsData`, `data_parts`
    One of which each host loads its own rows (`parts`).
`fixed`
    What these two share.
`rows`
    Which rows of it each rank reads.
"""

from synkhronos.data.array import Data, data
from synkhronos.data.file import FileData, data_file
from synkhronos.data.parts import PartsData, data_parts

__all__ = ["Data", "FileData", "PartsData", "data", "data_file", "data_parts"]
