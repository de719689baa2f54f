"""Fixtures of loaders that are closed after each test, and of loader processes that import nothing."""

import contextlib
import gc
import importlib
import json
import os
import signal
import sys

import pytest
from library import DEVICE
from system import is_alive

from synkhronos.loading import Loader, loader_process
from synkhronos.ranks.child_process import JOB_SIGNALS


def fork_process(module, function, arguments, fds, from_main_thread, environment):
    """Fork a process, in place of `child_process.spawn`: imports take nearly all time of a new loader process."""
    if pid := os.fork():
        return pid
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *JOB_SIGNALS})
        gc.freeze()  # a file of the parent, closed below and again when it is collected, would close another file
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fd not in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[1:] = ["[]", json.dumps(arguments)]
        getattr(importlib.import_module(module), function)()
    finally:
        os._exit(1)


@pytest.fixture
def forked_loaders(monkeypatch):
    """Fork loader processes on the host; tests without this fixture start new processes, as users do."""
    if DEVICE == "host":  # else XLA may have threads
        monkeypatch.setattr(loader_process, "spawn", fork_process)


@pytest.fixture
def load():
    """Yield a function that makes loaders; close them after the test, and check that their processes have ended."""
    loaders = []

    def make(*args, **kwargs):
        loaders.append(Loader(*args, **kwargs))
        return loaders[-1]

    yield make
    pids = [pid for loader in loaders if loader._pool for pid in loader._pool.pids]
    for loader in loaders:
        loader.close()
    assert not any(map(is_alive, pids))
