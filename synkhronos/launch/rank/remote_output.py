"""Output of a rank on another host, which may not see the run's folder: lines on standard output that name their file.

`synkhronos.launch.supervision.rank_output` has a diagram.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from synkhronos.launch.supervision.rank_output import FILE_NAME_MARK
from synkhronos.ranks.child_process import JOB_SIGNALS
from synkhronos.ranks.errors import describe_exit
from synkhronos.training.monitoring.recorder import RANK_FILE, format_record

#: Maximal number of bytes of a line; longer lines are split.  Below PIPE_BUF, so writes of processes do not mix.
_MAX_LINE_BYTES = 4000
#: File descriptor of `RemoteRecorder`: the standard output before `redirect_output`.
_standard_output = -1
#: Forwarder of this process.
_forwarder: subprocess.Popen[bytes] | None = None

#: Program of the forwarder: puts the file's name before each line of a rank.  It is a process, so that it also forwards
#: the last lines of a killed rank.
_FORWARDER_CODE = f"""
import os, signal, sys
for number in {sorted(map(int, JOB_SIGNALS))}:
    signal.signal(number, signal.SIG_IGN)  # the rank handles signals of schedulers
name = sys.argv[1].encode()
for line in sys.stdin.buffer:
    line = line.rstrip(b"\\n")
    for start in range(0, len(line) or 1, {_MAX_LINE_BYTES}):
        os.write(1, name + line[start : start + {_MAX_LINE_BYTES}] + b"\\n")
"""


def redirect_output(rank: int) -> None:
    """Redirect this process's standard output and error through a forwarder to the supervisor."""
    global _standard_output, _forwarder
    _standard_output = os.dup(1)
    command = [sys.executable, "-ISc", _FORWARDER_CODE, f"{FILE_NAME_MARK}rank-{rank}.log{FILE_NAME_MARK}"]
    reading, writing = os.pipe()
    _forwarder = subprocess.Popen(command, stdin=reading)
    os.close(reading)
    for file in (1, 2):
        os.dup2(writing, file)
    os.close(writing)


class RemoteRecorder:
    """Recorder of a rank on another host: the supervisor writes its records into the run's folder."""

    def write_rank_record(self, rank: int, record: Mapping[str, Any]) -> None:
        """Send a record to the supervisor, for the file of a rank.

        Raises
        ------
        RuntimeError
            If the forwarder has exited: output of this rank would be lost.
        """
        if _forwarder is not None and _forwarder.poll() is not None:
            raise RuntimeError(
                f"the process that passes on rank {rank}'s output {describe_exit(_forwarder.returncode)}"
            )
        os.write(
            _standard_output,
            f"{FILE_NAME_MARK}{RANK_FILE.format(rank)}{FILE_NAME_MARK}{format_record(record)}\n".encode(),
        )
