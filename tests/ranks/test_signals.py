"""Signals of the master: interrupts of commands, and signals that are deferred."""

import importlib
import mmap
import os
import signal
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from rank_commands import GatherMessages, Hold, Sleep
from system import time_limit

from synkhronos import ranks
from synkhronos.ranks import Command
from synkhronos.ranks.control_memory import Semaphore
from synkhronos.ranks.interrupts import MAX_DEFERRAL_SECONDS, defer_signals, restore_handler


def test_wait_ignores_wall_clock_changes(monkeypatch):
    semaphore = Semaphore(mmap.mmap(-1, mmap.PAGESIZE), 0, False)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    began = time.monotonic()
    with time_limit():
        assert not semaphore.wait_for_wakeup(0.1)
    assert time.monotonic() - began >= 0.1


@dataclass(frozen=True)
class GatherSignalHandlers(Command):
    """Command that gathers the ranks' signal handlers and standard inputs."""

    def run(self, rank):
        return rank.all_gather(
            (
                signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
                signal.getsignal(signal.SIGALRM) == signal.SIG_DFL,
                os.readlink("/proc/self/fd/0"),
            )
        )


@pytest.mark.parametrize("held_ranks", ["master", "workers", "all"])
def test_command_after_an_interrupt_works(session_of_two, held_ranks):
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    Hold.prepare()
    with time_limit(), pytest.raises(KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        session_of_two.run(Hold(held_ranks))
    Hold.release()
    assert session_of_two.run(GatherMessages((3,))) == 2


@pytest.mark.slow
def test_close_after_an_interrupt_is_quick(session_of_two):
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        session_of_two.run(Sleep(60, "workers"))
    with time_limit():
        ranks.close_session()
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_workers_reset_signal_handlers_and_stdin(session_of_two):
    assert session_of_two.run(GatherSignalHandlers())[1] == (True, True, os.devnull)


class SignalRaised(Exception):
    """Raised by a signal handler."""


@pytest.mark.parametrize("inside", [False, True])
def test_defer_signals_raises_later_and_restores_handlers(inside):
    def handle_alarm(number, frame):
        raise SignalRaised

    before = signal.signal(signal.SIGALRM, handle_alarm), signal.getsignal(signal.SIGINT)
    entered, n_raised = [], 0
    try:
        for i in range(1000):
            try:
                try:
                    # At a random moment: mostly within the block, sometimes before it, or while it is entered or left.
                    signal.setitimer(signal.ITIMER_REAL, 0 if inside else 1e-6 + i % 100 * 6e-7)
                    with defer_signals():
                        if inside:
                            signal.raise_signal(signal.SIGALRM)
                        entered.append(i)
                    time.sleep(0 if inside else 0.001)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except SignalRaised:
                n_raised += 1
            assert (signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGINT)) == (handle_alarm, before[1])
    finally:
        signal.signal(signal.SIGALRM, before[0])
    assert n_raised == 1000 and entered


def test_defer_signals_holds_an_interrupt():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with defer_signals():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append(1)
        done.append(2)
    assert done == [1]


def test_defer_signals_holds_to_the_end_of_the_outer_block():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with defer_signals():
            with defer_signals():
                signal.raise_signal(signal.SIGINT)
                done.append(1)
            done.append(2)
        done.append(3)
    assert done == [1, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_defer_signals_finds_handlers_that_are_new_since_the_last_block():
    def raise_error(*_):
        raise SignalRaised

    with defer_signals():
        pass
    previous = signal.signal(signal.SIGUSR2, raise_error)
    try:
        with pytest.raises(SignalRaised), defer_signals():
            signal.raise_signal(signal.SIGUSR2)
            was_deferred = True
        assert was_deferred
    finally:
        signal.signal(signal.SIGUSR2, previous)


def test_defer_signals_can_deliver_late_signals(monkeypatch):
    seconds = 1.0
    monkeypatch.setattr("synkhronos.ranks.interrupts.time", SimpleNamespace(monotonic=lambda: seconds))
    with pytest.raises(KeyboardInterrupt):
        with defer_signals() as held:
            held.stop_deferring_if_late()
            signal.raise_signal(signal.SIGINT)
            held.stop_deferring_if_late()
            seconds += 2 * MAX_DEFERRAL_SECONDS
            held.restart_time_limit()  # the next call has its own timeout
            held.stop_deferring_if_late()
            seconds += 2 * MAX_DEFERRAL_SECONDS
            with pytest.raises(KeyboardInterrupt):
                held.stop_deferring_if_late()
            held.stop_deferring_if_late()
            signal.raise_signal(signal.SIGINT)  # not deferred any more
            pytest.fail()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_defer_signals_allows_removing_a_handler():
    def handler(number, frame):
        pass

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with defer_signals():
            restore_handler(signal.SIGALRM, handler, signal.SIG_IGN)
            restore_handler(signal.SIGINT, handler, signal.SIG_IGN)  # not the current handler
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGALRM, before)


def test_wait_polls_despite_many_signals():
    session = ranks.start_session(2, 0, False)
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        n_polls = session.run(CountPolls())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        ranks.close_session()
    assert n_polls >= 5


class CountPolls(Command):
    """Command in which the master waits for a second, and counts its polls."""

    def run(self, rank):
        polls = []
        if not rank.is_master:
            time.sleep(1)
        rank.barriers.arrive()
        rank.barriers.wait_for_barrier(rank.barriers.last_arrived, on_poll=lambda: polls.append(1))
        return len(polls)


@dataclass(frozen=True)
class ImportPackage(Command):
    """Command in which the master imports a package."""

    name: str

    def run(self, rank):
        if rank.is_master:
            importlib.import_module(self.name)
        rank.barrier()


def test_death_while_the_master_imports_keeps_the_package_whole(session_of_two, tmp_path, monkeypatch):
    package = tmp_path / "killing_package"
    package.mkdir()
    (package / "part.py").write_text("value = 3")
    pid = next(iter(session_of_two.worker_pids.values()))
    kill = (
        f"import os, time\nos.kill({pid}, 9)\nend = time.monotonic() + 0.3\nwhile time.monotonic() < end:\n    pass\n"
    )
    (package / "__init__.py").write_text(f"import killing_package.part\n{kill}value = killing_package.part.value\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with time_limit(), pytest.raises(ranks.WorkerError, match="SIGKILL"):
        session_of_two.run(ImportPackage("killing_package"))
    assert importlib.import_module("killing_package").value == 3
