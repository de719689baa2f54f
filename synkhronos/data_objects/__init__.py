"""Arrays that all ranks can read.

``data`` creates an array in shared memory.  ``data_file`` maps a file, and ``data_parts`` loads rows on the ranks that
use them; these two are read-only.  With several hosts, rows of `Data` are sent to the hosts that read them.  A file is
read on each host, and loaded rows stay on their host.
"""

from synkhronos.data_objects.array import Data, data
from synkhronos.data_objects.file import FileData, data_file
from synkhronos.data_objects.parts import PartsData, data_parts

__all__ = ["Data", "FileData", "PartsData", "data", "data_file", "data_parts"]
