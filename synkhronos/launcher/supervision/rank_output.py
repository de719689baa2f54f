"""Output of ranks: from their pipes to the logs in the run's folder and to the console.

Ranks of this host write into pipes of the supervisor.  Another host may have no access to the run's folder, so the
output and the records of its ranks pass through standard output (`remote_output`).  There each line starts with
the name of its file in the folder::

    rank 0: print(...) -----------------------------------> supervisor: LineSplitter --> OutputWriter --> rank-0.log
    rank 3: print(...)  --> forwarder ----+                      ^                                        rank-3.log
                                          +--> agent --> mpirun -+                                        rank-3.jsonl
     RemoteRecorder.write_rank_record() --+

Invariant: no failed write of the supervisor ends a run.  A console that is closed, full or unread, and a log on a full
disk, lose lines.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from synkhronos.training.monitoring.recorder import append_line

#: Maximal number of bytes of a line; longer lines are split, which limits memory.
_MAX_LINE_NBYTES = 1 << 20
#: Delimiter before and after a file's name at the start of a line: ASCII's record separator.
FILE_NAME_MARK = "\x1e"
#: Pattern of lines that start with a file's name; `mpirun` and other programs print lines without one.
_NAMED_LINE = re.compile(rf"{FILE_NAME_MARK}(rank-\d+\.(?:log|jsonl)){FILE_NAME_MARK}(.*)", re.DOTALL)


def split_file_name(line: str) -> tuple[str, str]:
    """Split a line into the name of its file and its text.  The name is empty for lines of other programs."""
    match = _NAMED_LINE.fullmatch(line)
    return (match[1], match[2]) if match else ("", line)


def open_standard_streams() -> None:
    """Open ``/dev/null`` for closed standard streams, whose file descriptors pipes would get otherwise."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "w", closefd=False))


class Console:
    """A standard stream of any encoding, which may be closed, full or unread.

    A full pipe, such as the pipe of a stopped terminal, blocks `write`, and thus the ranks, until ``is_over()``.
    """

    def __init__(self, fd: int, is_over: Callable[[], bool]):
        stream = sys.stdout if fd == 1 else sys.stderr
        self._fd, self._is_over = fd, is_over
        self._encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> None:
        """Write a text; drop it if the stream is closed or the run is over."""
        view = memoryview(text.encode(self._encoding, "backslashreplace"))
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        with contextlib.suppress(OSError):
            while view:
                if poll.poll(200):  # a ready pipe accepts this many bytes without blocking
                    view = view[os.write(self._fd, view[: select.PIPE_BUF]) :]
                elif self._is_over():
                    return


class LineSplitter:
    """Splitter of a pipe's bytes into lines, in linear time.

    The lines belong to the file ``name``.  If ``name`` is empty, each line names its file (see `split_file_name`).
    """

    def __init__(self, name: str, output: OutputWriter):
        self._name, self._output = name, output
        self._partial_line = bytearray()

    def feed(self, data: bytes) -> bool:
        """Write the complete lines, and at the end of the pipe the rest.  Return False at the end."""
        *line_ends, rest = data.split(b"\n")
        for line_end in line_ends:
            self._write_line(line_end)
        self._partial_line += rest
        if len(self._partial_line) > (_MAX_LINE_NBYTES if data else 0):
            self._write_line(b"")
        return bool(data)

    def _write_line(self, line_end: bytes) -> None:
        text = (self._partial_line + line_end).decode("utf-8", "backslashreplace")
        self._partial_line.clear()
        self._output.write(*((self._name, text) if self._name else split_file_name(text)))


class OutputWriter:
    """Writer of lines to the logs in the run's folder, and to the console with the rank before each line."""

    def __init__(self, folder: Path, is_resumed: bool, console: Console, error_console: Console):
        self._folder, self._console, self._error_console = folder, console, error_console
        self._mode = "ab+" if is_resumed else "wb+"
        self._logs: dict[str, IO[bytes]] = {}
        self._files_with_lost_lines: set[str] = set()

    def write(self, name: str, text: str) -> None:
        """Write a line to the file ``name``, and to the console unless it is a record."""
        name = name or "hosts.log"
        path, is_record = self._folder / name, name.endswith(".jsonl")
        try:
            if is_record:  # of a rank of another host; ranks here write their records
                with open(path, "ab+", buffering=0) as file:
                    append_line(file, text)
            else:
                if name not in self._logs:
                    self._logs[name] = open(path, self._mode, buffering=0)
                append_line(self._logs[name], text)
        except OSError as error:
            if name not in self._files_with_lost_lines:
                self._files_with_lost_lines.add(name)
                self._error_console.write(f"{path} lacks lines: {error}\n")
        if not is_record:
            self._console.write(f"[{path.stem.replace('-', ' ')}] {text}\n")

    def close(self) -> None:
        """Close the files."""
        for file in self._logs.values():
            file.close()
