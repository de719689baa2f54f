"""Output of a rank on another host, as lines on standard output that name their file.

The other host may have no access to the run's folder.  The supervisor writes the lines into the files.

`synkhronos.launcher.supervision.rank_output` has a diagram.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from synkhronos.launcher.supervision.rank_output import FILE_NAME_MARK
from synkhronos.ranks.child_process import JOB_SIGNALS
from synkhronos.ranks.errors import describe_exit
from synkhronos.training.monitoring.recorder import RANK_FILE_TEMPLATE, format_record

#: Maximal number of bytes of a line's text; longer lines are split.  With the file's name a line is below PIPE_BUF, so
#: that a write to a pipe is complete, and writes of processes do not mix.
_MAX_LINE_NBYTES = 4000

#: Program of the forwarder: puts the file's name before each line of a rank.  As a process of its own, it also forwards
#: the last lines of a killed rank.
_FORWARDER_CODE = f"""
import os, signal, sys
for number in {sorted(map(int, JOB_SIGNALS))}:
    signal.signal(number, signal.SIG_IGN)  # the rank handles signals of schedulers
name = sys.argv[1].encode()
for line in sys.stdin.buffer:
    line = line.rstrip(b"\\n")
    for start in range(0, len(line) or 1, {_MAX_LINE_NBYTES}):
        os.write(1, name + line[start : start + {_MAX_LINE_NBYTES}] + b"\\n")
"""


def redirect_output_to_supervisor(rank: int) -> RemoteRecorder:
    """Redirect this process's output to the supervisor.  Return a recorder that writes to the same pipe."""
    stdout_fd = os.dup(1)
    command = [sys.executable, "-ISc", _FORWARDER_CODE, f"{FILE_NAME_MARK}rank-{rank}.log{FILE_NAME_MARK}"]
    reading, writing = os.pipe()
    forwarder = subprocess.Popen(command, stdin=reading)
    os.close(reading)
    for fd in (1, 2):
        os.dup2(writing, fd)
    os.close(writing)
    return RemoteRecorder(stdout_fd, forwarder)


class RemoteRecorder:
    """Recorder of a rank on another host; several processes may write to the supervisor's pipe at the same time."""

    def __init__(self, stdout_fd: int, forwarder: subprocess.Popen[bytes]):
        self._stdout_fd, self._forwarder = stdout_fd, forwarder

    def write_rank_record(self, rank: int, record: Mapping[str, Any]) -> None:
        """Send a record to the supervisor.  Raise RuntimeError if the forwarder has exited, and would lose output."""
        if self._forwarder.poll() is not None:
            raise RuntimeError(
                f"the process that passes on rank {rank}'s output {describe_exit(self._forwarder.returncode)}"
            )
        name = f"{FILE_NAME_MARK}{RANK_FILE_TEMPLATE.format(rank)}{FILE_NAME_MARK}"
        os.write(self._stdout_fd, f"{name}{format_record(record)}\n".encode())  # a few hundred bytes: below PIPE_BUF
