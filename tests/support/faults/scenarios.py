"""Programs into which faults are injected: ``python scenarios.py NAME JSON``.

They end normally, so that exit handlers are tested, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import gc
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from typing import Any

import numpy as np
from system import list_children

import synkhronos as synk
from faults import probes
from faults.probes import (
    ReachOnUnpickling,
    Workload,
    attempt,
    block,
    fork_and_close_once,
    gather_pids,
    interrupt_the_library,
    make_expected,
    measure_footprint,
    plan_action,
    reach,
    report_event,
    report_works_and_close,
)
from synkhronos import ranks, startup
from synkhronos.ranks import Command, worker_main

N = 3

#: Points in the program by the place of the fault.
POINTS = {
    "call": "perform",
    "slice": "perform",
    "collective": "chunk",
    "distribute": "unpickle",
    "build": "build",
    "arguments": "arguments",
}


def _reap(*_: Any) -> None:
    """Reap all children that have exited, as programs with many children do."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _choose_operation(where: str, work: Workload, name: str) -> Any:
    if where in ("idle", "call", "distribute", "build", "fork"):
        return work.call
    if where == "slice":
        return lambda: work.call(num_slices=2)
    if where == "arguments":
        return lambda: ranks.get_session().run(ReachOnUnpickling())
    return lambda: _call_collective(name, work.big)


def _call_collective(name: str, variable: Any) -> Any:
    values = np.full(300_000, 2.0)
    arguments = {
        "scatter": (variable, values),
        "broadcast": (variable,),
        "set_value": (1, variable, values),
        "get_value": (1, variable),
    }.get(name, (variable, "sum") if "reduce" in name else (variable,))
    result = getattr(synk, name)(*arguments)
    return np.asarray(result).ravel()[:3].tolist() if result is not None else None


def run_planned_action(
    where: str,
    action: str = "hold:python",
    fault_ranks: Any = (2,),
    skip: int = 0,
    name: str = "all_reduce",
    point: str = "",
    urgent: bool = False,
    reaper: str = "library",
) -> None:
    """Reach a point with a planned action, report the outcome, and run further calls.

    Options: the program handles SIGURG itself (`urgent`), or reaps the workers itself (`reaper`).
    """
    probes.insert_points()
    if urgent:
        signal.signal(signal.SIGURG, lambda *_: None)
    if reaper == "system":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    elif reaper == "master":
        signal.signal(signal.SIGCHLD, _reap)
    before = fork_and_close_once()
    synk.fork(N, use_gpu=False)
    pids = gather_pids()
    work = Workload()
    if where not in ("distribute", "build"):
        assert work.call() == 15.0
    if where == "slice":
        assert work.call(num_slices=2) == 15.0
    if where == "build":
        synk.distribute()
    if where == "idle":
        report_event("ready", pids=pids)
        block("python")
    else:
        plan_action(point or POINTS[where], action, fault_ranks, skip)
        report_event("ready", pids=pids)
    report_event("outcome", **attempt(_choose_operation(where, work, name)))
    report_survival(before, work)


def report_survival(before: dict[str, Any], work: Workload | None) -> None:
    """Report whether the ranks survived, whether their results are right, and the footprint after a close."""
    if _is_session_closed():
        if work is not None:
            vars(work).clear()  # a function has references to its ranks, and thereby to their memory
        report_event("dead", before=before, after=measure_footprint())
        synk.fork(N, use_gpu=False)
        gather_pids()
        work = Workload()
    else:
        assert work is not None
        plan_action("none", "none", ())
        report_event(
            "alive",
            w=[float(w[0]) for w in synk.gather(work.w)]
            if work.f._dispatcher.distributed_session is not None
            else None,
        )
    report_works_and_close(before, work, N)


def _is_session_closed() -> bool:
    try:
        ranks.get_session()
    except RuntimeError:
        return True
    return False


def fork_with_fault(how: str, spawn: bool = False, interruptible: bool = False) -> None:
    """Fork, with a fault in the master, in worker 2, or in a child that is not a worker yet."""
    if interruptible:
        signal.signal(signal.SIGINT, interrupt_the_library)
    if how == "limit":
        _become_nobody()
    before = fork_and_close_once()
    real_fork, real_leave, real_start = os.fork, worker_main._detach_from_master, worker_main.spawn_worker
    limits = resource.getrlimit(resource.RLIMIT_NPROC)
    forked: list[int] = []

    def fork() -> int:
        if len(forked) == 2 and how == "raise":
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if len(forked) == 2 and how == "limit":
            resource.setrlimit(resource.RLIMIT_NPROC, (1, limits[1]))
        pid = real_fork()
        if pid:
            forked.append(pid)
            if len(forked) == 2 and how == "master":
                report_event("inside", pids={0: os.getpid()})
                block("python")
        elif len(forked) == 1 and how == "child":
            report_event("inside", pids={2: os.getpid()})
            block("python")
        return pid

    def leave(*arguments: Any) -> None:
        number = len(forked) + 1
        real_leave(*arguments)
        if number == 2 and how == "worker":
            report_event("inside", pids={2: os.getpid()})
            block("python")

    def spawn_worker(*arguments: Any) -> int:
        if len(forked) == 2 and how == "raise":
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        forked.append(real_start(*arguments))
        if len(forked) == 3 and how == "master":
            report_event("inside", pids={0: os.getpid()})
            block("python")
        return forked[-1]

    os.fork, worker_main._detach_from_master, worker_main.spawn_worker = fork, leave, spawn_worker
    if spawn:
        _need_fresh_processes()
    outcome = attempt(lambda: synk.fork(4, use_gpu=False))
    os.fork, worker_main._detach_from_master, worker_main.spawn_worker = real_fork, real_leave, real_start
    resource.setrlimit(resource.RLIMIT_NPROC, limits)
    report_event("outcome", **outcome)
    report_event("dead", before=before, after=measure_footprint())
    if "error" in outcome:
        synk.fork(N, use_gpu=False)
        report_works_and_close(before, Workload(), N)
        return
    synk.close()
    report_event("closed", before=before, after=measure_footprint())


def _need_fresh_processes() -> None:
    """Start JAX, so that workers must be new processes; without JAX, fake it."""
    try:
        import jax.numpy
    except ImportError:
        startup.is_fork_unsafe = lambda: True
    else:
        assert float(jax.numpy.ones(3).sum()) == 3
        assert startup.is_fork_unsafe()


def _become_nobody() -> None:
    """Become a user without other processes: limits are counted by user, and don't apply to root."""
    user = 1 << 20 | os.getpid()
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: otherwise root owns /proc/self


def limit_shared_memory() -> None:
    """Use the library with a limit on the size of a shared memory object."""
    before = fork_and_close_once()
    synk.fork(N, use_gpu=False)
    gather_pids()
    work = Workload()
    data = synk.data(np.arange(1000.0))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    report_event("data", **attempt(lambda: synk.data(np.ones(100_000))))
    report_event("grow", **attempt(functools.partial(data.set_length, 100_000)))
    report_event("kept", right=bool((np.asarray(data) == np.arange(1000.0)).all()))
    report_event("call", **attempt(lambda: work.f(np.ones(100_000))))
    report_event("distribute", **attempt(synk.distribute))
    report_event("collective", **attempt(lambda: synk.broadcast(work.big, np.ones(300_000))))
    report_event("fork", **attempt(lambda: [synk.close(), synk.fork(N, use_gpu=False)][1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    del data
    work = Workload()
    report_works_and_close(before, work, N)


def exhaust_file_descriptors(where: str, spare: int) -> None:
    """Run out of file descriptors: in the master at fork or when it makes segments, or in a worker."""
    before = fork_and_close_once()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if where == "fork":
        few = _compute_file_limit(spare), limits[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, few)
        report_event("outcome", **attempt(lambda: synk.fork(8, use_gpu=False)))
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        report_event("dead", before=before, after=measure_footprint())
        synk.fork(N, use_gpu=False)
    else:
        synk.fork(N, use_gpu=False)
        gather_pids()
        if where == "master":
            few = _compute_file_limit(spare), limits[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, few)
            arrays = [synk.data(np.full(10, i)) for i in range(60)]
            report_event("outcome", value=all(int(d[0]) == i for i, d in enumerate(arrays)), ended=time.monotonic())
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        else:
            work = Workload()
            assert work.call() == 15.0
            ranks.get_session().run(LimitOpenFiles(2, 0))
            unsent = synk.data(np.arange(6.0))
            report_event("outcome", **attempt(lambda: float(work.f(unsent)[0])))
            ranks.get_session().run(LimitOpenFiles(2, limits[0]))
            del unsent
            vars(work).clear()
    report_works_and_close(before, Workload(), N)


def _compute_file_limit(spare: int) -> int:
    """Return the limit of open files that leaves `spare` more."""
    opened = [os.dup(1) for _ in range(spare + 1)]
    for fd in opened:
        os.close(fd)
    return max(opened)


class LimitOpenFiles(Command):
    """Limit the open files of a rank."""

    def __init__(self, limited_rank: int, n_files: int):
        self.limited_rank, self.n_files = limited_rank, n_files

    def run(self, rank: ranks.Rank) -> None:
        if rank.number == self.limited_rank:
            n_files = self.n_files or _compute_file_limit(0)
            resource.setrlimit(resource.RLIMIT_NOFILE, (n_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def create_unmappable_segment() -> None:
    """Create a segment larger than the free address space of a worker."""
    before = fork_and_close_once()
    synk.fork(N, use_gpu=False)
    gather_pids()
    work = Workload()
    synk.distribute()
    ranks.get_session().run(LimitAddressSpace(2, 32 << 20))
    rows = np.ones(12_000_000)
    report_event("outcome", **attempt(lambda: work.f(rows)))
    ranks.get_session().run(LimitAddressSpace(2, -1))
    report_event("again", **attempt(work.call))
    report_works_and_close(before, work, N)


def _get_address_space() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


class LimitAddressSpace(Command):
    """Limit the address space of a rank to `spare` more bytes."""

    def __init__(self, limited_rank: int, spare: int):
        self.limited_rank, self.spare = limited_rank, spare

    def run(self, rank: ranks.Rank) -> None:
        if rank.number == self.limited_rank:
            limit = resource.RLIM_INFINITY if self.spare < 0 else _get_address_space() + self.spare
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def fork_in_thread(busy: bool = False) -> None:
    """Fork in a thread that ends, and continue in another."""
    before = fork_and_close_once()
    results: list[Any] = []

    def call_in_thread(call: Any) -> Any:
        thread = threading.Thread(target=lambda: results.append(attempt(call)))
        thread.start()
        thread.join(20)
        return results.pop()

    report_event("fork", **call_in_thread(lambda: synk.fork(N, use_gpu=False)))
    pids = gather_pids()
    work = Workload()
    assert work.call() == 15.0
    report_event("outcome", **call_in_thread(work.call))
    report_event("ready", pids=pids)
    if busy:
        plan_action("perform", "hold:python", (1, 2))
    report_event("works", right=make_expected(N), **attempt(work.check))
    call_in_thread(synk.close)
    report_event("closed", before=before, after=measure_footprint())


def fail_in_first_command() -> None:
    """Fail in the first command."""
    before = fork_and_close_once()
    probes.PLANS["arguments"] = 0, "raise:ValueError"
    session = ranks.start_session(N, 0, False)
    report_event("outcome", **attempt(lambda: session.run(ReachOnUnpickling())))
    report_event("works", right="done", **attempt(lambda: session.run(ReachOnUnpickling())))
    del session
    synk.close()
    report_event("closed", before=before, after=measure_footprint())


def call_without_standard_files() -> None:
    """Run calls with closed standard input, output and error."""
    before = fork_and_close_once()
    synk.fork(N, use_gpu=False)
    gather_pids()
    work = Workload()
    report_works_and_close(before, work, N)


class PrintOnWorkers(Command):
    """Print on every worker into a pipe without a reader."""

    def __init__(self, text: str):
        self.text = text

    def run(self, rank: ranks.Rank) -> None:
        if not rank.is_master:
            print(self.text, end="")


def print_without_reader() -> None:
    """Print in a worker when the reader of the pipe has gone, as in ``python script.py | head -1``."""
    before = fork_and_close_once()
    synk.fork(N, use_gpu=False)
    gather_pids()
    work = Workload()
    report_event("ready")
    block("python")
    # Buffered output is lost silently when the command ends; an immediate write is an error.
    report_event("buffered", **attempt(lambda: ranks.get_session().run(PrintOnWorkers("x"))))
    report_event("outcome", **attempt(lambda: ranks.get_session().run(PrintOnWorkers("x" * 100_000))))
    report_survival(before, work)
    sys.stdout = None  # otherwise the flush of its buffer fails at exit


def main() -> None:
    """Run the scenario that the harness asked for."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    scenarios = {**globals(), **_import_interrupted_scenarios()}
    words = sys.argv[1:]
    if words == ["template"]:
        words = _fork_for_requests()
    name, arguments = words[0], json.loads(words[1])
    scenarios[name](**arguments)


def _import_interrupted_scenarios() -> dict[str, Any]:
    from faults import interrupted

    return vars(interrupted)


def _fork_for_requests() -> list[str]:
    """Fork this process for each program that the harness requests; return its command line in each copy.

    Does not return in the template itself.
    """
    gc.collect()
    gc.freeze()  # otherwise each copy would search all imported objects for garbage
    channel = socket.socket(fileno=int(os.environ["FAULTS_EVENTS"]))
    while True:
        message, files, _, _ = socket.recv_fds(channel, 1 << 16, 3)
        if not message:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            channel.send(str(os.getpid()).encode())
            channel.close()
            output, events, release = files
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            probes.set_event_pipes(events, release)
            return json.loads(message)
        for fd in files:
            os.close(fd)
        channel.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


if __name__ == "__main__":
    main()
    reach("end")
    assert not list_children(os.getpid())
