"""Failed commands: exceptions, exits, deaths, time limits, and the last common barrier of all ranks."""

import linecache
import os
import pickle
import signal
import sys
import time
from dataclasses import dataclass

import pytest
from rank_commands import CollectRecords, GatherMessages, GetIdentity, RecordRun, RunBoth, Sleep
from system import time_limit

from synkhronos import ranks
from synkhronos.ranks import Command, command_barriers
from synkhronos.ranks.agreement import MAX_BARRIERS, MAX_COMMANDS
from synkhronos.ranks.command_runner import CommandRunner
from synkhronos.ranks.control_memory import SLOT_NBYTES, ControlMemory
from synkhronos.ranks.errors import Cancelled, Death, DeathKind, describe_exit
from synkhronos.ranks.rank import Rank


@dataclass(frozen=True)
class Raise(Command):
    """Command that raises an error on some ranks, before a barrier of the others."""

    failing_ranks: tuple
    then_barrier: bool = True

    def run(self, rank):
        if rank.number in self.failing_ranks:
            raise KeyError(f"from {rank.number}")
        if self.then_barrier:
            rank.barrier()
        return "done"


@dataclass(frozen=True)
class RaiseLate(Command):
    """Raise an error between two barriers."""

    failing_rank: int

    def run(self, rank):
        rank.barrier()
        rank.all_gather(rank.number)
        if rank.number == self.failing_rank:
            raise OSError("x" * 10 * SLOT_NBYTES)
        rank.barrier()


@dataclass(frozen=True)
class RaiseLongTexts(Command):
    """Raise an error whose class's names and message are long, of characters with four bytes."""

    def run(self, rank):
        if not rank.is_master:
            text = "\U0001d54f" * SLOT_NBYTES
            raise type(text, (Exception,), {"__module__": text})(text)


@dataclass(frozen=True)
class RaiseStrangeText(Command):
    """Raise an error whose text can't be pickled, or that has none."""

    has_text: bool

    def run(self, rank):
        class Text(str):
            """Class that the master can't import."""

        class StrangeError(Exception):
            def __str__(error):
                return Text("the text") if self.has_text else sys.exit()

        if not rank.is_master:
            raise StrangeError


@dataclass(frozen=True)
class Kill(Command):
    """Command that sends a signal to the process of one rank."""

    killed_rank: int
    number: int
    at_barrier: bool

    def run(self, rank):
        if rank.number == self.killed_rank:
            os.kill(os.getpid(), self.number)
            time.sleep(60)
        if self.at_barrier:
            rank.barrier()


@dataclass(frozen=True)
class ExitWith(Command):
    code: int

    def run(self, rank):
        if not rank.is_master:
            os._exit(self.code)
        rank.barrier()


@pytest.mark.parametrize("then_barrier", [True, False])
def test_exception_in_a_command_leaves_ranks_usable(session, then_barrier):
    for failing_rank in range(session.size):
        with pytest.raises(KeyError if failing_rank == session.rank.number else ranks.WorkerError) as caught:
            session.run(Raise((failing_rank,), then_barrier))
        if failing_rank != session.rank.number:
            assert caught.value.rank == failing_rank
            assert "KeyError" in caught.value.worker_traceback
            assert "Raise" in str(caught.value) or "raise KeyError" in str(caught.value)
        assert session.run(GatherMessages((10,))) == session.size


@pytest.mark.parametrize(("has_text", "text"), [(True, "the text"), (False, "<no message: its __str__ raised")])
def test_exception_with_any_text_leaves_ranks_usable(session_of_two, has_text, text):
    with pytest.raises(ranks.WorkerError, match=f"rank 1 raised .*StrangeError: {text}"):
        session_of_two.run(RaiseStrangeText(has_text))
    assert session_of_two.run(GatherMessages((10,))) == 2


def test_command_names_all_failed_ranks():
    session = ranks.start_session(4, 0, False)
    try:
        with pytest.raises(ranks.WorkerError, match=r"rank 1 raised KeyError") as caught:
            session.run(Raise((1, 3)))
        assert set(caught.value.failures) == {1, 3}
        with pytest.raises(KeyError) as master_error:
            session.run(Raise((0, 1, 2, 3), then_barrier=False))
        assert any("rank 1: KeyError" in note for note in master_error.value.__notes__)
    finally:
        ranks.close_session()


def test_traceback_of_a_worker_has_no_error_that_the_master_handled_at_the_fork():
    try:
        raise LookupError("of the master")
    except LookupError:
        session = ranks.start_session(2, 0, False)
    try:
        with pytest.raises(ranks.WorkerError, match="KeyError") as caught:
            session.run(Raise((1,)))
        assert "KeyError" in caught.value.worker_traceback and "of the master" not in caught.value.worker_traceback
    finally:
        ranks.close_session()


def test_failure_between_barriers_frees_other_ranks(session):
    for failing_rank in range(session.size):
        with pytest.raises(OSError if failing_rank == session.rank.number else ranks.WorkerError):
            session.run(RaiseLate(failing_rank))
    assert session.run(GatherMessages((10,))) == session.size


def test_exception_report_of_long_texts_fits_into_a_slot(session_of_two):
    with pytest.raises(ranks.WorkerError, match="raised \U0001d54f{500}: \U0001d54f"):
        session_of_two.run(RaiseLongTexts())
    assert session_of_two.run(GatherMessages((10,))) == session_of_two.size


@pytest.mark.parametrize(("number", "at_barrier"), [(signal.SIGKILL, True), (signal.SIGSEGV, False)])
def test_killed_worker_is_named(number, at_barrier):
    session = ranks.start_session(3, 0, False)
    with time_limit(), pytest.raises(ranks.WorkerError, match=f"rank 2 .* was killed by {number.name}") as caught:
        session.run(Kill(2, number, at_barrier))
    assert caught.value.rank == 2
    with pytest.raises(RuntimeError, match="rank 2"):
        ranks.get_session()
    with pytest.raises(ChildProcessError):  # no child is left, nor a zombie
        os.waitpid(-1, os.WNOHANG)
    session = ranks.start_session(2, 0, False)
    assert session.run(GatherMessages((3,))) == 2
    ranks.close_session()


@dataclass(frozen=True)
class DetectDeathElsewhere(Command):
    """Detect a death in a guard (in a thread or in a foreign function), and raise an error elsewhere."""

    def run(self, rank):
        if not rank.is_master:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(ranks.WorkerError):
            while True:
                ranks.get_session()._close_if_failed()
        raise Cancelled


def test_death_reaped_elsewhere_is_named(session_of_two):
    with pytest.raises(
        ranks.WorkerError, match="rank 1 .* was killed by SIGKILL.*; the other workers were ended"
    ) as caught:
        session_of_two.run(DetectDeathElsewhere())
    assert caught.value.rank == 1
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert str(error).startswith(f"{error.description}; ") and "SIGKILL" in error.description


class FailOnMaster(Command):
    def run(self, rank):
        if rank.is_master:
            raise KeyError
        time.sleep(60)


def test_death_noticed_while_the_master_fails_is_named(session_of_two):
    events = []

    def trace(frame, event, arg):
        if frame.f_code is CommandRunner._post_and_run_own_part.__code__:
            return trace_lines
        return None

    def trace_lines(frame, event, arg):
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and line == "watch.command_thread = 0" and isinstance(sys.exception(), KeyError):
            sys.settrace(None)
            events.append(line)
            os.kill(next(iter(session_of_two.worker_pids.values())), signal.SIGKILL)
            time.sleep(1)  # cut short
        return trace_lines

    sys.settrace(trace)
    try:
        with pytest.raises(ranks.WorkerError, match="rank 1 .* was killed by SIGKILL"):
            session_of_two.run(FailOnMaster())
    finally:
        sys.settrace(None)
    assert events


def test_interrupt_before_a_command_does_not_fail_the_last_one(session_of_two):
    """The workers would drop the outputs that the last command has left on them."""
    session_of_two.run(GetIdentity())
    before = session_of_two.rank.barriers.last_failed_command

    def trace(frame, event, arg):
        return trace_lines if frame.f_code is Rank.begin_command.__code__ else None

    def trace_lines(frame, event, arg):
        if (
            linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            .strip()
            .startswith("self.barriers.last_arrived = ")
        ):
            raise KeyboardInterrupt
        return trace_lines

    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            session_of_two.run(GetIdentity())
    finally:
        sys.settrace(None)
    assert session_of_two.rank.barriers.last_failed_command == before
    assert session_of_two.run(GatherMessages((3,))) == 2


def test_exited_worker_is_named_with_its_status(session_of_two):
    with pytest.raises(ranks.WorkerError, match="exited with code 7"):
        session_of_two.run(ExitWith(7))


def test_death_of_an_idle_worker_is_noticed_by_the_next_command(session_of_two):
    pid = next(iter(session_of_two.worker_pids.values()))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ranks.WorkerError, match="SIGKILL"):
        session_of_two.run(GetIdentity())


@pytest.mark.parametrize(
    ("death", "clause"),
    [
        (
            Death(DeathKind.EXIT, 1, "b", "was killed by SIGKILL", 12),
            "rank 1 on host b (process 12) was killed by SIGKILL",
        ),
        (Death.from_failed_start(1, "", "no memory"), "rank 1 could not start: no memory"),
        (Death.from_lost_host(range(2, 4), "b", "was lost"), "rank 2 on host b was lost"),
    ],
)
def test_death_is_described_with_its_process_if_there_was_one(death, clause):
    assert death.describe() == clause


@pytest.mark.parametrize(
    ("code", "words"), [(3, "exited with code 3"), (-9, "SIGKILL"), (-11, "SIGSEGV"), (-7, "SIGBUS"), (-63, "63|SIG")]
)
def test_exit_statuses_have_descriptions(code, words):
    import re

    assert re.search(words, describe_exit(code))


@dataclass(frozen=True)
class ApplyOrFail(Command):
    """Apply an effect on some ranks, and fail on another."""

    failing_rank: int
    effect_sentence: str = "The sums were written"

    def run(self, rank):
        if rank.number == self.failing_rank:
            raise ValueError("no")
        rank.record_effect()
        rank.barrier()


def test_error_lists_ranks_with_the_applied_effect():
    session = ranks.start_session(3, 0, False)
    try:
        with pytest.raises(ranks.WorkerError, match=r"written on ranks \[0, 2\], and not on ranks \[1\]"):
            session.run(ApplyOrFail(1))
        with pytest.raises(ValueError, match="no") as caught:
            session.run(ApplyOrFail(0))
        assert any("written on ranks [1, 2], and not on ranks [0]" in note for note in caught.value.__notes__)
    finally:
        ranks.close_session()


def test_timeout_ends_a_hanging_worker():
    session = ranks.start_session(3, 0, False, timeout=1e6)
    assert session.timeout == 1e6
    session.timeout = 0.5  # on a busy machine, a fork may take longer
    with (
        time_limit(),
        pytest.raises(ranks.WorkerError, match=r"rank [12] did not finish within the 0.5 seconds") as caught,
    ):
        session.run(Sleep(60, "workers"))
    assert str(caught.value).startswith(f"{caught.value.description}; the workers were ended.")
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_worker_that_calls_exit_raises(session_of_two):
    with pytest.raises(ranks.WorkerError, match="SystemExit"):
        session_of_two.run(CallExit())
    assert session_of_two.run(GatherMessages((3,))) == 2


class CallExit(Command):
    def run(self, rank):
        if not rank.is_master:
            raise SystemExit(3)
        rank.barrier()


def test_error_lists_only_the_commands_own_effect(session_of_two):
    with pytest.raises(ranks.WorkerError, match="It was noted on no rank"):
        session_of_two.run(RunBoth(RecordRun("one", failing_rank=1), RecordRun("two")))
    first, second = session_of_two.run(CollectRecords())
    assert second == ["one", "one finished"]
    started = [note for note in first if "finished" not in note]
    assert started in (["one"], ["one", "two"])  # as soon as it is cancelled
    assert first == [*started, *(f"{note} finished" for note in reversed(started))]
    with pytest.raises(ranks.WorkerError, match=r"It was noted on ranks \[0\], and not on ranks \[1\]"):
        session_of_two.run(RunBoth(RecordRun("one"), RecordRun("two", failing_rank=1, records_before_barrier=True)))
    # After a failure, later commands record their effects as before.
    with pytest.raises(ranks.WorkerError, match=r"It was noted on ranks \[0\], and not on ranks \[1\]"):
        session_of_two.run(RecordRun("three", failing_rank=1, records_before_barrier=True))


class FailAtBarrier(Command):
    """Command in which rank 0 leaves the barrier by an error; the other ranks report whether all ranks arrived.

    With ``all_arrive`` rank 2 arrives before the error, otherwise after it.
    """

    def __init__(self, all_arrive):
        self.all_arrive = all_arrive

    def run(self, rank):
        barrier_number = rank.barriers.next_number
        if rank.number == 2 and not self.all_arrive:
            time.sleep(0.2)

        def raise_if_due():
            if not self.all_arrive or min(rank.control.arrived) >= barrier_number:
                raise BarrierError

        try:
            rank.barriers.arrive()
            rank.barriers.wait_for_barrier(barrier_number, on_poll=raise_if_due if rank.is_master else None)
            if rank.is_master:
                raise_if_due()
        except Cancelled:
            rank.objects["found"] = rank.barriers.wait_and_check_all_reached(barrier_number)
            raise
        except BarrierError:
            rank.objects["found"] = self.all_arrive
            raise
        rank.objects["found"] = True
        rank.barrier()


class BarrierError(Exception):
    pass


class GatherFound(Command):
    def run(self, rank):
        return rank.all_gather(rank.objects["found"])


@pytest.mark.parametrize("all_arrive", [False, True])
def test_failed_command_is_agreed_by_all_ranks(all_arrive):
    session = ranks.start_session(3, 0, False)
    try:
        for _ in range(3 if not all_arrive else 50):
            with pytest.raises(BarrierError):
                session.run(FailAtBarrier(all_arrive))
            assert session.run(GatherFound()) == [all_arrive] * 3
    finally:
        ranks.close_session()


@dataclass(frozen=True)
class ReachManyBarriers(Command):
    """Command of many barriers, most of which are skipped."""

    n_skipped: int
    fails: bool = False

    def run(self, rank):
        rank.barrier()
        rank.barriers.last_arrived += self.n_skipped - 2
        rank.barrier()
        for i in range(20):
            assert rank.all_gather((rank.number, i)) == [(r, i) for r in range(rank.size)]
        if self.fails and rank.number == 1:
            raise BarrierError
        rank.barrier()


class GatherLate(Command):
    """Command that gathers values, each after a delay of the workers; return the gathered lists of all ranks."""

    def run(self, rank):
        gathered = []
        for i in range(10):
            time.sleep(0 if rank.is_master else 0.002)
            gathered.append(rank.all_gather((rank.number, i)))
        return rank.all_gather(gathered)


def check_gathered_late(session):
    assert session.run(GatherLate()) == [[[(r, i) for r in range(3)] for i in range(10)]] * 3


def test_barrier_numbers_of_a_command_do_not_affect_the_next(session_of_three):
    for n_skipped in (1 << 24, MAX_BARRIERS - 21):
        session_of_three.run(ReachManyBarriers(n_skipped))
        check_gathered_late(session_of_three)
        with time_limit(), pytest.raises(ranks.WorkerError, match="BarrierError"):
            session_of_three.run(ReachManyBarriers(n_skipped, fails=True))
        check_gathered_late(session_of_three)


@pytest.mark.parametrize("n_left", [0, 5, 20])
def test_too_many_barriers_in_a_command_raise(session_of_three, n_left):
    for _ in range(2):
        with time_limit(), pytest.raises(RuntimeError, match="can have at most 4,294,967,295 barriers"):
            session_of_three.run(ReachManyBarriers(MAX_BARRIERS - n_left))
        check_gathered_late(session_of_three)


def test_too_many_commands_raise(session_of_three):
    session_of_three._command_number = MAX_COMMANDS - 2
    check_gathered_late(session_of_three)
    with time_limit(), pytest.raises(ranks.WorkerError, match="BarrierError"):
        session_of_three.run(ReachManyBarriers(MAX_BARRIERS - 21, fails=True))
    for _ in range(2):
        with time_limit(), pytest.raises(RuntimeError, match="have run 4,294,967,295 commands"):
            session_of_three.run(GatherLate())
    with time_limit():
        ranks.close_session()


class DieInBetween(Command):
    """Command in which rank 1 dies while it decides the failed command, with the lock; ``failing`` ranks fail, too."""

    def __init__(self, failing):
        self.failing = failing

    def run(self, rank):
        barrier_number = rank.barriers.next_number
        if rank.number == 1:
            command_barriers.record_last_common_barrier = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError
        try:
            rank.barriers.wait_until(lambda: False)
        except Cancelled:
            if rank.number in self.failing:
                rank.barriers.fail_command()
            rank.barriers.wait_and_check_all_reached(barrier_number)
            raise


@pytest.mark.parametrize("failing", [(), (0,), (2,), (0, 2)])
def test_death_before_the_common_barrier_is_recorded(session_of_three, failing):
    with time_limit(), pytest.raises(ranks.WorkerError, match="rank 1 .* was killed by SIGKILL"):
        session_of_three.run(DieInBetween(failing))


def test_ranks_that_fail_together_record_one_common_barrier(monkeypatch):
    control = ControlMemory(3, 0.0)
    first, second, third = (Rank(r, 0, control, lambda: None, None) for r in range(3))
    fence, failing = control.fence, [second]

    def meanwhile():
        fence()
        if failing:
            failing.pop().barriers.fail_command()

    for rank in (first, second, third):
        rank.begin_command(1)
    barrier_number = first.barriers.next_number
    for rank in (first, second, third):
        rank.barriers.arrive()
    third.barriers.wait_until(
        lambda: min(control.arrived) >= barrier_number
    )  # all ranks have arrived, and none has failed
    monkeypatch.setattr(control, "fence", meanwhile)
    first.barriers.fail_command()
    assert not failing
    assert [rank.barriers.wait_and_check_all_reached(barrier_number) for rank in (first, second, third)] == [True] * 3


@pytest.mark.parametrize("all_arrive", [False, True])
def test_ranks_that_fail_in_turn_record_one_common_barrier(all_arrive):
    control = ControlMemory(3, 0.0)
    first, second, third = (Rank(r, 0, control, lambda: None, None) for r in range(3))
    for rank in (first, second, third):
        rank.begin_command(1)
    barrier_number = first.barriers.next_number
    for rank in (first, second, third) if all_arrive else (first, second):
        rank.barriers.arrive()
    first.barriers.fail_command()
    if not all_arrive:
        third.barriers.arrive()  # it may not be cancelled yet
    second.barriers.fail_command()
    assert [rank.barriers.wait_and_check_all_reached(barrier_number) for rank in (first, second, third)] == [
        all_arrive
    ] * 3
