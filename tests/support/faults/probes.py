"""Points in programs at which the harness injects faults, and the events that programs report to it.

A program plants an action at a point with `plan_action`; the master and the workers run it when they `reach` the point.
"""

from __future__ import annotations

import builtins
import gc
import json
import os
import select
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from library import PythonOp, shared, tensor
from system import list_children, wait_in_c

import synkhronos as synk
from synkhronos import ranks
from synkhronos.collectives import all_reduce_command, commands
from synkhronos.devices.shared_memory_communicator import SharedMemoryCommunicator
from synkhronos.ranks import Command
from synkhronos.ranks.control_memory import ControlMemory
from synkhronos.ranks.segments import Segment

_EVENTS = int(os.environ.get("FAULTS_EVENTS", -1))
_RELEASE = int(os.environ.get("FAULTS_RELEASE", -1))

#: This process's rank, once `gather_pids` has run.
RANK: int | None = None
#: Planned actions by point: the number of passes before it, and the action.
PLANS: dict[str, tuple[int, str]] = {}
#: Called before "interrupt".
INTERRUPTED: Any = None


# -- events --------------------------------------------------------------------------------------------------


def report_event(event: str, **data: Any) -> None:
    """Report an event to the harness, in one atomic write."""
    line = json.dumps({"event": event, "time": time.monotonic(), "pid": os.getpid(), "rank": RANK, **data})
    assert len(line) < select.PIPE_BUF, line
    os.write(_EVENTS, line.encode() + b"\n")


def set_event_pipes(events: int, release: int) -> None:
    """Set the pipes of the events and of the release, for this process and for those that it starts."""
    global _EVENTS, _RELEASE
    for name, fd in (("FAULTS_EVENTS", events), ("FAULTS_RELEASE", release)):
        os.set_inheritable(fd, True)
        os.environ[name] = str(fd)
    _EVENTS, _RELEASE = events, release


def attempt(call: Any) -> dict[str, Any]:
    """Return a call's value or error, and the time of its end."""
    try:
        value = call()
    except BaseException as error:
        return {
            "ended": time.monotonic(),
            "error": type(error).__name__,
            "message": _format_error(error, 900),
            "effect": next(
                (line for line in _format_error(error, 1 << 20).splitlines() if "updates were applied" in line), ""
            ),
            "notes": [note[:200] for note in getattr(error, "__notes__", [])],
            "worker": getattr(error, "rank", None),
            "failures": {str(r): line[:60] for r, line in getattr(error, "failures", {}).items()},
            "traceback": _trim_text(getattr(error, "worker_traceback", ""), 400),
        }
    return {"ended": time.monotonic(), "value": value}


def _format_error(error: BaseException, limit: int) -> str:
    try:
        text = str(error)
    except Exception as other:
        return f"<{other}>"
    return _trim_text(text, limit)


def _trim_text(text: str, limit: int) -> str:
    if len(text) > limit:
        text = text[: limit // 2] + " ... " + text[-limit // 2 :]
    return text.encode("ascii", "replace").decode()


def measure_footprint() -> dict[str, Any]:
    """Return counts of resources that a fault may not increase."""
    gc.collect()
    files = sorted(os.readlink(f"/proc/self/fd/{fd}").split(":")[0][-40:] for fd in _list_open_files())
    with open("/proc/self/maps") as maps:
        lines = [line for line in maps if "synkhronos" in line or "/dev/zero" in line]
    if len(lines) > 1:  # the last session's control memory is always there
        _print_holders(lines)
    # By kind: inherited anonymous memory, or an unlinked file.
    return {
        "files": files,
        "maps": sorted(line.split()[5][:9] for line in lines),
        "children": list_children(os.getpid()),
    }


def _print_holders(lines: list[str]) -> None:
    """Print the referrers of shared memory that is still mapped."""
    print(*lines, sep="", flush=True)
    for object_ in gc.get_objects():
        if isinstance(object_, ControlMemory | Segment | ranks.Session):
            holders = [h for h in gc.get_referrers(object_) if type(h).__name__ not in ("frame", "list_iterator")]
            print(f"{object_!r:.100} is held by", *(f"{type(h).__name__} {h!r:.150}" for h in holders), flush=True)


def fork_and_close_once() -> dict[str, Any]:
    """Fork and close once, since the first fork allocates for good; return the footprint after it."""
    synk.fork(1, use_gpu=False)
    synk.close()
    return measure_footprint()


def _list_open_files() -> list[int]:
    return [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


# -- points --------------------------------------------------------------------------------------------------


def reach(point: str) -> None:
    """Run the action planned for this point."""
    plan = PLANS.get(point)
    if plan is None:
        return
    skip, action = plan
    if skip:
        PLANS[point] = skip - 1, action
        return
    del PLANS[point]
    _perform_action(action, point)


def _perform_action(action: str, point: str) -> None:
    kind, _, argument = action.partition(":")
    if kind == "interrupt":
        INTERRUPTED()
        raise KeyboardInterrupt
    report_event("inside", point=point)
    if kind == "raise":
        raise getattr(builtins, argument)(f"{point} on {RANK}")
    if kind == "raise-silent":
        raise UnprintableError
    if kind == "raise-long":
        raise ValueError("\N{SNOWMAN}" * 1_000_000)
    if kind == "kill":
        os.kill(os.getpid(), signal.Signals[argument])
        time.sleep(60)
    elif kind == "_exit":
        os._exit(int(argument))
    elif kind == "exit":
        sys.exit(int(argument))
    elif kind == "hold":
        block(argument)
    else:
        raise AssertionError(action)


class UnprintableError(Exception):
    """An exception whose ``str`` raises an error."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def block(how: str) -> None:
    """Block until the harness releases this process: in Python, or in C as compiled code does, without running Python.

    Or sleep for a minute in one system call.
    """
    if how == "sleep":
        time.sleep(60)
    elif how == "python":
        deadline = time.monotonic() + 60
        while not select.select([_RELEASE], [], [], 0.01)[0]:
            if time.monotonic() > deadline:
                raise TimeoutError
    else:
        deadline = time.monotonic() + 60
        # A signal that comes just before the call does not end it: its handler runs at the next turn.
        while not wait_in_c(_RELEASE, 10_000) and time.monotonic() < deadline:
            pass


def interrupt_the_library(number: int, frame: Any) -> None:
    """Raise KeyboardInterrupt, but never in the code of this program."""
    while frame is not None:
        if os.path.dirname(synk.__file__) in frame.f_code.co_filename:
            raise KeyboardInterrupt
        frame = frame.f_back


@dataclass(frozen=True)
class GatherPids(Command):
    """Tell each process its rank."""

    def run(self, rank: ranks.Rank) -> Any:
        global RANK
        RANK = rank.number
        return rank.all_gather(os.getpid())


@dataclass(frozen=True)
class PlanAction(Command):
    """Plan an action at a point, on some ranks."""

    point: str
    action: str
    fault_ranks: tuple[int, ...]
    skip: int = 0

    def run(self, rank: ranks.Rank) -> None:
        PLANS.clear()
        if rank.number in self.fault_ranks:
            PLANS[self.point] = self.skip, self.action


def gather_pids() -> dict[int, int]:
    """Return each rank's process ID."""
    return dict(enumerate(ranks.get_session().run(GatherPids())))


def plan_action(point: str, action: str, fault_ranks: Any, skip: int = 0) -> None:
    """Plan an action at a point, on some ranks."""
    ranks.get_session().run(PlanAction(point, action, tuple(fault_ranks), skip))


def insert_points() -> None:
    """Insert points into the library: where collectives look up variables, and before each further chunk."""
    real_halves = SharedMemoryCommunicator.switch_scratch_halves

    def reach_before(get: Any) -> Any:
        def reach_and_get(self: ranks.Rank, keys: Any) -> Any:
            if sys._getframe(1).f_globals["__name__"] in (commands.__name__, all_reduce_command.__name__):
                reach("object")
            return get(self, keys)

        return reach_and_get

    for name in ("get_object", "get_objects"):
        setattr(ranks.Rank, name, reach_before(getattr(ranks.Rank, name)))

    def halves(self: SharedMemoryCommunicator) -> Any:
        reach("chunk")
        return real_halves(self)

    SharedMemoryCommunicator.switch_scratch_halves = halves


class Point(PythonOp):
    """Identity Op that reaches points."""

    def prepare_node(self, *_: Any, **__: Any) -> None:
        reach("build")

    def compute(self, x: Any) -> Any:
        reach("perform")
        return x.copy()

    def __reduce__(self) -> Any:
        reach("pickle")
        return _unpickle_point, ()


def _unpickle_point() -> Point:
    reach("unpickle")
    return Point()


class ReachOnUnpickling(Command):
    """Command whose unpickling runs a planned action."""

    def __reduce__(self) -> Any:
        return _unpickle_command, ()

    def run(self, rank: ranks.Rank) -> str:
        return "done"


def _unpickle_command() -> ReachOnUnpickling:
    reach("arguments")
    return ReachOnUnpickling()


# -- the work ------------------------------------------------------------------------------------------------


class Workload:
    """A function and shared variables, used before and after a fault."""

    def __init__(self) -> None:
        x = tensor.dvector("x")
        self.w = shared(np.zeros(2), "w")
        self.big = shared(np.zeros(300_000), "big")  # 2.4 MB: three chunks of scratch memory
        outputs = [(Point()(x).sum(), "sum"), (self.big[0] + x.sum(), None)]
        self.f = synk.function([x], outputs, updates=[(self.w, self.w + 1, "sum")], name="f")
        self.n = 0

    def call(self, **kwargs: Any) -> float:
        """Return 15.0, and add one to w on each rank, for each slice."""
        return float(self.f(np.arange(6.0), **kwargs)[0])

    def check(self) -> list[Any]:
        """Set new values; return results of a call and of collectives, equal to `make_expected`."""
        synk.broadcast([self.w, self.big], [np.ones(2), np.ones(300_000)])
        value = self.call()
        synk.all_reduce([self.w, self.big], "sum")
        n = synk.get_lengths(self.w)
        big = synk.gather(self.big)
        return [value, synk.gather(self.w).tolist(), bool((big == len(n)).all()), len(n)]


def make_expected(n: int) -> list[Any]:
    """Return the expected result of `Workload.check` on n ranks."""
    return [15.0, [[2.0 * n] * 2] * n, True, n]


def report_works_and_close(before: dict[str, Any], work: Workload, n: int) -> None:
    """Report whether a call and collectives of ``n`` ranks are right, and the footprints before and after."""
    report_event("works", right=make_expected(n), **attempt(work.check))
    synk.close()
    vars(work).clear()  # a compiled function that has failed keeps its inputs, until it is called again
    report_event("closed", before=before, after=measure_footprint())
