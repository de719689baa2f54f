"""Program on the first of several hosts, into which faults are injected.

It reads one order a line from standard input.  Its argument is a folder on a file system that the hosts share, with two
named pipes: ``events``, to which it writes the outcome of each order, and each rank an event when it reaches the point
of a fault; and ``release``, by which the test releases ranks that block.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from system import wait_in_c

import synkhronos as synk
from synkhronos import ranks
from synkhronos.data_objects.data_access import create_unpublished
from synkhronos.devices import NUMPY
from synkhronos.ranks import Command
from synkhronos.ranks.pipes import PipeEnd
from synkhronos.ranks.segments import ArrayLocation

#: Length of a float64 array that hosts send in several chunks.
N_ELEMENTS = 1_000_000
#: Function that this process calls at its next chunk.
chunk_fault: Callable[[], None] | None = None

_real_finish_frame = PipeEnd.finish_frame


def _finish_frame(self: PipeEnd, nbytes: int = 0) -> None:
    global chunk_fault
    _real_finish_frame(self, nbytes)
    if chunk_fault is not None and self._frame_number > 1:
        action, chunk_fault = chunk_fault, None
        action()


PipeEnd.finish_frame = _finish_frame  # type: ignore[method-assign]  # faults are injected here


def report_event(folder: str, event: str, **data: Any) -> None:
    """Report an event to the test, in one atomic write."""
    line = json.dumps({"event": event, "time": time.monotonic(), **data}).encode() + b"\n"
    assert len(line) < select.PIPE_BUF, line
    pipe = os.open(f"{folder}/events", os.O_WRONLY)
    os.write(pipe, line)
    os.close(pipe)


def block(folder: str, rank: int) -> None:
    """Report this rank, and block without running Python, as compiled code does, until the test releases it."""
    release = os.open(f"{folder}/release", os.O_RDONLY | os.O_NONBLOCK)
    deadline = time.monotonic() + 60
    # The test interrupts the master; a signal just before the call is handled after it.
    limit = 1_000 if rank == 0 else 60_000
    report_event(folder, "inside", rank=rank)
    try:
        while not wait_in_c(release, limit):
            assert time.monotonic() < deadline
    finally:
        os.close(release)


@dataclass(frozen=True)
class FaultyCommand(Command):
    """Command in which some ranks block or raise at a place, while the others wait for them.

    The place is ``"computing"``, before an all-reduce; ``"barrier"``, before a barrier of all ranks; or
    ``"collective"``, in the middle of the all-reduce.  The action is ``"hold"`` or ``"raise"``.
    """

    folder: str
    place: str
    fault_ranks: tuple[int, ...]
    action: str

    def run(self, rank: ranks.Rank) -> bool:
        """Return whether an all-reduce over all ranks is correct."""
        global chunk_fault

        rank.barrier()
        chunk_fault = None
        if rank.number in self.fault_ranks:
            if self.place == "collective":
                chunk_fault = partial(block_or_raise, self.folder, rank.number, self.action)
            else:
                block_or_raise(self.folder, rank.number, self.action)
        if self.place == "barrier":
            rank.all_gather(rank.number)
        array = np.full(N_ELEMENTS, 1.0 + rank.number)
        NUMPY.get_communicator(rank).all_reduce(array, "sum")
        rank.barrier()
        return bool((array == sum(range(1, rank.size + 1))).all())


def exchange_with_fault(
    context: synk.RankContext, folder: str, place: str, fault_ranks: tuple[int, ...], action: str, rows: Any
) -> bool:
    """Block or raise on some ranks at a place: ``"lock"`` or ``"exchange"``; the others wait for the lock.

    At ``"exchange"`` with the action ``"hold"``, no rank blocks: all ranks exchange rows until a host fails.
    """
    context.barrier("begin")
    deadline = time.monotonic() + (60 if action == "hold" and place == "exchange" else 0)
    if context.number not in fault_ranks:
        time.sleep(0.1)
    elif place == "exchange" and action == "hold":
        report_event(folder, "inside", rank=context.number)
    while True:
        with context.lock() as lock:
            lock.pull(rows)
            if context.number in fault_ranks and (action == "raise" or place == "lock"):
                block_or_raise(folder, context.number, action)
            rows.array[...] += 1
            lock.push(rows)
        if time.monotonic() > deadline:
            return True


def block_or_raise(folder: str, rank: int, action: str) -> None:
    """Raise if the action is ``"raise"``, else block."""
    if action == "raise":
        report_event(folder, "inside", rank=rank)
        raise KeyError("a fault")
    block(folder, rank)


@dataclass(frozen=True)
class GatherProcessIds(Command):
    """Command that gathers the process ID of each rank."""

    def run(self, rank: ranks.Rank) -> list[tuple[str, int]]:
        """Return the namespace and the process ID of each rank."""
        return rank.all_gather((os.readlink("/proc/self/ns/pid"), os.getpid()))


@dataclass(frozen=True)
class SumBytes(Command):
    """Command that reads memory that all ranks share."""

    location: ArrayLocation

    def run(self, rank: ranks.Rank) -> int:
        """Return the sum of all bytes, on all ranks."""
        return sum(rank.all_gather(int(self.location.view(rank.segments).sum())))


class Orders:
    """Commands that the test can send to this program."""

    def __init__(self, folder: str):
        self.folder = folder

    def fork(self, hosts: list[str] | int, environment: dict[str, str], settings: dict[str, Any]) -> Any:
        """Fork with these variables in the environment; restore it afterwards."""
        before = dict(os.environ)
        os.environ.update(environment)
        try:
            if isinstance(hosts, int):
                return synk.fork(hosts, use_gpu=False)
            return synk.fork(hosts=hosts, use_gpu=False, **settings)
        finally:
            os.environ.clear()
            os.environ.update(before)

    def list_ranks(self) -> Any:
        """Return each rank's namespace and process ID, and mpirun's process ID."""
        session = ranks.get_session()
        return {"ranks": session.run(GatherProcessIds()), "mpirun": session._group.link._mpirun.pid}

    def run_faulty_command(self, place: str, fault_ranks: list[int], action: str) -> bool:
        """Run a command with a fault at one of `test_hosts_faults.PLACES`; "idle" is outside of the library."""
        if fault_ranks and action not in ("hold", "raise"):
            raise ValueError(f"expected 'hold' or 'raise', got {action!r}")
        if place == "idle":
            block(self.folder, 0)
            fault_ranks = []
        if place in ("lock", "exchange"):
            rows = create_unpublished((N_ELEMENTS,), "float64")  # otherwise hosts would first transfer its rows
            return all(synk.run(exchange_with_fault, self.folder, place, tuple(fault_ranks), action, rows))
        with ranks.get_session().call_lock:
            ranks.get_session().wait_until_idle()
            return ranks.get_session().run(FaultyCommand(self.folder, place, tuple(fault_ranks), action))

    def sum_shared_bytes(self, nbytes: int) -> int:
        """Let all ranks read new shared memory; return the sum of its bytes."""
        session = ranks.get_session()
        with session.call_lock:
            session.wait_until_idle()
            key = session.memory.create_segment(nbytes).key
            try:
                return session.run(SumBytes(ArrayLocation(key, "u1", (nbytes,))))
            finally:
                if session.close_reason is None:
                    session.memory.release("segment", key)

    def check_results(self) -> bool:
        """Return whether a function and the collectives return correct results."""
        from faults.probes import Workload, make_expected

        n = ranks.get_session().size
        return Workload().check() == make_expected(n)

    def close(self) -> None:
        """End the ranks."""
        synk.close()

    def close_in_handler(self) -> None:
        """End the ranks in a signal handler, in the middle of a command."""
        signal.signal(signal.SIGUSR1, lambda *_: synk.close())
        self.run_faulty_command("computing", [0], "hold")

    def exit(self) -> None:
        """Exit without calling close."""
        sys.exit(3)


def _attempt_call(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        value = call()
    except SystemExit:
        raise
    except BaseException as error:
        return {
            "ended": time.monotonic(),
            "error": type(error).__name__,
            "message": str(error)[:1500].encode("ascii", "replace").decode(),
            "rank": getattr(error, "rank", None),
        }
    return {"ended": time.monotonic(), "value": value}


def main() -> None:
    """Execute orders until end of file."""
    folder = sys.argv[1]
    orders = Orders(folder)
    report_event(folder, "started", namespace=os.readlink("/proc/self/ns/pid"))
    while line := sys.stdin.readline():
        name, arguments = json.loads(line)
        report_event(folder, "outcome", order=name, **_attempt_call(lambda: getattr(orders, name)(**arguments)))  # noqa: B023


if __name__ == "__main__":
    from hosts import fault_target  # the ranks import the commands by this name

    fault_target.main()
