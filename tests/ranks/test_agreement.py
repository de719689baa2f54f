"""A model checker of all interleavings in which ranks of several hosts start a collective, fail, and die.

The hosts are modelled: control memory by lists, MPI by queues, NCCL by the set of ranks that have called it.  Ranks and
agents run the library's own code (`Rank`, `BarrierTally`, `CollectiveWatchdog`), one access to shared state at a time.
`explore` visits all reachable states.

Each rank runs two commands.  In the first, the ranks connect (exchange NCCL's unique id, then enter NCCL's init), start
a collective, and then wait at a barrier, or notify the others that they have started.  A rank may fail between any two
of these steps.  The second command reads the decision on the first, and compares the connections, as every collective
does before it calls NCCL.
"""

import contextlib
import math
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
from library import DEVICE

from synkhronos.devices.cuda.watchdog import CollectiveWatchdog
from synkhronos.hosts.agent import Agent
from synkhronos.ranks import Cancelled
from synkhronos.ranks.agreement import BARRIER_BITS, BarrierTally, read_last_common_barrier, record_last_common_barrier
from synkhronos.ranks.command_barriers import CommandBarriers
from synkhronos.ranks.control_memory import ControlMemory
from synkhronos.ranks.rank import Rank

pytestmark = [pytest.mark.skipif(DEVICE != "host", reason="has no arrays")]

FIRST, SECOND = 1, 2
#: Steps of a rank in the first command; it may fail before each of them and after the last.
WRITE_ID, READ_ID, ENTER, INIT, START, ARRIVE, WAIT = range(7)
#: States of a rank after the first command, and after the second.
FAILED, ABORTED, DONE, FINISHED = range(7, 11)
#: State of a rank that the master has ended.
ENDED = 11


class Blocked(Exception):
    """This transition must wait for another."""


class Memory:
    """Fake of a host's control memory."""

    def __init__(self, local_ranks, size):
        self.local_ranks, self.size = local_ranks, size
        self.words, self.arrived, self.done = [0] * (ControlMemory.COMMON_BARRIER_ODD + 1), [0] * size, [0] * size

    def fence(self):
        pass

    def wake(self, rank, reason):
        pass

    def get_slot(self, rank, parity):
        return b""

    wake_local_ranks = wake_local_ranks_after_fence = wake_all_ranks = lambda self, reason=0: None
    decision_lock = SimpleNamespace(acquire=lambda seconds: True, release=lambda: None)
    valid_flags = np.ones(4, np.int32)

    def wait(self, me, ready, reason, watch, poll):
        if not ready():
            raise Blocked

    def get_state(self):
        return tuple(self.words), tuple(self.arrived), tuple(self.done)

    def set_state(self, state):
        self.words, self.arrived, self.done = map(list, state)


class Connection:
    """Fake of a connection of NCCL."""

    def __init__(self):
        self.generation = 0

    def abort(self):
        self.generation = 0


def make_watchdog(rank):
    """Return a watchdog without a thread, of a GPU that has completed all earlier collectives."""
    gpu = SimpleNamespace(host_mark=[0], pin_pages=lambda address, nbytes: None)
    watchdog = CollectiveWatchdog(rank, gpu, Connection(), stream=7)
    watchdog._wait_for_other_hosts = lambda: None
    return watchdog


class SimulatedSession:
    """Hosts with their ranks and agents; `get_state` and `set_state` read and write all of it."""

    def __init__(self, counts, waits=True, faults=1, deaths=0, agents_read_first="failed", early=False):
        self.size, self.waits, self.faults = sum(counts), waits, faults
        self.early = early  # whether an agent may poll when nothing has changed
        self.reads_failed_first = agents_read_first == "failed"
        bounds = [sum(counts[:i]) for i in range(len(counts) + 1)]
        self.hosts = [range(*bounds[i : i + 2]) for i in range(len(counts))]
        self.host_by_rank = [h for h, local_ranks in enumerate(self.hosts) for _ in local_ranks]
        self.memories = [Memory(local_ranks, self.size) for local_ranks in self.hosts]
        threads = SimpleNamespace()
        self.ranks = [Rank(r, 0, self.memories[self.host_by_rank[r]], lambda: None, threads) for r in range(self.size)]
        self.watchdogs = [make_watchdog(rank) for rank in self.ranks]
        for rank, watchdog in zip(self.ranks, self.watchdogs, strict=True):
            rank.pending_operations.append(watchdog)
            rank.begin_command(FIRST)
        for memory in self.memories:
            memory.words[ControlMemory.POSTED] = FIRST
        self.tallies = [BarrierTally(len(counts), h) for h in range(len(counts))]
        self.pcs, self.inits, self.started = [WRITE_ID] * self.size, [0] * self.size, [0] * self.size
        self.passed = [0] * self.size  # 1: found that all ranks reached the barrier, -1: found that some did not
        self.seen = [None] * len(counts)  # the first of two values that an agent reads, between the reads
        self.queues = {(g, h): () for g in range(len(counts)) for h in range(len(counts)) if g != h}
        self.faults_left, self.deaths_left, self.dead = faults, deaths, ()

    # -- states ------------------------------------------------------------------------------------------------

    def get_state(self):
        return (
            tuple(m.get_state() for m in self.memories),
            tuple((r.command_number, r.barriers.last_arrived) for r in self.ranks),
            tuple(
                (g._pending_command_number, g._started_barrier_number, g.active_connection.generation)
                for g in self.watchdogs
            ),
            tuple(
                (tuple(t.barrier_numbers), tuple(map(tuple, t.undecided)), t.last_failed_command) for t in self.tallies
            ),
            tuple(self.pcs),
            tuple(self.inits),
            tuple(self.started),
            tuple(self.passed),
            tuple(self.seen),
            tuple(self.queues.values()),
            (self.faults_left, self.deaths_left, self.dead),
        )

    def set_state(self, state):
        memories, ranks, watchdogs, tallies, pcs, inits, started, passed, seen, queues, left = state
        self.faults_left, self.deaths_left, self.dead = left
        for memory, memory_state in zip(self.memories, memories, strict=True):
            memory.set_state(memory_state)
        for rank, rank_state in zip(self.ranks, ranks, strict=True):
            rank.command_number, rank.barriers.last_arrived = rank_state
        for watchdog, watchdog_state in zip(self.watchdogs, watchdogs, strict=True):
            (
                watchdog._pending_command_number,
                watchdog._started_barrier_number,
                watchdog.active_connection.generation,
            ) = watchdog_state
        for tally, (barrier_numbers, failures, tally.last_failed_command) in zip(self.tallies, tallies, strict=True):
            tally.barrier_numbers, tally.undecided = list(barrier_numbers), [deque(queue) for queue in failures]
        self.pcs, self.inits, self.started = list(pcs), list(inits), list(started)
        self.passed, self.seen = list(passed), list(seen)
        self.queues = dict(zip(self.queues, queues, strict=True))

    # -- transitions -------------------------------------------------------------------------------------------

    def iterate_transitions(self):
        """Yield the transitions, as pairs of a method and its argument; a blocked method raises `Blocked`."""
        if self.dead:
            yield self.end_all_ranks, 0
        for r in range(self.size):
            if self.host_by_rank[r] not in self.dead:
                yield self.take_step, r
                yield self.run_watchdog, r
                if self.faults_left and self.pcs[r] < FAILED:
                    yield self.fail, r
        if len(self.hosts) > 1:
            for h in range(len(self.hosts)):
                if h not in self.dead:
                    yield self.poll_agent, h
                    if h and self.deaths_left:
                        yield self.kill_host, h
            for pair in self.queues:
                if pair[1] not in self.dead:
                    yield self.deliver, pair

    def kill_host(self, h):
        """Kill a host, with its agent and its ranks; messages that it has sent still arrive."""
        if all(pc >= DONE for pc in self.pcs):
            raise Blocked
        self.deaths_left, self.dead = 0, (h,)

    def end_all_ranks(self, _):
        """Let the master end all workers after a death, and abort its connection."""
        if ENDED in self.pcs:
            raise Blocked
        self.pcs = [ENDED] * self.size
        for watchdog in self.watchdogs:
            watchdog.abort()

    def take_step(self, r):
        """Take a rank's next step unless it must wait; after a failure of another rank, abort the command."""
        rank, watchdog, pc = self.ranks[r], self.watchdogs[r], self.pcs[r]
        try:
            if pc == WRITE_ID:
                rank.barriers.arrive()
            elif pc == READ_ID:
                rank.barriers.wait_for_barrier(rank.barriers.last_arrived)
            elif pc == ENTER:
                self.inits[r] = 1
            elif pc == INIT:
                if not all(self.inits):  # NCCL waits for all ranks
                    rank.barriers.check_cancelled()
                    raise Blocked
                watchdog.active_connection.generation = 1
            elif pc == START:
                if not watchdog.active_connection.generation:  # aborted in the meantime
                    raise ArithmeticError
                watchdog._pending_command_number, watchdog._started_barrier_number = FIRST, math.inf
                self.started[r] = 1
            elif pc == ARRIVE:
                watchdog._started_barrier_number = rank.barriers.next_number
                rank.barriers.arrive()
            elif pc == WAIT:
                if self.waits:
                    rank.barriers.wait_for_barrier(rank.barriers.last_arrived)
                    self.passed[r] = 1
                self.pcs[r] = DONE - 1
            elif pc in (FAILED, ABORTED):
                self.end_first(r)
            elif pc == DONE:
                self.begin_second(r)
            else:
                raise Blocked
        except (Cancelled, ArithmeticError) as error:
            self.abort_first(r, error)
            return
        self.pcs[r] += 1

    def fail(self, r):
        """Raise an exception on a rank."""
        self.faults_left -= 1
        self.abort_first(r, ArithmeticError())

    def abort_first(self, r, error):
        """End the first command on a rank by an error, and abort an incomplete connection."""
        if self.pcs[r] < START:
            self.watchdogs[r].active_connection.abort()
        if isinstance(error, Cancelled):
            self.pcs[r] = ABORTED
        else:
            self.pcs[r] = FAILED
            self.ranks[r].control.words[ControlMemory.FAILED] = FIRST

    def end_first(self, r):
        """End the failed first command on a rank: record the last common barrier, or read whether all reached it."""
        rank = self.ranks[r]
        if self.pcs[r] == FAILED:
            rank.barriers.fail_command()  # on one host, records the last common barrier
        elif self.waits:  # as `CollectiveWatchdog.wait_until_started`: continue if all ranks have arrived
            has_arrived = self.watchdogs[r]._started_barrier_number == rank.barriers.last_arrived
            self.passed[r] = (
                1 if has_arrived and rank.barriers.wait_and_check_all_reached(rank.barriers.last_arrived) else -1
            )
        self.pcs[r] = DONE - 1

    def begin_second(self, r):
        """Begin the second command, posted by the master when all ranks are done and its host has decided."""
        rank = self.ranks[r]
        memory = rank.control
        if r == 0:
            if not all(pc >= DONE for pc in self.pcs):
                raise Blocked
            memory.done[:] = [FIRST] * self.size
            rank.begin_command(SECOND)
            for host, other in enumerate(self.memories):
                if host and self.has_first_command_failed():
                    # Messages between two hosts keep their order: the failure arrives before the command.
                    self.flush(0, host)
                other.words[ControlMemory.POSTED] = SECOND
        elif memory.words[ControlMemory.POSTED] < SECOND:
            raise Blocked
        else:
            rank.begin_command(SECOND)
        rank.barriers.arrive()  # publishes its connection; barriers of the first command are over

    def has_first_command_failed(self):
        return self.memories[0].words[ControlMemory.FAILED] == FIRST

    def flush(self, g, h):
        while self.queues[g, h]:
            self.deliver((g, h))

    def run_watchdog(self, r):
        """Run the watchdog thread of a rank's collective."""
        rank, watchdog = self.ranks[r], self.watchdogs[r]
        if not (
            watchdog._pending_command_number and rank.barriers.last_failed_command == watchdog._pending_command_number
        ):
            raise Blocked
        before = watchdog._pending_command_number, watchdog.active_connection.generation
        watchdog.resolve_failed_command(watchdog._pending_command_number)
        if before == (watchdog._pending_command_number, watchdog.active_connection.generation):
            raise Blocked

    def poll_agent(self, h):
        """Take half of an agent's poll: first read one value; then read the other, and send changes."""
        memory, local_ranks = self.memories[h], self.hosts[h]

        def failed():
            return memory.words[ControlMemory.FAILED]

        def barrier_number():
            return min(memory.arrived[local_ranks.start : local_ranks.stop])

        first, second = (failed, barrier_number) if self.reads_failed_first else (barrier_number, failed)
        if self.seen[h] is None:
            first_value = first()
            is_old = self.is_unchanged(h, failed(), barrier_number())
            if is_old and not self.early:
                raise Blocked
            self.seen[h] = first_value
            self.is_idle = is_old
            return
        self.is_idle = self.is_unchanged(h, failed(), barrier_number())
        pair = (self.seen[h], second()) if self.reads_failed_first else (second(), self.seen[h])
        self.seen[h] = None
        sends_barrier, sends_failed = self.tallies[h].record_own_state(*pair)
        for other in range(len(self.hosts)):
            if other != h:
                more = ((("barrier", pair[1]),) if sends_barrier else ()) + (
                    (("failed", pair[0]),) if sends_failed else ()
                )
                self.queues[h, other] += more
        self.record_decisions(h)

    def is_unchanged(self, h, failed, barrier_number):
        tally = self.tallies[h]
        return failed <= tally.last_failed_command and (
            barrier_number <= tally.barrier_numbers[h] or barrier_number >> BARRIER_BITS <= tally.last_failed_command
        )

    def deliver(self, pair):
        """Let an agent receive the next message of another."""
        source, h = pair
        if not self.queues[pair]:
            raise Blocked
        (kind, number), *rest = self.queues[pair]
        self.queues[pair] = tuple(rest)
        memory, tally = self.memories[h], self.tallies[h]
        if kind == "barrier":
            tally.receive_barrier(source, number)
            for r in self.hosts[source]:
                memory.arrived[r] = number
        else:
            tally.receive_failed(source, number)
            memory.words[ControlMemory.FAILED] = max(number, memory.words[ControlMemory.FAILED])
            self.record_decisions(h)

    def record_decisions(self, h):
        for number, barrier_number in self.tallies[h].pop_decided():
            record_last_common_barrier(self.memories[h].words, number, barrier_number)

    # -- invariants --------------------------------------------------------------------------------------------

    def check(self, is_last):
        """Check a state; ``is_last`` means that no transition is possible."""
        failed = any(memory.words[ControlMemory.FAILED] == FIRST for memory in self.memories)
        generations = [watchdog.active_connection.generation for watchdog in self.watchdogs]
        if not is_last:
            return
        if self.dead:
            assert set(self.pcs) == {ENDED} and not any(generations), "a rank runs after a host died"
            return
        assert set(self.pcs) == {FINISHED}, "a rank never ends"
        for memory in self.memories:
            assert (memory.words[ControlMemory.FAILED] == FIRST) == failed, "a host was not informed of the failure"
        assert not {1, -1} <= set(self.passed), "some ranks pass the barrier, and others abort"
        if any(self.inits) and not all(self.inits):
            assert failed and not any(generations), "a rank alone in NCCL's init was not informed"
        if not failed:
            assert all(generations) and all(self.started)
        for generation in generations:
            assert not generation or all(self.inits), "a connection without all ranks"
        for r, generation in enumerate(generations):
            if self.started[r] and generation:
                # A started collective ends only if all ranks have started it and none has aborted it.
                assert all(self.started) and all(generations), "a collective neither ends nor is aborted"
        if all(generations):
            assert len(set(self.started)) == 1, "connections are equal, but not the collectives started on them"


def explore(simulated_session):
    """Visit and check all reachable states; return their number."""
    first = simulated_session.get_state()
    known, waiting = {first: None}, [first]
    while waiting:
        state = waiting.pop()
        simulated_session.set_state(state)
        is_last = True
        for transition, argument in list(simulated_session.iterate_transitions()):
            simulated_session.set_state(state)
            simulated_session.is_idle = False
            try:
                transition(argument)
            except Blocked:
                continue
            is_last &= simulated_session.is_idle
            after = simulated_session.get_state()
            if after not in known:
                known[after] = state, transition.__name__, argument
                waiting.append(after)
        simulated_session.set_state(state)
        try:
            simulated_session.check(is_last)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{list_transitions(known, state)}") from None
    return len(known)


def list_transitions(known, state):
    """Return the transitions that led to a state, one per line."""
    lines = []
    while known[state] is not None:
        state, name, argument = known[state]
        lines.insert(0, f"{name} {argument}, pcs {state[4]}")
    return "\n".join(lines)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Do not defer signals: that would take most of the time."""
    monkeypatch.setattr("synkhronos.ranks.command_barriers.defer_signals", contextlib.nullcontext)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(("counts", "faults"), [((1, 1), 1), ((2,), 1), ((2,), 2), ((3,), 1), ((3,), 2)])
def test_model_all_ranks_decide_equally_in_any_order(counts, faults, waits):
    assert explore(SimulatedSession(counts, waits, faults)) > 200


@pytest.mark.parametrize("waits", [True, False])
def test_model_finds_ranks_that_decide_alone(monkeypatch, waits):
    def fail(self):
        record_last_common_barrier(self._control.words, FIRST, min(self._control.arrived))

    monkeypatch.setattr(CommandBarriers, "fail_command", fail)
    with pytest.raises(AssertionError, match="neither ends nor is aborted"):
        explore(SimulatedSession((3,), waits, faults=2))


def test_model_finds_a_read_before_the_failure_is_written(monkeypatch):
    def abort_first(self, r, error):
        original(self, r, error)
        if self.pcs[r] == FAILED:
            memory = self.memories[0]
            memory.words[ControlMemory.FAILED], memory.words[ControlMemory.MESSAGE_NBYTES] = 0, min(memory.arrived)

    def fail(self):
        words = self._control.words
        words[ControlMemory.FAILED] = FIRST
        record_last_common_barrier(words, FIRST, words[ControlMemory.MESSAGE_NBYTES])

    original = SimulatedSession.abort_first
    monkeypatch.setattr(SimulatedSession, "abort_first", abort_first)
    monkeypatch.setattr(CommandBarriers, "fail_command", fail)
    with pytest.raises(AssertionError, match="some ranks pass the barrier, and others abort"):
        explore(SimulatedSession((3,)))


@pytest.mark.slow
def test_model_two_ranks_on_a_host_report_once():
    assert explore(SimulatedSession((2, 1))) > 10_000


def test_model_death_of_a_host_ends_all():
    assert explore(SimulatedSession((1, 1), deaths=1)) > 2_000


def test_model_agent_may_poll_early():
    assert explore(SimulatedSession((1, 1), early=True)) > 5_000


@pytest.mark.slow
def test_model_finds_an_agent_that_reads_in_the_wrong_order():
    # A rank that arrives between the two reads continues, while its host decides that not all had arrived.
    with pytest.raises(AssertionError, match="some ranks pass the barrier, and others abort"):
        explore(SimulatedSession((2, 1), agents_read_first="barrier", early=True))


@pytest.mark.parametrize("waits", [True, False])
def test_model_finds_a_host_that_decides_too_early(monkeypatch, waits):
    def pop_decided(self):
        failures = [queue.popleft() for queue in self.undecided if queue]
        return [(command, min(self.barrier_numbers)) for command, _ in failures]

    monkeypatch.setattr(BarrierTally, "pop_decided", pop_decided)
    with pytest.raises(AssertionError, match="neither ends nor is aborted"):
        explore(SimulatedSession((1, 1), waits))


def test_model_finds_a_host_that_forwards_no_failures(monkeypatch):
    def update(self, failed, barrier_number):
        return original(self, failed, barrier_number)[0], False

    original = BarrierTally.record_own_state
    monkeypatch.setattr(BarrierTally, "record_own_state", update)
    with pytest.raises(AssertionError, match="never ends"):
        explore(SimulatedSession((1, 1)))


def test_agent_counts_steps_of_other_hosts():
    """The model receives messages by its own method; this test calls that of the agent."""
    barrier_number = (FIRST << BARRIER_BITS) + 2
    agent = object.__new__(Agent)
    agent._control, agent._tally, agent._ranks_by_host = (
        Memory(range(1), 2),
        BarrierTally(2, 0),
        [range(1), range(1, 2)],
    )
    agent._on_barrier(1, barrier_number, [])
    agent._tally.record_own_state(0, barrier_number)
    agent._tally.record_own_state(FIRST, barrier_number)
    agent._on_failed(1, FIRST)
    assert read_last_common_barrier(agent._control.words, FIRST) == barrier_number


if __name__ == "__main__":  # takes minutes
    for counts in ((2, 1), (1, 2), (1, 1, 1)):
        for waits in (True, False):
            for deaths in (0, 1):
                print(counts, waits, deaths, explore(SimulatedSession(counts, waits, deaths=deaths)), flush=True)
