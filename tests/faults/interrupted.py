"""The programs that Ctrl-C is pressed in."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from typing import Any

import numpy as np

import synkhronos as synk
from faults import inside
from faults.inside import Work, attempt, footprint, hold, know, plant, reach, right, start, tell
from synkhronos import ranks
from synkhronos.ranks import worker

N = 3


def at_a_place(where: str, on: Any, how: str = "python", unhandled: bool = False) -> None:
    """Hold on some ranks, in a call, in a collective, or while distributing or compiling, and work on after it."""
    inside.instrument()
    before = start()
    synk.fork(N, use_gpu=False)
    know()
    work = Work()
    if where in ("call", "collective"):
        assert work.call() == 15.0
    point = {"call": "perform", "collective": "chunk", "distribute": "unpickle", "pickle": "pickle", "build": "build"}
    plant(point[where], f"hold:{how}", on)
    if not unhandled:
        signal.signal(signal.SIGINT, _interrupt_the_library)
    calls = {"collective": lambda: synk.all_reduce(work.big, "sum"), "distribute": synk.distribute}
    call = calls.get(where, synk.distribute if where == "pickle" else work.call)
    if unhandled:
        call()
    tell("outcome", **attempt(call))
    hold("python")  # until the harness will press no more
    tell("works", right=right(N), **attempt(work.check))
    synk.close()
    vars(work).clear()
    tell("closed", before=before, after=footprint())


def _interrupt_the_library(number: int, frame: Any) -> None:
    """Raise where Ctrl-C would, but not in this program's own code, to which nobody promises anything."""
    while frame is not None:
        if os.path.dirname(synk.__file__) in frame.f_code.co_filename:
            raise KeyboardInterrupt
        frame = frame.f_back


def while_forking(where: str) -> None:
    """Hold in the master between two workers, or in a worker that starts."""
    signal.signal(signal.SIGINT, _interrupt_the_library)
    before = start()
    real_fork, real_leave = os.fork, worker._leave_the_masters_things
    forked: list[int] = []

    def fork() -> int:
        pid = real_fork()
        if pid:
            forked.append(pid)
            if len(forked) == 2 and where == "master":
                tell("inside")
                hold("python")
        elif len(forked) == 1 and where == "child":  # it has not parted with the master's handlers yet
            tell("inside")
            hold("python")
        return pid

    def leave(*arguments: Any) -> None:
        real_leave(*arguments)
        if len(forked) == 1 and where == "worker":
            tell("inside")
            hold("python")

    os.fork, worker._leave_the_masters_things = fork, leave
    outcome = attempt(lambda: synk.fork(4, use_gpu=False))
    os.fork, worker._leave_the_masters_things = real_fork, real_leave
    tell("outcome", **outcome)
    tell("dead", before=before, after=footprint())
    synk.fork(N, use_gpu=False)
    work = Work()
    tell("works", right=right(N), **attempt(work.check))
    synk.close()
    vars(work).clear()
    tell("closed", before=before, after=footprint())


def while_closing(where: str) -> None:
    """Hold in the master while it waits for workers to end, or close with a worker that is still busy."""
    signal.signal(signal.SIGINT, _interrupt_the_library)
    before = start()
    synk.fork(N, use_gpu=False)
    know()
    work = Work()
    assert work.call() == 15.0
    if where == "waiting":
        module = sys.modules[ranks.Session.__module__]  # `ranks.session` is a function
        real = module._ended

        def ended(pid: int) -> int | None:
            reach("ended")
            return real(pid)

        module._ended = ended
        inside.PLANS["ended"] = 0, "hold:python"
    else:
        plant("perform", "hold:compiled", (2,))
        tell("first", **attempt(work.call))
        join = ranks.Session._join

        def joined(self: ranks.Session, limit: float | None = None) -> None:
            if limit is not None:
                tell("inside")  # in the library, and not on the way there
            join(self, limit)

        ranks.Session._join = joined  # type: ignore[method-assign]
    tell("outcome", **attempt(synk.close))
    vars(work).clear()
    tell("dead", before=before, after=footprint())
    synk.fork(N, use_gpu=False)
    work = Work()
    tell("works", right=right(N), **attempt(work.check))
    synk.close()
    vars(work).clear()
    tell("closed", before=before, after=footprint())


def at_random(seed: int, times: int) -> None:
    """Press Ctrl-C at random moments, in all that takes several steps, and check each result that comes."""
    before = start()
    chance = random.Random(seed)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    interrupted = wrong = 0

    def press(within: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, max(1e-6, chance.random() * within))

    def guarded(call: Any) -> Any:
        nonlocal interrupted
        try:
            try:
                return call()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupted += 1
            return None

    took = time.monotonic()
    synk.fork(2, use_gpu=False)
    synk.close()
    took = time.monotonic() - took

    def fork_and_close() -> None:
        press(took * 1.2)
        synk.fork(2, use_gpu=False)
        synk.close()

    for _ in range(times):
        guarded(fork_and_close)
        synk.close()
        assert not inside.children()
    synk.fork(2, use_gpu=False)
    work = Work()
    work.check()
    kept = [synk.data(np.ones(10))]
    for i in range(times * 4):
        rows = chance.randrange(1, 4000)

        def call(rows: int = rows, i: int = i) -> Any:
            press(0.003)
            if i % 3 == 0:
                kept[:] = [synk.data(np.ones(rows)), synk.data(np.ones(5))]
            return float(work.f(kept[0] if i % 2 else np.ones(rows))[0]), rows if not i % 2 else len(kept[0])

        value = guarded(call)
        wrong += value is not None and value[0] != value[1]
    tell("outcome", interrupted=interrupted, wrong=int(wrong))
    tell("works", right=right(2), **attempt(work.check))
    ranks.session().flush()
    kept.clear()
    synk.close()
    vars(work).clear()
    tell("closed", before=before, after=footprint())
