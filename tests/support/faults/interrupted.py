"""Programs that are interrupted by SIGINT."""

from __future__ import annotations

import dis
import gc
import os
import signal
import sys
import threading
from typing import Any

import numpy as np
from library import shared, tensor
from system import LIMIT_SECONDS

import synkhronos as synk
from faults import probes
from faults.probes import (
    Workload,
    attempt,
    block,
    fork_and_close_once,
    gather_pids,
    interrupt_the_library,
    make_expected,
    measure_footprint,
    plan_action,
    report_event,
    report_works_and_close,
)
from synkhronos import ranks
from synkhronos.ranks import worker_processes
from synkhronos.ranks.command_runner import CommandRunner
from synkhronos.training import make_train_function, updates

N = 3


def interrupt_blocked_ranks(where: str, fault_ranks: Any, how: str = "python", unhandled: bool = False) -> None:
    """Block on some ranks, in a call, in a collective, or while distributing or compiling; then run further calls."""
    probes.insert_points()
    before = fork_and_close_once()
    synk.fork(N, use_gpu=False)
    gather_pids()
    work = Workload()
    if where in ("call", "collective"):
        assert work.call() == 15.0
    point = {"call": "perform", "collective": "chunk", "distribute": "unpickle", "pickle": "pickle", "build": "build"}
    if 0 in fault_ranks:  # the master defers signals where it copies chunks
        point["collective"] = "object"
    plan_action(point[where], f"hold:{how}", fault_ranks)
    if not unhandled:
        signal.signal(signal.SIGINT, interrupt_the_library)
    calls = {"collective": lambda: synk.all_reduce(work.big, "sum"), "distribute": synk.distribute}
    call = calls.get(where, synk.distribute if where == "pickle" else work.call)
    if unhandled:
        call()
    report_event("outcome", **attempt(call))
    block("python")  # until the harness sends no more signals
    report_works_and_close(before, work, N)


def interrupt_close(where: str) -> None:
    """Block in the master while it waits for workers to end, or close with a busy worker."""
    signal.signal(signal.SIGINT, interrupt_the_library)
    grace_seconds, ranks.process_group.GRACE_SECONDS = ranks.process_group.GRACE_SECONDS, 10 * LIMIT_SECONDS
    before = fork_and_close_once()
    exit_code = worker_processes._collect_exit_code
    synk.fork(N, use_gpu=False)
    gather_pids()
    work = Workload()
    assert work.call() == 15.0
    if where == "waiting":
        looks: list[int] = []

        def not_yet(pid: int) -> int | None:
            if not looks:
                report_event("inside")
            looks.append(pid)
            return None

        worker_processes._collect_exit_code = not_yet
    else:
        plan_action("perform", "hold:compiled", (2,))
        report_event("first", **attempt(work.call))
        join = CommandRunner._wait_for_completion

        def joined(self: CommandRunner, limit: float | None = None) -> None:
            if limit is not None:
                report_event("inside")  # in the library, not before it
            join(self, limit)

        CommandRunner._wait_for_completion = joined  # type: ignore[method-assign]
    report_event("outcome", **attempt(synk.close))
    worker_processes._collect_exit_code, ranks.process_group.GRACE_SECONDS = exit_code, grace_seconds
    vars(work).clear()
    report_event("dead", before=before, after=measure_footprint())
    synk.fork(N, use_gpu=False)
    work = Workload()
    report_works_and_close(before, work, N)


class SignalInjector:
    """Raises SIGINT when the interpreter checks for signals in the library's code for the ``at``-th time from now on.

    It checks at the start of a function, after a call of a C function, and at backward jumps, but not after a call
    of a Python function, on which the exception tables of ``with`` statements rely.
    """

    CHECKING_INSTRUCTIONS = ("RESUME", "CALL", "JUMP_BACKWARD")

    def __init__(self, at: int, number: int = signal.SIGINT):
        self.at = self.left = at
        self.number = number
        self.pid = os.getpid()
        self.place = ""
        self._last: dict[int, str] = {}

    def begin(self) -> None:
        """Start tracing, even in the middle of a call of the library."""
        frame: Any = sys._getframe()
        while frame is not None:
            if (trace := self._trace_call(frame, "call", None)) is not None:
                frame.f_trace = trace
            frame = frame.f_back
        sys.settrace(self._trace_call)

    def _trace_call(self, frame: Any, event: str, argument: Any) -> Any:
        if frame.f_back is not None and frame.f_code.co_name not in ("__init__", "__new__"):  # these are called from C
            self._last[id(frame.f_back)] = ""
        if not frame.f_code.co_filename.startswith(os.path.dirname(synk.__file__)):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._last[id(frame)] = ""
        return self._trace_instruction

    def _trace_instruction(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "opcode":
            before, now = self._last[id(frame)], dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if now in ("CACHE", "PRECALL"):
                return self._trace_instruction
            self._last[id(frame)] = now
            if before.startswith(self.CHECKING_INSTRUCTIONS):
                self.left -= 1
                if self.left == -1 and os.getpid() == self.pid:  # workers inherit the trace function
                    self.place = f"{frame.f_code.co_qualname}:{frame.f_lineno}, {frame.f_code.co_filename}"
                    signal.raise_signal(self.number)
        return self._trace_instruction


class TimeLimit(Exception):
    """Raised by the handler of a time limit."""


def _raise_time_limit(number: int, frame: Any) -> None:
    raise TimeLimit


def interrupt_at_sampled_moments(operation: str, first: int = 0, step: int = 1, limit: bool = False) -> None:
    """Interrupt an action at moments at which Python handles signals, one at a time; check all ranks after each.

    The moments are every ``step``-th from ``first`` on.  With ``limit`` a time limit expires instead, which raises another
    exception from another signal.  Reported are the numbers of interrupts, of those that were not raised ("lost"), and of
    wrong exceptions and results ("wrong").
    """
    probes.insert_points()
    signal.signal(signal.SIGALRM, _raise_time_limit)
    before = fork_and_close_once()
    lost, wrong, n_interrupts = [], [], 0
    state: dict[str, Any] = {}

    def forked() -> None:
        if _get_session_or_none() is None:
            state.clear()
            synk.fork(2, use_gpu=False)
        if not state:  # or a fork that was interrupted at its end
            state["work"] = Workload()
            state["work"].check()
            if operation == "step":
                x, y, p = tensor.dvector("x"), tensor.dvector("y"), shared(np.zeros(2), "p")
                loss = (p * (x * y).mean()).sum()
                state["train"], state["p"] = make_train_function(loss, [p], x, y, updates.sgd, learning_rate=1.0), p
                state["train"](np.arange(6.0), np.ones(6))

    actions = {
        "call": lambda: state["work"].call(),
        "slices": lambda: state["work"].call(num_slices=2),
        "rows": lambda: state["work"].f(np.arange(9.0), batch=[0, 3, 5]),
        "first call": lambda: Workload().call(),
        "collective": lambda: synk.all_reduce(state["work"].big, "sum"),
        "small collective": lambda: synk.all_reduce(state["work"].w, "sum"),
        "step": lambda: state["train"](np.arange(6.0), np.ones(6)),
        "data": lambda: synk.data(np.ones(9)).set_length(5000),
        "free": lambda: synk.data(np.ones(5000)).free_memory(),
        "broadcast": lambda: synk.broadcast(state["work"].big, np.ones(state["work"].big.get_value().shape)),
        "fork": lambda: synk.fork(2, use_gpu=False),
        "close": synk.close,
        "call again": lambda: state["work"].call(),
        "collective again": lambda: synk.all_reduce(state["work"].big, "sum"),
    }
    for k in range(first, 1_000_000, step):
        if operation == "fork":
            state.clear()
            synk.close()
        else:
            forked()
        error = None
        injector = SignalInjector(k, signal.SIGALRM if limit else signal.SIGINT)
        if operation.endswith("again"):  # first in the master's part, then at each later moment
            probes.PLANS["perform" if operation.startswith("call") else "chunk"] = 0, "interrupt"
            probes.INTERRUPTED = injector.begin
        else:
            injector.begin()
        try:
            actions[operation]()
        except BaseException as caught:
            error = repr(caught)
        finally:
            sys.settrace(None)
        if not injector.place:  # no signal was sent any more
            break
        n_interrupts += 1
        if error is None:
            lost.append(injector.place)
        elif error != ("TimeLimit()" if limit else "KeyboardInterrupt()"):
            wrong.append((error, injector.place))
        if operation == "fork" and _get_session_or_none() is not None:
            wrong.append(("ranks run after a fork that was interrupted", injector.place))
        forked()
        if not _can_other_threads_call():
            wrong.append(("the turn was kept", injector.place))
            synk.close()
            forked()
        if operation in ("collective", "small collective", "step"):  # on all ranks or on none
            variable = (
                state["p"]
                if operation == "step"
                else state["work"].big
                if operation == "collective"
                else state["work"].w
            )
            if len(values := np.unique(synk.gather(variable))) > 1:
                wrong.append((f"ranks have {values}", injector.place))
                synk.broadcast(variable)
        works = attempt(state["work"].check)
        if works.get("value") != make_expected(2):
            wrong.append((str(works), injector.place))
    state.clear()
    gc.collect()
    synk.close()
    print("lost:", *lost, sep="\n")
    print("wrong:", *wrong, sep="\n")
    report_event("outcome", n_interrupts=n_interrupts, lost=len(lost), wrong=len(wrong))
    report_event("closed", before=before, after=measure_footprint())


def _can_other_threads_call() -> bool:
    """Return whether another thread could run a command now."""
    turn, acquired = ranks.get_session().call_lock, []

    def take() -> None:
        if turn.acquire(timeout=1):
            acquired.append(True)
            turn.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return bool(acquired)


def _get_session_or_none() -> Any:
    try:
        return ranks.get_session()
    except RuntimeError:
        return None


def receive_signal(name: str, how: str) -> None:
    """Receive a signal, as all processes of this program do, in a loop of collectives; the handler sets a flag."""
    number, received = signal.Signals[name], []
    handler: Any = signal.SIG_IGN if how == "ignored" else lambda *_: received.append(1)
    if how in ("handled", "ignored"):
        signal.signal(number, handler)
    before = fork_and_close_once()
    synk.fork(N, use_gpu=False)
    if how == "handled since":
        signal.signal(number, handler)
    work = Workload()
    work.check()
    report_event("ready")
    block("python")
    for _ in range(5):
        work.call()
    report_event("handled", count=len(received))
    report_works_and_close(before, work, N)
