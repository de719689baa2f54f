"""Commands: exchanges between ranks, caches, close, commands that run others."""

import gc
import os
import signal
import threading
import time
import weakref
from dataclasses import dataclass
from typing import ClassVar

import pytest
from rank_commands import CollectRecords, CountOpenFiles, GatherMessages, GetIdentity, RecordRun, RunBoth
from system import time_limit

from synkhronos import ranks
from synkhronos.ranks import Command
from synkhronos.ranks.command import MAX_CACHED_COMMANDS, MAX_CACHED_NBYTES
from synkhronos.ranks.control_memory import MAILBOX_NBYTES, SLOT_NBYTES
from synkhronos.ranks.rank import _MAX_CACHED_PICKLES


@dataclass(frozen=True)
class MixedSteps(Command):
    """Command with barriers of all kinds, which would show a slot that is reused too early."""

    def run(self, rank):
        for i in range(30):
            shown = [rank.gather_bytes(b"%d %d" % (rank.number, k)) for k in range(i % 4)]
            if rank.is_master:
                assert shown == [[b"%d %d" % (r, k) for r in range(rank.size)] for k in range(i % 4)]
            if i % 3 == 0:
                rank.barrier()
            assert rank.all_gather((i, rank.number)) == [(i, r) for r in range(rank.size)]


@dataclass(frozen=True)
class GatherPayloadLength(Command):
    """Command that gathers the length of its payload."""

    payload: bytes

    def run(self, rank):
        return len(self.payload), rank.all_gather(len(self.payload))


def test_command_runs_on_every_rank(session):
    number, size, is_master, pid = session.run(GetIdentity())
    assert (number, size, is_master, pid) == (session.size // 2, session.size, True, os.getpid())


def test_all_gather_accepts_values_of_any_length(session):
    assert session.run(GatherMessages((0, 1, SLOT_NBYTES // 2, SLOT_NBYTES, 3 * SLOT_NBYTES))) == session.size


def test_command_may_mix_barriers(session):
    for _ in range(5):
        session.run(MixedSteps())


def test_cache_of_commands_is_bounded(session_of_two):
    lengths = []
    for i in range(2 * MAX_CACHED_COMMANDS):
        assert session_of_two.run(GatherPayloadLength(bytes(i))) == (i, [i, i])
        lengths.append(len(session_of_two._mailbox._pickle_cache))
    assert max(lengths) == MAX_CACHED_COMMANDS


def test_long_command_is_not_kept(session_of_two):
    command = GatherPayloadLength(bytes(MAX_CACHED_NBYTES))
    session_of_two.run(command)
    reference = weakref.ref(command)
    del command
    gc.collect()
    assert reference() is None


def test_cache_of_pickled_values_is_bounded(session_of_two):
    values = range(2 * _MAX_CACHED_PICKLES)
    digests, lengths = [], []
    for value in values:
        digests.append(session_of_two.rank.compute_digest(value))
        lengths.append(len(session_of_two.rank._pickles))
    assert max(lengths) == _MAX_CACHED_PICKLES
    for value in values[_MAX_CACHED_PICKLES:]:  # a full cache is used, not emptied
        assert session_of_two.rank.compute_digest(value) is digests[value]


def test_command_may_exceed_the_mailbox(session_of_two):
    payload = os.urandom(3 * MAILBOX_NBYTES)
    assert session_of_two.run(GatherPayloadLength(payload)) == (len(payload), [len(payload)] * 2)


def test_failed_send_of_a_long_command_leaves_no_memory(session_of_two, monkeypatch):
    before = session_of_two.run(CountOpenFiles())

    def no_channel():
        raise OSError("no channel")

    with monkeypatch.context() as patch:
        patch.setattr(session_of_two.memory, "send_segments", no_channel)
        with pytest.raises(OSError, match="no channel"):
            session_of_two.run(GatherPayloadLength(os.urandom(3 * MAILBOX_NBYTES)))
    assert session_of_two.run(CountOpenFiles()) == before


@dataclass(frozen=True)
class WaitForWorkers(Command):
    at_barrier: bool

    def run(self, rank):
        if not rank.is_master:
            time.sleep(60)
        if self.at_barrier:
            rank.barrier()


@pytest.mark.parametrize("closed_from", ["a handler", "another thread"])
@pytest.mark.parametrize("awaited", ["a barrier", "the end of the command", "an interrupted command"])
@pytest.mark.slow
def test_close_ends_a_waiting_call(session_of_two, monkeypatch, awaited, closed_from):
    for module in (ranks.session, ranks.process_group):
        monkeypatch.setattr(module, "GRACE_SECONDS", 0.2)
    if awaited == "an interrupted command":
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            session_of_two.run(WaitForWorkers(False))
    if closed_from == "a handler":
        signal.signal(signal.SIGALRM, lambda *_: ranks.close_session())
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    else:
        threading.Timer(0.2, ranks.close_session).start()
    with time_limit(), pytest.raises(RuntimeError, match="the ranks were closed"), session_of_two.call_lock:
        session_of_two.wait_until_idle()
        session_of_two.run(WaitForWorkers(awaited == "a barrier"))
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_command_refuses_a_nested_command(session_of_two):
    with pytest.raises(RuntimeError, match="from inside another call"):
        session_of_two.run(Nested())
    assert session_of_two.run(GatherMessages((3,))) == 2


class Nested(Command):
    """Command that runs a command in the master."""

    def run(self, rank):
        if rank.is_master:
            ranks.get_session().run(GetIdentity())


def test_forked_copy_of_the_master_has_no_ranks(session_of_two):
    pid = os.fork()
    if pid == 0:
        try:
            ranks.get_session()
        except RuntimeError as error:
            os._exit(0 if "copy" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert session_of_two.run(GatherMessages((3,))) == 2


@pytest.mark.slow
def test_idle_workers_use_no_processor(session):
    session.run(GetIdentity())

    def ticks():
        used = 0
        for pid in session.worker_pids.values():
            with open(f"/proc/{pid}/stat") as stat:
                fields = stat.read().rsplit(")", 1)[1].split()
            used += int(fields[11]) + int(fields[12])
        return used

    time.sleep(0.1)
    before = ticks()
    time.sleep(1)
    assert ticks() - before <= 2  # clock ticks of 10 ms


def test_command_may_run_other_commands(session):
    command = RunBoth(RecordRun("one"), RecordRun("two"))
    for _ in range(2):
        assert session.run(command) == [("one", session.rank.number), ("two", session.rank.number)]
        # A wait that may be deferred to the end of a command happens once, there.
        assert session.run(CollectRecords()) == [["one", "two", "two finished", "one finished"]] * session.size


class InterruptFirstFinish(Command):
    """Command whose callback at the end of the master's part is interrupted at its first call."""

    outcomes: ClassVar = [KeyboardInterrupt(), None]

    def run(self, rank):
        if rank.is_master:
            rank.finish_callbacks.append(self.finish)

    def finish(self):
        if (outcome := self.outcomes.pop(0)) is not None:
            raise outcome


def test_interrupted_finish_callback_is_completed_before_the_next_call(session_of_two):
    with pytest.raises(KeyboardInterrupt):
        session_of_two.run(InterruptFirstFinish())
    assert len(InterruptFirstFinish.outcomes) == 1
    session_of_two.wait_until_idle()  # a call does this before it writes rows, which the callback may wait for
    assert InterruptFirstFinish.outcomes == []
    assert session_of_two.run(GatherMessages((3,))) == 2
