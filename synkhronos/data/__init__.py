"""Arrays that all ranks can read.

``data`` creates an array in shared memory that can be changed.  ``data_file`` maps a file, and ``data_parts`` has each
rank load its own rows; these two are read-only.  On several hosts the rows of `Data` that a call needs are sent to the
hosts that need them; a file is read on each host, and loaded rows stay where they are.
"""

from synkhronos.data.array import Data, data
from synkhronos.data.file import FileData, data_file
from synkhronos.data.parts import PartsData, data_parts

__all__ = ["Data", "FileData", "PartsData", "data", "data_file", "data_parts"]
