"""What ranks of other hosts print and record, on its way into the run's folder.

Their standard output goes where their host's agent's goes: through ``mpirun`` to the master, who passes it on to the
supervisor.  So that this one knows which file a line is for, its name stands before it.

`enter`
    Has this rank's lines go that way.
`Records`
    A rank's recorder.
`named`
    Takes a line apart again.
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

#: Stands before and behind a file's name; no text has it.
_MARK = "\x1e"
#: A line with the name of a file of this package before it; hosts may print anything besides.
_NAMED = re.compile(rf"{_MARK}(rank-\d+\.(?:log|jsonl)){_MARK}(.*)", re.DOTALL)
#: Bytes of a line up to which the system writes it in one go, whoever writes besides; longer ones are cut.
_MOST = 4000
#: Where `Records` write.
_standard_output = -1
_pump: subprocess.Popen[bytes] | None = None

#: Puts the name before each line that a rank prints: a process of its own, so that the last lines of a rank that is
#: killed come, too.
_CODE = f"""
import os, signal, sys
for number in {sorted(map(int, SENT_TO_ALL))}:
    signal.signal(number, signal.SIG_IGN)  # a scheduler's, at which the rank goes on
name = sys.argv[1].encode()
for line in sys.stdin.buffer:
    line = line.rstrip(b"\\n")
    for at in range(0, len(line) or 1, {_MOST}):
        os.write(1, name + line[at : at + {_MOST}] + b"\\n")
"""


def enter(rank: int) -> None:
    """Have what this process prints from now on come to the supervisor, line by line."""
    global _standard_output, _pump
    _standard_output = os.dup(1)
    command = [sys.executable, "-ISc", _CODE, f"{_MARK}rank-{rank}.log{_MARK}"]
    reading, writing = os.pipe()
    _pump = subprocess.Popen(command, stdin=reading)
    os.close(reading)
    for file in (1, 2):
        os.dup2(writing, file)
    os.close(writing)


class Records:
    """Sends a rank's records to the supervisor, which writes them as `synkhronos.training.Recorder` does."""

    def write_rank(self, rank: int, record: Mapping[str, Any]) -> None:
        """Write a rank's record."""
        if _pump is not None and _pump.poll() is not None:
            raise RuntimeError(f"the process that passes on rank {rank}'s output {cause_of_death(_pump.returncode)}")
        os.write(_standard_output, f"{_MARK}{RANK_FILE.format(rank)}{_MARK}{line_of(record)}\n".encode())


def named(line: str) -> tuple[str, str]:
    """Return the file that a line is for, and the line; no name for what hosts say besides."""
    found = _NAMED.fullmatch(line)
    return (found[1], found[2]) if found else ("", line)
