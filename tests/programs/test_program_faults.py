"""Failures of programs on all ranks: errors, interrupts, deaths, deadlocks, wrong arguments."""

import _thread
import contextlib
import threading
from collections import Counter, defaultdict, deque

import pytest
import rank_programs as programs
from hypothesis import given, settings
from hypothesis import strategies as st
from library import DEVICE
from system import LIMIT_SECONDS, time_limit
from test_rank_programs import draw_group_programs

import synkhronos as synk
from synkhronos import ranks
from synkhronos.ranks.program_memory import ProgramMemoryLayout

#: Upper bound of the bytes by which a message in a channel is longer than its content: its pickle, and its length.
MAX_MESSAGE_OVERHEAD = 200


def test_mismatched_barriers_are_named(two_ranks_per_test):
    with pytest.raises(RuntimeError, match=r"rank 0 is at barrier 'north', rank 1 is at barrier 'south'"):
        synk.run(programs.arrive_at_different_barriers, ["north", "south"])
    assert len(synk.run(programs.return_arguments)) == 2


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_barrier_that_a_rank_never_reaches_is_named(two_ranks_per_test, failing_rank):
    with pytest.raises(RuntimeError, match=rf"rank {failing_rank} is at the end of the program"):
        synk.run(programs.end_before_a_barrier, failing_rank)


def test_deadlock_of_messages_is_detected(fork):
    fork(3)
    with pytest.raises(
        RuntimeError, match="rank 0 waits for a message of rank 1, rank 1 waits for a message of rank 2"
    ):
        synk.run(programs.receive_from_each_other)
    with pytest.raises(RuntimeError, match="rank 0 waits for a message of rank 1, rank 1 waits at barrier 'late'"):
        synk.run(programs.receive_before_a_barrier)


def test_deadlock_of_groups_is_detected(fork):
    fork(3)
    places = r"rank 1 is at barrier 'north' of group \(0, 1, 2\), rank 2 is at barrier 'south' of group \(1, 2\)"
    with pytest.raises(RuntimeError, match=places):  # WorkerError is a RuntimeError
        synk.run(programs.wait_in_different_groups)
    assert len(synk.run(programs.return_arguments)) == 3


def test_deadlock_of_message_and_barrier_is_detected(two_ranks_per_test):
    with pytest.raises(synk.WorkerError, match=r"waits for a message of rank 0, which is at barrier 'here' of group"):
        synk.run(programs.wait_at_barrier_or_message, "receive")
    with pytest.raises(RuntimeError, match=r"rank 0 is at barrier 'here' of group \(0, 1\), rank 1 is at send\(\)"):
        synk.run(programs.wait_at_barrier_or_message, "send")


def test_random_program_steps_end_or_raise(fork):
    fork(3, timeout=LIMIT_SECONDS)

    @settings(max_examples=20)
    @given(st.data())
    def check(draw):
        steps = draw.draw(draw_group_programs(3))
        steps_by_rank = [draw.draw(st.permutations([step for step in steps if r in step[2]])) for r in range(3)]
        with contextlib.suppress(RuntimeError):  # WorkerError is a RuntimeError
            synk.run(programs.take_group_steps, steps_by_rank)
        assert len(synk.run(programs.return_arguments)) == 3  # no rank was ended

    check()


def can_complete(steps_by_rank, capacity):
    """Return whether a program of messages ends with channels of `capacity` bytes."""
    positions = [0] * len(steps_by_rank)
    channels = defaultdict(deque)

    def can(r):
        kind, peer, n = steps_by_rank[r][positions[r]]
        if kind == "receive":
            return bool(channels[peer, r])
        waiting = channels[r, peer]
        if sum(waiting) + n + MAX_MESSAGE_OVERHEAD <= capacity:
            return True
        # A larger message is sent while the other rank receives it.
        return not waiting and steps_by_rank[peer][positions[peer] :][:1] == [("receive", r, 0)]

    while ready := [r for r, steps in enumerate(steps_by_rank) if positions[r] < len(steps) and can(r)]:
        kind, peer, n = steps_by_rank[ready[0]][positions[ready[0]]]
        if kind == "send":
            channels[ready[0], peer].append(n + MAX_MESSAGE_OVERHEAD)
        else:
            channels[peer, ready[0]].popleft()
        positions[ready[0]] += 1
    return positions == [len(steps) for steps in steps_by_rank]


def test_send_blocks_only_beyond_the_buffer(fork):
    """In any order of sends and receives, programs whose messages fit end, and deadlocks raise errors."""
    fork(3, timeout=LIMIT_SECONDS)
    capacity = ProgramMemoryLayout(segment_key=0, n_ranks=3, n_locks=1).channel_nbytes
    pairs = st.sampled_from([(source, target) for source in range(3) for target in range(3) if source != target])
    sizes = st.sampled_from([0, 10, 1000, 30_000, 60_000, 100_000, 300_000])

    @settings(max_examples=60)
    @given(st.lists(st.tuples(pairs, sizes), min_size=1, max_size=8), st.data())
    def check(drawn, draw):
        steps = [[], [], []]
        for (source, target), n in drawn:
            steps[source].append(("send", target, n))
            steps[target].append(("receive", source, 0))
        steps_by_rank = [draw.draw(st.permutations(rank_steps)) for rank_steps in steps]
        expected = []
        for r in range(3):
            sizes_of = {
                q: [n for kind, target, n in steps_by_rank[q] if (kind, target) == ("send", r)] for q in range(3)
            }
            n_received = Counter()
            expected.append([])
            for kind, source, _ in steps_by_rank[r]:
                if kind == "receive":
                    expected[r].append((n_received[source], sizes_of[source][n_received[source]]))
                    n_received[source] += 1
        fits, can_end = (can_complete(steps_by_rank, limit) for limit in (capacity, float("inf")))
        assert can_end or not fits
        try:
            assert synk.run(programs.exchange_messages, steps_by_rank) == expected
            assert can_end
        except RuntimeError as error:  # WorkerError is a RuntimeError
            assert "the ranks wait for each other" in str(error)
            assert not fits

    check()


def test_send_beyond_the_buffer_can_deadlock(two_ranks_per_test):
    words = "rank 0 waits until rank 1 receives a message, rank 1 waits until rank 0 receives a message"
    with pytest.raises(RuntimeError, match=f"the ranks wait for each other: {words}"):
        synk.run(programs.send_before_receiving, [66_000, 66_000])


def test_error_of_one_rank_ends_ranks_that_take_free_locks(fork):
    fork(3)
    with pytest.raises(ValueError, match="this rank's own"):
        synk.run(programs.lock_until_cancelled, 10)
    assert synk.run(programs.get_stored, "lock_until_cancelled") == [{}] * 3


HOWS = ["computes", "waits in a barrier", "receives", "sends", "waits for a lock"]


@pytest.mark.parametrize("failing_rank", [0, 2])
@pytest.mark.parametrize("how", HOWS)
def test_error_of_one_rank_ends_run(fork, failing_rank, how):
    fork(3)
    with (
        time_limit(),
        pytest.raises(ValueError if failing_rank == 0 else synk.WorkerError, match="this rank's own") as caught,
    ):
        synk.run(programs.fail_on_one_rank, failing_rank, how, 0.1)
    if failing_rank:
        assert "raise ValueError" in caught.value.worker_traceback
    assert len(synk.run(programs.return_arguments)) == 3


@pytest.mark.parametrize("how", ["computes", "waits"])
def test_interrupt_ends_run(how, two_ranks_per_test):
    timer = threading.Timer(0.3, _thread.interrupt_main)
    timer.start()
    with time_limit(), pytest.raises(KeyboardInterrupt):
        synk.run(programs.work_forever, how)
    assert len(synk.run(programs.return_arguments)) == 2


@pytest.mark.parametrize("how", ["in the lock", "in an exchange", "before a barrier", "while others compute"])
@pytest.mark.new_ranks
def test_death_of_a_rank_ends_run(fork, how):
    fork(3)
    with time_limit(), pytest.raises(synk.WorkerError, match="rank 2 .* was killed by SIGKILL"):
        synk.run(programs.kill_one_rank, 2, how)


@pytest.mark.skipif(DEVICE != "host", reason="other devices take longer to start")
@pytest.mark.new_ranks
@pytest.mark.slow
def test_timeout_counts_from_the_last_progress(fork):
    fork(2, timeout=2)
    assert synk.run(programs.work_slowly, 0.1, 25, [0, 1]) == ["done", "done"]


@pytest.mark.skipif(DEVICE != "host", reason="other devices take longer to start")
@pytest.mark.new_ranks
def test_timeout_names_a_rank_without_progress(two_ranks_per_test):
    ranks.get_session().timeout = 0.4  # on a busy machine, a fork may take longer
    with pytest.raises(synk.WorkerError, match="rank 1 did not finish within the 0.4 seconds"):
        synk.run(programs.work_slowly, 0.05, 100, [0])


# -- errors --------------------------------------------------------------------------------------------------


def test_run_refuses_wrong_values(two_ranks_per_test):
    with pytest.raises(
        TypeError, match=r"the program and its arguments have to be pickled for the other ranks: .*lock"
    ):
        synk.run(programs.return_arguments, threading.Lock())
    with pytest.raises(TypeError, match="program: expected a function, got 3"):
        synk.run(3)
    with pytest.raises((TypeError, synk.WorkerError), match="can't be pickled"):  # depending on which rank fails first
        synk.run(programs.return_a_lambda)
    with pytest.raises(TypeError, match="the result of the program of rank 1 can't be unpickled: TypeError: .*'b'"):
        synk.run(programs.return_an_error_of_two_arguments)
    with pytest.raises((TypeError, synk.WorkerError), match=r"rows\[5\]: expected rows\[:5\], the first 5"):
        synk.run(programs.select_rows_by_an_integer, synk.data(list(range(9))))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        ("a lock", ValueError, "expected a lock from 0 to"),
        ("half a lock", TypeError, "number: expected an integer, got 0.5"),
        ("send beyond", ValueError, "dest: expected another rank than"),
        ("receive from oneself", ValueError, "source: expected another rank than"),
        ("receive from a name", TypeError, "source: expected a rank, got 'x'"),
        ("a group of one twice", ValueError, "ranks: expected different ranks"),
        ("a group of others", ValueError, "ranks: expected rank [01], which makes the group"),
        ("a group of halves", TypeError, "ranks: expected integers, got 0.5"),
        ("an average of integers", ValueError, "op: 'avg' of an array is not defined for dtype int64"),
        ("an average of integers in a group", ValueError, "op: 'avg' of an array is not defined for dtype int64"),
        ("a broadcast from rank -1", IndexError, "root: expected 0 to 1, got -1"),
        ("objects", TypeError, "array: expected numbers, got an array of object"),
        ("dates", TypeError, "array: expected numbers, got an array of datetime64"),
        ("records in a group", TypeError, "array: expected numbers, got an array of .*i4"),
        ("a mask", TypeError, "array: expected an array, got a masked one"),
        ("a mask in a group", TypeError, "array: expected an array, got a masked one"),
        ("a sum of flags", ValueError, "op: 'sum' of an array is not defined for dtype bool"),
        ("op", ValueError, "op: expected one of"),
        ("shapes", RuntimeError, "expected the same shape"),
    ],
)
def test_run_refuses_wrong_arguments(two_ranks_per_test, call, error, words):
    # All ranks raise it.  The user gets that of the master, or a WorkerError if a worker was first.
    with pytest.raises((error, synk.WorkerError), match=words) as caught:
        synk.run(programs.call_wrongly, call)
    assert isinstance(caught.value, error) or f"{error.__name__}: " in caught.value.worker_traceback
