"""ranks/: commands, steps, errors, liveness, segments -- without any graph library."""

import gc
import linecache
import mmap
import os
import signal
import sys
import threading
import time
import warnings
from dataclasses import dataclass

import pytest
from system import LIMIT

from synkhronos import ranks
from synkhronos.ranks import Command, segments
from synkhronos.ranks.control import MAILBOX_NBYTES, SLOT_NBYTES, Control, Semaphore
from synkhronos.ranks.errors import Cancelled, describe_exit
from synkhronos.ranks.interrupts import defer_signals, restore_handler
from synkhronos.ranks.rank import Rank

pytestmark = pytest.mark.any_library


@pytest.fixture(params=[1, 2, 3, 5])
def session(request):
    yield ranks.fork(request.param, request.param // 2, False)
    ranks.close()


@pytest.fixture
def two():
    yield ranks.fork(2, 0, False)
    ranks.close()


class Owner:
    def __hash__(self):
        return 1


def test_weak_keys_forget_collected_objects():
    noted = ranks.WeakKeys()
    first, second = Owner(), Owner()
    noted[first], noted[second] = 1, 2
    noted[second] = 3
    assert (noted.get(first), noted.get(second), noted.get(Owner())) == (1, 3, None)
    assert first in noted and Owner() not in noted
    assert set(noted) == {first, second}
    del first
    assert list(noted) == [second]
    noted.discard(second)
    noted.discard(second)
    assert list(noted) == []
    noted[second] = 4
    del noted  # before its keys
    gc.collect()
    del second


def test_wait_ignores_wall_clock_changes(monkeypatch):
    bell = Semaphore(mmap.mmap(-1, mmap.PAGESIZE), 0, False)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    began = time.monotonic()
    assert not bell.wait(0.1)
    assert 0.1 <= time.monotonic() - began < 5


@dataclass(frozen=True)
class Number(Command):
    def run(self, rank):
        return rank.number, rank.size, rank.is_master, os.getpid()


@dataclass(frozen=True)
class Exchange(Command):
    sizes: tuple

    def run(self, rank):
        for size in self.sizes:
            mine = (rank.number, b"x" * (size * (rank.number + 1)))
            everyone = rank.all_gather(mine)
            assert everyone == [(r, b"x" * (size * (r + 1))) for r in range(rank.size)]
        return len(everyone)


@dataclass(frozen=True)
class MixedSteps(Command):
    """Steps of all kinds in a row, in which a slot that is used again too early would show."""

    def run(self, rank):
        for i in range(30):
            shown = [rank.gather(b"%d %d" % (rank.number, k)) for k in range(i % 4)]
            if rank.is_master:
                assert shown == [[b"%d %d" % (r, k) for r in range(rank.size)] for k in range(i % 4)]
            if i % 3 == 0:
                rank.barrier()
            assert rank.all_gather((i, rank.number)) == [(i, r) for r in range(rank.size)]


@dataclass(frozen=True)
class Raise(Command):
    who: tuple
    then_meet: bool = True

    def run(self, rank):
        if rank.number in self.who:
            raise KeyError(f"from {rank.number}")
        if self.then_meet:
            rank.barrier()
        return "done"


@dataclass(frozen=True)
class RaiseLate(Command):
    """Fail after some have passed a meeting point, and before another."""

    who: int

    def run(self, rank):
        rank.barrier()
        rank.all_gather(rank.number)
        if rank.number == self.who:
            raise OSError("x" * 10 * SLOT_NBYTES)
        rank.barrier()


@dataclass(frozen=True)
class Long(Command):
    payload: bytes

    def run(self, rank):
        return len(self.payload), rank.all_gather(len(self.payload))


@dataclass(frozen=True)
class Kill(Command):
    who: int
    number: int
    met: bool

    def run(self, rank):
        if rank.number == self.who:
            os.kill(os.getpid(), self.number)
            time.sleep(60)
        if self.met:
            rank.barrier()


@dataclass(frozen=True)
class LeaveWith(Command):
    code: int

    def run(self, rank):
        if not rank.is_master:
            os._exit(self.code)
        rank.barrier()


@dataclass(frozen=True)
class Fill(Command):
    location: ranks.SharedArray

    def run(self, rank):
        view = self.location.view(rank.segments)
        view[rank.number] = rank.number + 1
        rank.barrier()
        return view.tolist()


@dataclass(frozen=True)
class CountSegments(Command):
    def run(self, rank):
        return rank.all_gather((len(rank.segments), len(os.listdir("/proc/self/fd"))))


@dataclass(frozen=True)
class Sleep(Command):
    seconds: float
    who: str

    def run(self, rank):
        if self.who == "all" or (self.who == "master") == rank.is_master:
            deadline = time.monotonic() + self.seconds
            while time.monotonic() < deadline:
                time.sleep(0.01)
        return "slept"


@dataclass(frozen=True)
class Signals(Command):
    def run(self, rank):
        return rank.all_gather(
            (
                signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
                signal.getsignal(signal.SIGALRM) == signal.SIG_DFL,
                os.readlink("/proc/self/fd/0"),
            )
        )


def test_command_runs_on_every_rank(session):
    number, size, is_master, pid = session.run(Number())
    assert (number, size, is_master, pid) == (session.size // 2, session.size, True, os.getpid())


def test_all_gather_of_values_of_any_length(session):
    assert session.run(Exchange((0, 1, SLOT_NBYTES // 2, SLOT_NBYTES, 3 * SLOT_NBYTES))) == session.size


def test_command_with_mixed_steps(session):
    for _ in range(5):
        session.run(MixedSteps())


@pytest.mark.parametrize("meet", [True, False])
def test_exception_in_a_command_leaves_ranks_usable(session, meet):
    for who in range(session.size):
        with pytest.raises(KeyError if who == session.rank.number else ranks.WorkerError) as caught:
            session.run(Raise((who,), meet))
        if who != session.rank.number:
            assert caught.value.rank == who
            assert "KeyError" in caught.value.worker_traceback
            assert "Raise" in str(caught.value) or "raise KeyError" in str(caught.value)
        assert session.run(Exchange((10,))) == session.size


def test_command_names_all_failed_ranks():
    session = ranks.fork(4, 0, False)
    try:
        with pytest.raises(ranks.WorkerError, match=r"rank 1 raised KeyError") as caught:
            session.run(Raise((1, 3)))
        # A rank that fails is heard even if another failed before it.
        assert set(caught.value.failures) <= {1, 3}
        with pytest.raises(KeyError) as own:
            session.run(Raise((0, 1, 2, 3), then_meet=False))
        assert any("rank 1: KeyError" in note for note in own.value.__notes__)
    finally:
        ranks.close()


def test_failure_between_barriers_frees_other_ranks(session):
    for who in range(session.size):
        with pytest.raises(OSError if who == session.rank.number else ranks.WorkerError):
            session.run(RaiseLate(who))
    assert session.run(Exchange((10,))) == session.size


def test_command_longer_than_the_mailbox(two):
    payload = os.urandom(3 * MAILBOX_NBYTES)
    assert two.run(Long(payload)) == (len(payload), [len(payload)] * 2)


def test_failed_send_of_a_long_command_leaves_no_memory(two, monkeypatch):
    before = two.run(CountSegments())

    def no_channel():
        raise OSError("no channel")

    with monkeypatch.context() as patch:
        patch.setattr(two.memory, "send_segments", no_channel)
        with pytest.raises(OSError, match="no channel"):
            two.run(Long(os.urandom(3 * MAILBOX_NBYTES)))
    assert two.run(CountSegments()) == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGABRT])
@pytest.mark.parametrize("met", [True, False])
def test_killed_worker_is_named(number, met):
    session = ranks.fork(3, 0, False)
    start = time.monotonic()
    with pytest.raises(ranks.WorkerError, match=f"rank 2 .* was killed by {number.name}") as caught:
        session.run(Kill(2, number, met))
    assert time.monotonic() - start < LIMIT
    assert caught.value.rank == 2
    with pytest.raises(RuntimeError, match="rank 2"):
        ranks.session()
    with pytest.raises(ChildProcessError):  # no child is left, not even a zombie
        os.waitpid(-1, os.WNOHANG)
    session = ranks.fork(2, 0, False)
    assert session.run(Exchange((3,))) == 2
    ranks.close()


@dataclass(frozen=True)
class HeardElsewhere(Command):
    """Detect a death in a guard (in a thread or in a foreign function) and raise elsewhere."""

    def run(self, rank):
        if not rank.is_master:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(ranks.WorkerError):
            while True:
                ranks.session()._raise_if_peer_died()
        raise Cancelled


def test_death_reaped_elsewhere_is_named(two):
    with pytest.raises(ranks.WorkerError, match="rank 1 .* was killed by SIGKILL") as caught:
        two.run(HeardElsewhere())
    assert caught.value.rank == 1


class FailHere(Command):
    def run(self, rank):
        if rank.is_master:
            raise KeyError
        time.sleep(60)


def test_death_noticed_while_the_master_fails_is_named(two):
    told = []

    def trace(frame, event, arg):
        if frame.f_code is ranks.Session._run.__code__:
            return trace_lines
        return None

    def trace_lines(frame, event, arg):
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and line == "peers.busy_thread = 0" and isinstance(sys.exception(), KeyError):
            sys.settrace(None)
            told.append(line)
            os.kill(next(iter(two.workers.pids.values())), signal.SIGKILL)
            time.sleep(1)  # cut short
        return trace_lines

    sys.settrace(trace)
    try:
        with pytest.raises(ranks.WorkerError, match="rank 1 .* was killed by SIGKILL"):
            two.run(FailHere())
    finally:
        sys.settrace(None)
    assert told


def test_exited_worker_is_named_with_its_status(two):
    with pytest.raises(ranks.WorkerError, match="exited with code 7"):
        two.run(LeaveWith(7))


def test_death_of_an_idle_worker_is_noticed_by_the_next_command(two):
    pid = next(iter(two.workers.pids.values()))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ranks.WorkerError, match="SIGKILL"):
        two.run(Number())


def test_stopped_worker_is_waited_for(two):
    pid = next(iter(two.workers.pids.values()))
    os.kill(pid, signal.SIGSTOP)
    if os.fork() == 0:
        time.sleep(0.3)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    assert two.run(Exchange((3,))) == 2
    os.wait()


def test_segment_is_mapped_on_all_ranks(session):
    segment = session.memory.create(8 * session.size)
    location = ranks.SharedArray(segment.key, "i8", (session.size,))
    assert session.run(Fill(location)) == list(range(1, session.size + 1))


MIB = 1 << 20


@pytest.mark.parametrize(
    ("groups", "files", "free"),
    [
        ("0::/\n", {}, 5000),
        ("0::/job/step\n", {"job/step/memory": ("max", 900, 100), "job/memory": (1000, 900, 100)}, 200),
        ("0::/of/the/host\n", {"memory": (1000, 700, 0)}, 300),  # a container, in which its own group is the root
        ("0::/job\n", {"job/memory": (1000, 1200, 100)}, 0),
        ("4:cpu:/\n3:memory:/job\n0::/\n", {"memory/job/memory": (800, 500, 50)}, 350),
        ("3:memory:/job\n", {"memory/job/memory": (1 << 43, 500, 50)}, 5000),
    ],
)
def test_free_memory_reads_machine_and_cgroups(tmp_path, groups, files, free):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 4096000 kB\nSwapFree: 1024000 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text(groups)
    names = (".limit_in_bytes", ".usage_in_bytes") if "memory:" in groups else (".max", ".current")
    for path, (limit, used, cache) in files.items():
        at = tmp_path / "sys" / "fs" / "cgroup" / path
        at.parent.mkdir(parents=True, exist_ok=True)
        for name, value in zip(names, (limit, used), strict=True):
            at.with_suffix(name).write_text(f"{value if value == 'max' else value * MIB}\n")
        at.with_suffix(".stat").write_text(f"anon 1\nactive_file {cache * MIB}\ninactive_file 0\n")
    assert segments.get_free_memory(str(tmp_path)) == free * MIB


def test_segments_leave_memory_to_other_programs(monkeypatch):
    monkeypatch.setattr(segments, "get_free_memory", lambda: 128 * MIB)
    opened = []
    monkeypatch.setattr(segments, "_open_unlinked", lambda: opened.append(1))
    with pytest.raises(
        MemoryError, match="^no room for 134,217,728 bytes of shared memory: .* and memory 125,829,120$"
    ):
        segments.create_unlinked(128 * MIB)
    assert not opened
    segments.check_free_memory(120 * MIB)


def test_segments_are_released_on_all_ranks(session):
    before = session.run(CountSegments())
    for _ in range(300):
        session.memory.release("segment", session.memory.create(100).key)
    session.send_releases()
    assert session.run(CountSegments()) == before


@pytest.mark.parametrize("size", [1, 2])
def test_segments_leave_no_open_files(size):
    """Python warns of one: when the ranks are closed, and with one rank, which has nobody to send it to, at once."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ResourceWarning)
        session = ranks.fork(size, 0, False)
        for _ in range(3):
            session.memory.create(100)
        session.close(kill=True)
        del session
        gc.collect()
    assert [str(warning.message) for warning in told if "FileIO" in str(warning.message)] == []


def test_segment_without_memory_raises_memory_error(two):
    with pytest.raises(MemoryError, match="/dev/shm"):
        two.memory.create(1 << 50)
    assert two.run(Exchange((3,))) == 2


@pytest.mark.parametrize("who", ["master", "workers", "all"])
def test_command_after_an_interrupt_works(two, who):
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        two.run(Sleep(2.5, who))
    assert time.monotonic() - start < 2.2
    assert two.run(Exchange((3,))) == 2


@pytest.mark.slow
def test_close_after_an_interrupt_is_quick(two):
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        two.run(Sleep(60, "workers"))
    start = time.monotonic()
    ranks.close()
    assert time.monotonic() - start < LIMIT
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@dataclass(frozen=True)
class WaitForWorkers(Command):
    meet: bool

    def run(self, rank):
        if not rank.is_master:
            time.sleep(60)
        if self.meet:
            rank.barrier()


@pytest.mark.parametrize("by", ["a handler", "another thread"])
@pytest.mark.parametrize("what", ["a step", "their end", "a command that was interrupted"])
@pytest.mark.slow
def test_close_ends_a_waiting_call(two, monkeypatch, what, by):
    monkeypatch.setattr(sys.modules["synkhronos.ranks.session"], "GRACE", 0.2)
    if what == "a command that was interrupted":
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            two.run(WaitForWorkers(False))
    if by == "a handler":
        signal.signal(signal.SIGALRM, lambda *_: ranks.close())
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    else:
        threading.Timer(0.2, ranks.close).start()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="the ranks were closed: call synkhronos.fork"), two.call_lock:
        two.wait_until_idle()
        two.run(WaitForWorkers(what == "a step"))
    assert time.monotonic() - start < LIMIT
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_workers_do_not_touch_signals_and_stdin_of_the_master(two):
    assert two.run(Signals())[1] == (True, True, os.devnull)


def test_command_refuses_a_nested_command(two):
    with pytest.raises(RuntimeError, match="from inside another call"):
        two.run(Nested())
    assert two.run(Exchange((3,))) == 2


class Nested(Command):
    def run(self, rank):
        if rank.is_master:
            ranks.session().run(Number())


def test_forked_copy_of_the_master_has_no_ranks(two):
    pid = os.fork()
    if pid == 0:
        try:
            ranks.session()
        except RuntimeError as error:
            os._exit(0 if "copy" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert two.run(Exchange((3,))) == 2


@pytest.mark.slow
def test_idle_workers_use_no_processor(session):
    session.run(Number())

    def ticks():
        used = 0
        for pid in session.workers.pids.values():
            with open(f"/proc/{pid}/stat") as stat:
                fields = stat.read().rsplit(")", 1)[1].split()
            used += int(fields[11]) + int(fields[12])
        return used

    time.sleep(0.1)
    before = ticks()
    time.sleep(1)
    assert ticks() - before <= 2  # of a hundred a second


@pytest.mark.parametrize(
    ("code", "words"), [(3, "exited with code 3"), (-9, "SIGKILL"), (-11, "SIGSEGV"), (-7, "SIGBUS"), (-63, "63|SIG")]
)
def test_exit_statuses_have_descriptions(code, words):
    import re

    assert re.search(words, describe_exit(code))


@dataclass(frozen=True)
class Commit(Command):
    """Apply an effect on some ranks, and fail on another."""

    fails: int
    effect: str = "The sums were written"

    def run(self, rank):
        if rank.number == self.fails:
            raise ValueError("no")
        rank.commit()
        rank.barrier()


def test_error_lists_ranks_with_the_applied_effect():
    session = ranks.fork(3, 0, False)
    try:
        with pytest.raises(ranks.WorkerError, match=r"written on ranks \[0, 2\], and not on ranks \[1\]"):
            session.run(Commit(1))
        with pytest.raises(ValueError, match="no") as caught:
            session.run(Commit(0))
        assert any("written on ranks [1, 2], and not on ranks [0]" in note for note in caught.value.__notes__)
    finally:
        ranks.close()


def test_timeout_ends_a_hanging_worker():
    session = ranks.fork(3, 0, False, timeout=0.5)
    start = time.monotonic()
    with pytest.raises(ranks.WorkerError, match=r"rank [12] did not finish within the 0.5 seconds"):
        session.run(Sleep(60, "workers"))
    assert time.monotonic() - start < LIMIT
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_worker_that_calls_exit_raises(two):
    with pytest.raises(ranks.WorkerError, match="SystemExit"):
        two.run(CallExit())
    assert two.run(Exchange((3,))) == 2


class CallExit(Command):
    def run(self, rank):
        if not rank.is_master:
            raise SystemExit(3)
        rank.barrier()


@dataclass(frozen=True)
class Note(Command):
    """Note on each rank that one came here, and when commands finish; on one rank fail, maybe."""

    what: str
    culprit: int = -1
    early: bool = False  # commit before the ranks meet, so that the culprit's failure can't come first
    effect: str = "It was noted"

    def run(self, rank):
        notes = rank.objects.setdefault("notes", [])
        notes.append(self.what)
        rank.on_finish.append(lambda: notes.append(f"{self.what} finished"))
        if self.early and rank.number != self.culprit:
            rank.commit()
        rank.barrier()
        if rank.number == self.culprit:
            raise ArithmeticError("no")
        rank.commit()
        return self.what, rank.number


@dataclass(frozen=True)
class Notes(Command):
    def run(self, rank):
        return rank.all_gather(rank.objects.pop("notes", []))


@dataclass(frozen=True)
class Both(Command):
    """Two notes in one command; only the second one's effect counts."""

    first: Note
    second: Note
    effect: str = "It was noted"

    def run(self, rank):
        with rank.suspend_commits():
            first = self.first.run(rank)
        return [first, self.second.run(rank)]


def test_command_made_of_several(session):
    together = Both(Note("one"), Note("two"))
    for _ in range(2):
        assert session.run(together) == [("one", session.rank.number), ("two", session.rank.number)]
        # What may be waited for as late as the end of a command is, once.
        assert session.run(Notes()) == [["one", "two", "two finished", "one finished"]] * session.size


def test_error_lists_only_the_commands_own_effect(two):
    with pytest.raises(ranks.WorkerError, match="It was noted on no rank"):
        two.run(Both(Note("one", culprit=1), Note("two")))
    first, second = two.run(Notes())
    assert second == ["one", "one finished"]
    started = [note for note in first if "finished" not in note]
    assert started in (["one"], ["one", "two"])  # as soon as it has heard of it
    assert first == [*started, *(f"{note} finished" for note in reversed(started))]
    with pytest.raises(ranks.WorkerError, match=r"It was noted on ranks \[0\], and not on ranks \[1\]"):
        two.run(Both(Note("one"), Note("two", culprit=1, early=True)))
    # A failure leaves nothing behind: commands by themselves commit as before.
    with pytest.raises(ranks.WorkerError, match=r"It was noted on ranks \[0\], and not on ranks \[1\]"):
        two.run(Note("three", culprit=1, early=True))


class Rung(Exception):
    """Raised by a signal handler."""


@pytest.mark.parametrize("inside", [False, True])
def test_defer_signals_raises_later_and_restores_handlers(inside):
    def ring(number, frame):
        raise Rung

    before = signal.signal(signal.SIGALRM, ring), signal.getsignal(signal.SIGINT)
    inner, rung = [], 0
    try:
        for i in range(1000):
            try:
                try:
                    # Now and then before the block, mostly in it, or while it is entered or left.
                    signal.setitimer(signal.ITIMER_REAL, 0 if inside else 1e-6 + i % 100 * 6e-7)
                    with defer_signals():
                        if inside:
                            signal.raise_signal(signal.SIGALRM)
                        inner.append(i)
                    time.sleep(0 if inside else 0.001)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Rung:
                rung += 1
            assert (signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGINT)) == (ring, before[1])
    finally:
        signal.signal(signal.SIGALRM, before[0])
    assert rung == 1000 and inner


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


def test_defer_signals_can_deliver_late_signals(monkeypatch):
    monkeypatch.setattr("synkhronos.ranks.interrupts.PATIENCE", 0.05)
    with pytest.raises(KeyboardInterrupt):
        with defer_signals() as held:
            held.deliver_if_late()
            signal.raise_signal(signal.SIGINT)
            held.deliver_if_late()
            time.sleep(0.1)
            held.restart_patience()  # what comes now has its own time
            held.deliver_if_late()
            time.sleep(0.1)
            with pytest.raises(KeyboardInterrupt):
                held.deliver_if_late()
            held.deliver_if_late()
            signal.raise_signal(signal.SIGINT)  # not held any more
            pytest.fail()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_defer_signals_allows_removing_a_handler():
    def handler(number, frame):
        pass

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with defer_signals():
            restore_handler(signal.SIGALRM, handler, signal.SIG_IGN)
            restore_handler(signal.SIGINT, handler, signal.SIG_IGN)  # which it isn't
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGALRM, before)


class Leave(Command):
    """A command: ranks meet, but rank 0 leaves before rank 2 has come, or after; the others say whether all had come.

    ``all_come`` says which.
    """

    def __init__(self, all_come):
        self.all_come = all_come

    def run(self, rank):
        step = rank.next_step
        if rank.number == 2 and not self.all_come:
            time.sleep(0.2)

        def leave():
            if not self.all_come or min(rank.control.arrived) >= step:
                raise Left

        try:
            rank.barrier(leave if rank.is_master else None)
            if rank.is_master:
                leave()
        except Cancelled:
            rank.objects["found"] = rank.is_reached_by_all(step)
            raise
        except Left:
            rank.objects["found"] = self.all_come
            raise
        rank.objects["found"] = True
        rank.barrier()


class Left(Exception):
    pass


class Found(Command):
    def run(self, rank):
        return rank.all_gather(rank.objects["found"])


@pytest.mark.parametrize("all_come", [False, True])
def test_failed_command_is_agreed_by_all_ranks(all_come):
    session = ranks.fork(3, 0, False)
    try:
        for _ in range(3 if not all_come else 50):
            with pytest.raises(Left):
                session.run(Leave(all_come))
            assert session.run(Found()) == [all_come] * 3
    finally:
        ranks.close()


class DieInBetween(Command):
    """A command: the worker says that it has failed, and dies before it says how far all had come."""

    def run(self, rank):
        step = rank.next_step
        if not rank.is_master:
            rank.control.deciding.acquire = lambda seconds: os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError
        try:
            rank.barrier()
        except Cancelled:
            rank.is_reached_by_all(step)
            raise


def test_death_before_the_common_step_is_recorded(two):
    with pytest.raises(ranks.WorkerError, match="rank 1 .* was killed by SIGKILL"):
        two.run(DieInBetween())


def test_ranks_that_fail_together_record_one_common_step(monkeypatch):
    control = Control(3, 0.0)
    first, second, third = (Rank(r, 0, control, lambda: None, None) for r in range(3))
    fence, failing = control.fence, [second]

    def meanwhile():
        fence()
        if failing:
            failing.pop().fail()

    for rank in (first, second, third):
        rank.begin_command(1)
    step = first.next_step
    for rank in (first, second, third):
        rank.arrive()
    third.wait(lambda: min(control.arrived) >= step)  # all are there, and none has failed
    monkeypatch.setattr(control, "fence", meanwhile)
    first.fail()
    assert not failing
    assert [rank.is_reached_by_all(step) for rank in (first, second, third)] == [True] * 3


@pytest.mark.parametrize("all_come", [False, True])
def test_ranks_that_fail_in_turn_record_one_common_step(all_come):
    control = Control(3, 0.0)
    first, second, third = (Rank(r, 0, control, lambda: None, None) for r in range(3))
    for rank in (first, second, third):
        rank.begin_command(1)
    step = first.next_step
    for rank in (first, second, third) if all_come else (first, second):
        rank.arrive()
    first.fail()
    if not all_come:
        third.arrive()  # too late: it may not have heard
    second.fail()
    assert [rank.is_reached_by_all(step) for rank in (first, second, third)] == [all_come] * 3


def test_wait_polls_despite_many_signals():
    session = ranks.fork(2, 0, False)
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        looks = session.run(Look())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        ranks.close()
    assert looks >= 5


class Look(Command):
    """A command: the master waits for a second, and counts how often it looks around."""

    def run(self, rank):
        looks = []
        if not rank.is_master:
            time.sleep(1)
        rank.barrier(lambda: looks.append(1))
        return len(looks)
