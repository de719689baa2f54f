"""Start and signal handling of child processes that exit with their parent.

Workers, loader processes and agents are such processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: Signals that a closed terminal or a scheduler sends to every process of a job.
JOB_SIGNALS = {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
_PR_SET_PDEATHSIG = 1


def spawn(
    module: str,
    function: str,
    arguments: Sequence[Any],
    fds: Sequence[int],
    from_main_thread: bool,
    environment: Mapping[str, str],
) -> int:
    """Start a new Python process that calls a function of a module, and return its process id.

    The function takes no arguments, and reads ``arguments`` as JSON from ``sys.argv[2]``.  The process inherits
    `sys.path` and the file descriptors ``fds``.  It starts with SIGINT and `JOB_SIGNALS` blocked; the function sets
    their handlers and unblocks them.  If this thread is the main thread (``from_main_thread``), the kernel kills the
    process when it ends.
    """
    path = json.dumps([os.path.abspath(folder) for folder in sys.path])
    code = "import json, os, sys; sys.path[:] = json.loads(sys.argv[1]); "
    if from_main_thread:  # the parent may die during the imports, which take long
        code += f"import ctypes; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {signal.SIGKILL:d}, 0, 0, 0); "
    code += f"os.getppid() == {os.getpid()} or os._exit(1); "
    code += f"from {module} import {function}; {function}()"
    command_line = [sys.executable, "-c", code, path, json.dumps(arguments)]
    for fd in fds:
        os.set_inheritable(fd, True)
    try:
        return os.posix_spawn(sys.executable, command_line, environment, setsigmask={signal.SIGINT, *JOB_SIGNALS})
    finally:
        for fd in fds:
            os.set_inheritable(fd, False)


def make_python_path() -> str:
    """Make the PYTHONPATH with which a process imports this copy of the library, in any working directory."""
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(path for path in paths if path)


def exit_with_parent(parent_pid: int, from_main_thread: bool) -> None:
    """Make the kernel kill this process when its parent dies, even in the middle of compiled code.

    The kernel sends the signal when the thread that started this process ends.  If that is not the parent's main
    thread, it may end before the parent.  A thread of this process then watches the parent instead; it cannot act while
    compiled code holds the GIL.
    """
    if from_main_thread:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    elif hasattr(os, "pidfd_open"):  # missing if Python was built on an old kernel
        with contextlib.suppress(ProcessLookupError):
            threading.Thread(target=_exit_with_process, args=(os.pidfd_open(parent_pid),), daemon=True).start()
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)


def _exit_with_process(process_fd: int) -> None:
    select.select([process_fd], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def ignore_job_signals() -> None:
    """Ignore `JOB_SIGNALS`: the parent handles them, and this process ends with its parent."""
    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
