"""Output and records of ranks on other hosts, which may not see the run's folder.

Everything passes through standard output.  Every line starts with the name of its file in the run's folder::

    print(...)  --> pump ---------+
                                  +--> agent --> mpirun --> master --> supervisor --> folder/rank-3.log
    RemoteRecords.write_rank() ---+                                                   folder/rank-3.jsonl

The pump is a process beside the rank, which names the lines of its output.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from synkhronos.ranks.errors import cause_of_death
from synkhronos.ranks.worker import SENT_TO_ALL
from synkhronos.training.recorder import RANK_FILE, line_of

#: Encloses a file's name at the start of a line: ASCII's record separator.
_MARK = "\x1e"
#: A line that starts with a file's name; `mpirun` and hosts print other lines too.
_NAMED_LINE = re.compile(rf"{_MARK}(rank-\d+\.(?:log|jsonl)){_MARK}(.*)", re.DOTALL)
#: Maximal bytes of a line: below PIPE_BUF, so that writes of several processes do not mix.  Longer lines are split.
_MAX_BYTES = 4000
#: File descriptor that `RemoteRecords` writes to: the standard output before `redirect_output`.
_standard_output = -1
#: Pump of this process.
_pump: subprocess.Popen[bytes] | None = None

#: Program of the pump: it puts the name before each line of a rank's output.  As a process of its own it also passes on
#: the last lines of a rank that is killed.
_PUMP_CODE = f"""
import os, signal, sys
for number in {sorted(map(int, SENT_TO_ALL))}:
    signal.signal(number, signal.SIG_IGN)  # a scheduler's: the rank handles it
name = sys.argv[1].encode()
for line in sys.stdin.buffer:
    line = line.rstrip(b"\\n")
    for at in range(0, len(line) or 1, {_MAX_BYTES}):
        os.write(1, name + line[at : at + {_MAX_BYTES}] + b"\\n")
"""


def redirect_output(rank: int) -> None:
    """Redirect this process' standard output and error to the supervisor, line by line, through a pump."""
    global _standard_output, _pump
    _standard_output = os.dup(1)
    command = [sys.executable, "-ISc", _PUMP_CODE, f"{_MARK}rank-{rank}.log{_MARK}"]
    reading, writing = os.pipe()
    _pump = subprocess.Popen(command, stdin=reading)
    os.close(reading)
    for file in (1, 2):
        os.dup2(writing, file)
    os.close(writing)


class RemoteRecords:
    """Recorder of a rank on another host: the supervisor writes its records into the run's folder."""

    def write_rank(self, rank: int, record: Mapping[str, Any]) -> None:
        """Send a record to the supervisor, for the file of a rank.

        Raises
        ------
        RuntimeError
            If the pump has exited: output of this rank would be lost.
        """
        if _pump is not None and _pump.poll() is not None:
            raise RuntimeError(f"the process that passes on rank {rank}'s output {cause_of_death(_pump.returncode)}")
        os.write(_standard_output, f"{_MARK}{RANK_FILE.format(rank)}{_MARK}{line_of(record)}\n".encode())


def split_name(line: str) -> tuple[str, str]:
    """Split a line into its file's name and its text; the name is empty for other programs' lines."""
    found = _NAMED_LINE.fullmatch(line)
    return (found[1], found[2]) if found else ("", line)
