"""Recording of NCCL's log while it connects, for error messages."""

from __future__ import annotations

import os
import re
from typing import Self

#: As in "... NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>"; newer versions have no blank before the colon.
_INTERFACE = re.compile(r"Bootstrap ?: Using (\S+?)(?:<\d+>)?$", re.MULTILINE)
_WARNING = re.compile(r"NCCL WARN (.*)")
#: Maximal number of warnings that a message quotes.
_MAX_WARNINGS = 3


class NcclLog:
    """Context manager that records NCCL's log in memory while NCCL connects, if ``is_enabled``.

    NCCL reads its settings of the log once per process.  If the user has set NCCL_DEBUG, nothing is recorded, and the
    user's settings apply.
    """

    _file: int | None = None

    def __init__(self, is_enabled: bool):
        self._is_enabled = is_enabled and "NCCL_DEBUG" not in os.environ
        self._start = 0

    def __enter__(self) -> Self:
        if self._is_enabled:
            if NcclLog._file is None:
                NcclLog._file = os.memfd_create("nccl")
            self._start = os.fstat(NcclLog._file).st_size
            os.environ["NCCL_DEBUG"] = "INFO"
            os.environ["NCCL_DEBUG_SUBSYS"] = "INIT,BOOTSTRAP,NET"
            os.environ["NCCL_DEBUG_FILE"] = f"/proc/self/fd/{NcclLog._file}"
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_enabled:
            for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
                os.environ.pop(name, None)

    def find_interface(self) -> str:
        """Return the network interface, with its address, by which NCCL reaches the other ranks, or "" if unknown."""
        interfaces = _INTERFACE.findall(self._read(0))  # from the start: NCCL logs it once per process
        return interfaces[-1] if interfaces else ""

    def quote_warnings(self) -> str:
        """Return a sentence with the last warnings of this block, to append to a message, or "" if there are none."""
        messages = _WARNING.findall(self._read(self._start))[-_MAX_WARNINGS:]
        return f". NCCL's warnings: {'; '.join(messages)}" if messages else ""

    def _read(self, start: int) -> str:
        if not self._is_enabled or NcclLog._file is None:
            return ""
        size = os.fstat(NcclLog._file).st_size
        return os.pread(NcclLog._file, size - start, start).decode(errors="replace")
