"""What NCCL says while it connects.

`NcclLog`
    Keeps it in memory, and finds in it what an error has to say.
"""

from __future__ import annotations

import os
import re
from typing import Self

#: As in "... NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>"; newer versions have no blank before the colon.
_INTERFACE = re.compile(r"Bootstrap ?: Using (\S+?)(?:<\d+>)?$", re.MULTILINE)
_WARNING = re.compile(r"NCCL WARN (.*)")
#: Warnings that an error shows, at most.
_MOST = 3


class NcclLog:
    """NCCL's log, for the time of a ``with`` block in which it connects.

    NCCL reads once, when it starts in this process, how much it is to say and where; a user who has set NCCL_DEBUG gets
    what they want, and nothing is known here.

    Parameters
    ----------
    is_wanted : bool
        Whether to keep it.
    """

    _file: int | None = None

    def __init__(self, is_wanted: bool):
        self._is_wanted = is_wanted and "NCCL_DEBUG" not in os.environ
        self._begin = 0

    def __enter__(self) -> Self:
        if self._is_wanted:
            if NcclLog._file is None:
                NcclLog._file = os.memfd_create("nccl")
            self._begin = os.fstat(NcclLog._file).st_size
            os.environ["NCCL_DEBUG"] = "INFO"
            os.environ["NCCL_DEBUG_SUBSYS"] = "INIT,BOOTSTRAP,NET"
            os.environ["NCCL_DEBUG_FILE"] = f"/proc/self/fd/{NcclLog._file}"
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_wanted:
            for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
                os.environ.pop(name, None)

    def interface(self) -> str:
        """Return the interface by which this process meets the others, with its address; nothing if it isn't known."""
        found = _INTERFACE.findall(self._text(0))  # NCCL looks for one once
        return found[-1] if found else ""

    def warnings(self) -> str:
        """Return the last warnings of this block, to be put behind a message."""
        found = _WARNING.findall(self._text(self._begin))[-_MOST:]
        return f". NCCL's own words: {'; '.join(found)}" if found else ""

    def _text(self, begin: int) -> str:
        if not self._is_wanted or NcclLog._file is None:
            return ""
        size = os.fstat(NcclLog._file).st_size
        return os.pread(NcclLog._file, size - begin, begin).decode(errors="replace")
