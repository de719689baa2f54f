"""Programs that run on each rank at its own pace: messages, collectives, barriers and locks."""

from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import rank_programs as programs
from hypothesis import given
from hypothesis import strategies as st
from library import DEVICE, HOSTS, XLA, assert_same, shared, tensor

import synkhronos as synk
from synkhronos import ranks
from synkhronos.devices.reduce_op import REDUCE_OPS, list_collective_ops
from synkhronos.hosts.program_agent import ProgramBridge
from synkhronos.ranks.program_memory import ProgramMemoryLayout
from synkhronos.ranks.program_peers import ProgramPeers, find_byte_range


def test_run_passes_rank_and_arguments(n_ranks):
    results = synk.run(programs.return_arguments, 1, two="2")
    assert results == [(r, n_ranks, r == 0, (1,), {"two": "2"}) for r in range(n_ranks)]


@pytest.mark.skipif(DEVICE != "host" or bool(HOSTS), reason="workers that are forks of this process")
def test_forked_workers_show_warnings_on_request(n_ranks):
    assert synk.run(programs.count_shown_warnings, "")[1:] == [0] * (n_ranks - 1)
    assert synk.run(programs.count_shown_warnings, "always")[1:] == [1] * (n_ranks - 1)


def test_program_all_reduce_accepts_all_ops(n_ranks):
    values = np.random.default_rng(0).normal(size=(n_ranks, 300_000))
    expected = {
        "sum": values.sum(0),
        "avg": values.mean(0),
        "min": values.min(0),
        "max": values.max(0),
        "prod": values.prod(0),
    }
    for op in list_collective_ops():  # a new op of the table needs no change here
        expected.setdefault(op, REDUCE_OPS[op].reduce_first_axis(values))
    for results in synk.run(programs.all_reduce_by_each_op, values):
        assert list(results) == list(list_collective_ops())
        for op, result in results.items():
            np.testing.assert_allclose(result, expected[op], rtol=1e-12, atol=1e-12, err_msg=op)


def test_program_avg_of_float16_does_not_overflow(n_ranks):
    assert synk.run(programs.average_float16, 40_000.0) == [[40_000.0] * 3] * n_ranks


@pytest.mark.parametrize("n", [1, 30_000])
def test_program_collectives_accept_any_size(n_ranks, n):
    for gathered, broadcast in synk.run(programs.gather_and_broadcast, n):
        assert gathered == [[r] * n for r in range(n_ranks)]
        assert broadcast == f"rank {n_ranks - 1}"


@pytest.mark.parametrize("n", [5, 1_000_000])
def test_send_and_receive_keep_order(n_ranks, n):
    if n_ranks == 1:
        pytest.skip("needs two ranks")
    results = synk.run(programs.send_around, n)
    assert results == [(True, {"rank": (r - 1) % n_ranks}) for r in range(n_ranks)]


@pytest.mark.parametrize("sizes", [[0] * 600, [1000, 60_000, 0, 2049, 60_000, 1000], [131_072 - 200]], ids=len)
def test_send_within_the_buffer_does_not_block(n_ranks, sizes):
    assert sum(sizes) + 200 * len(sizes) <= 131_072
    for r, received in enumerate(synk.run(programs.send_before_receiving, sizes)):
        assert received == [[(n, {q} if n else set()) for n in sizes] for q in range(n_ranks) if q != r]


@pytest.mark.parametrize(("size", "capacity"), [(1, 131_072), (11, 131_072), (16, 65_536), (45, 8192), (1000, 8192)])
def test_send_buffers_are_bounded(size, capacity):
    memory = ProgramMemoryLayout(0, size, size)
    assert memory.channel_nbytes == capacity
    assert memory.channel_nbytes * size**2 <= max(1 << 24, 8192 * size**2)


@given(
    st.lists(
        st.tuples(st.sampled_from(["send", "receive", "poll first host", "poll second host"]), st.integers(0, 60_000)),
        max_size=30,
    )
)
def test_send_bytes_between_hosts(steps):
    """Chunks that rank 0 of a host sends reach rank 1 of another whole and in order, whenever the agents poll."""
    memory = ProgramMemoryLayout(0, 2, 2)
    segments = [SimpleNamespace(buffer=bytearray(memory.nbytes)) for _ in range(2)]
    agents = [ProgramBridge(memory, segment, range(r, r + 1)) for r, segment in enumerate(segments)]
    control = SimpleNamespace(fence=lambda: None, wake=lambda peer, reason: None)
    fake_ranks = [SimpleNamespace(number=r, segments={0: segments[r]}, control=control) for r in range(2)]
    sender, receiver = (ProgramPeers(rank, memory) for rank in fake_ranks)
    in_flight = deque()
    for number, (kind, n) in enumerate(steps * 5):  # more than the ring buffer
        if kind == "send" and sender._words.sent[1] - sender._words.received[1] + 8 + n <= memory.channel_nbytes:
            in_flight.append(bytes([number]) * n)
            sender.send(1, in_flight[-1], "a part")
        elif kind == "receive" and receiver._words.sent[1] > receiver._words.received[1]:
            assert receiver.receive(0, "a part") == in_flight.popleft()
        elif kind == "poll first host":
            for update in agents[0].poll_channels():
                assert agents[1].update_channel(*update) == 1
        elif kind == "poll second host":
            for update in agents[1].poll_channels():
                assert agents[0].update_channel(*update) == 0


@pytest.mark.parametrize("n", [1, 100_003])
def test_program_groups_communicate_among_their_members(n_ranks, n):
    for r, (total, largest, numbers, total_of_all) in enumerate(synk.run(programs.reduce_in_groups, n)):
        members = [m for m in range(n_ranks) if m % 2 == r % 2]
        assert total == sum(m + 1 for m in members)
        assert (largest, numbers) == (max(members) + 1, members)
        assert total_of_all == n_ranks * (n_ranks + 1) / 2


def draw_group_programs(size):
    """Draw steps of overlapping groups: the number, kind, members and array size of each."""
    members = st.lists(st.integers(0, size - 1), min_size=1, unique=True)
    kinds = st.sampled_from(["barrier", "exchange", "sum", "send"])
    steps = st.lists(st.tuples(kinds, members, st.sampled_from([0, 1, 5, 20_000])), min_size=1, max_size=8)
    return steps.map(lambda drawn: [(number, *step) for number, step in enumerate(drawn)])


def compute_values(step):
    """Return the result of a step on each rank."""
    number, kind, members, n = step
    values = {r: np.arange(n) + 10.0 * number + r for r in members}
    if kind == "send" and len(members) > 1:
        return {members[1]: values[members[0]].tolist()}
    if kind == "exchange":
        return dict.fromkeys(members, [(number, r) for r in members])
    return dict.fromkeys(members, sum(values.values()).tolist()) if kind == "sum" else {}


@given(st.data())
def test_overlapping_program_groups_equal_numpy(n_ranks, draw):
    steps = draw.draw(draw_group_programs(n_ranks))
    results = synk.run(programs.take_group_steps, [[step for step in steps if r in step[2]] for r in range(n_ranks)])
    for r in range(n_ranks):
        assert results[r] == {step[0]: compute_values(step)[r] for step in steps if r in compute_values(step)}


def test_send_keeps_large_masked_arrays(n_ranks):
    for r, mask in enumerate(synk.run(programs.send_masked_arrays)[0], 1):
        assert mask == (np.arange(1000) == r).tolist()


@pytest.mark.parametrize("in_group", [False, True])
def test_program_all_reduce_accepts_other_byte_orders(n_ranks, in_group):
    big, little = np.arange(5, dtype=">f8"), np.arange(5, dtype="<f8")
    total = synk.run(programs.add_values, [big] * n_ranks, in_group)
    assert total == [(n_ranks * np.arange(5.0)).tolist()] * n_ranks
    if n_ranks > 1:
        with pytest.raises(RuntimeError, match="expected the same shape, dtype"):
            synk.run(programs.add_values, [little, big] + [little] * (n_ranks - 2), in_group)


@pytest.mark.parametrize("in_group", [False, True])
@pytest.mark.parametrize("value", [2, 0.5, [1.5, 2.5]])
def test_program_all_reduce_accepts_numbers_and_lists(n_ranks, in_group, value):
    total = (n_ranks * np.array(value)).tolist()
    assert synk.run(programs.add_values, [value] * n_ranks, in_group) == [total] * n_ranks


@pytest.mark.parametrize("in_group", [False, True])
def test_program_all_reduce_accepts_bfloat16(n_ranks, in_group):
    values = np.arange(3).astype(pytest.importorskip("ml_dtypes").bfloat16)
    total = synk.run(programs.add_values, [values] * n_ranks, in_group)
    assert total == [(n_ranks * np.arange(3)).tolist()] * n_ranks


def test_program_rows_are_cast_like_data(n_ranks):
    """Rows are copied where NumPy requests a copy or another dtype."""
    dtypes = synk.run(programs.convert_rows, synk.data([1.0, 2.0]), synk.data(3.0))
    assert dtypes == [[True, True, False, ValueError, TypeError, [2.0, 1.0]]] * n_ranks


def test_program_rows_of_a_file_are_read_only(n_ranks, tmp_path):
    np.save(tmp_path / "x.npy", np.ones((4, 2)))
    with pytest.raises((ValueError, synk.WorkerError), match="got rows of a file"):
        synk.run(programs.write_zeros, synk.data_file(tmp_path / "x.npy"))


def test_find_byte_range_refuses_arrays():
    with pytest.raises(TypeError, match="rows: expected rows of a Data object, got ndarray"):
        find_byte_range(np.zeros(3))


def test_lock_loses_no_update(n_ranks):
    counter = synk.data(np.zeros(100))
    turns = synk.run(programs.add_ones, counter, 2000)
    assert np.asarray(counter).tolist() == [2000.0 * n_ranks] * 100
    assert sorted(turn for rank_turns in turns for turn in rank_turns) == list(range(2000 * n_ranks))


@pytest.mark.parametrize("seconds", [0, 0.1])
def test_lock_acquire_returns_false_after_its_timeout(n_ranks, seconds):
    assert synk.run(programs.acquire_with_timeout, seconds) == [[True], *[[False, True]] * (n_ranks - 1)]


def test_functions_in_run_compute_locally(n_ranks):
    x, w = tensor.dmatrix("x"), shared(np.zeros(3), "w")
    step = synk.function([x], x.sum(), updates=[(w, w + x[0])])
    rows = np.arange(3.0 * n_ranks).reshape(n_ranks, 3)
    for r, (losses, value) in enumerate(synk.run(programs.step_on_own_rows, step, w, synk.data(rows))):
        assert_same(losses, [rows[r].sum()] * (r + 1))
        assert_same(value, (r + 1) * rows[r])


def test_run_takes_many_steps_per_launch(n_ranks):
    x, w = tensor.dmatrix("x"), shared(np.zeros(3), "w")
    step = synk.function([x], (x * w).sum(), updates=[(w, w + x[0])])
    rows = np.arange(6.0).reshape(2, 3)
    for losses, value in synk.run(programs.launch_many_steps, step, w, synk.data(rows), 5):
        if not XLA:
            assert losses is None
            continue
        expected, position = [], np.zeros(3)
        for i in range(5):
            expected.append((rows[i % 2] * position).sum())
            position = position + rows[i % 2]
        assert_same(losses, expected)
        assert_same(value, position)


@pytest.mark.parametrize("count", [0, 1, 10, 101])
def test_program_shares_cover_all_rows_in_a_fixed_order(n_ranks, count):
    shares = synk.run(programs.get_share_of_rows, count, 3, 7)
    order = np.concatenate(shares)
    assert sorted(order) == list(range(count))
    assert order.tolist() == np.random.default_rng((7, 3)).permutation(count).tolist()


def test_lock_release_notifies_a_remote_waiter(n_ranks):
    session = ranks.get_session()
    memory = ProgramMemoryLayout(0, n_ranks, n_ranks + 1)
    segment = session.memory.create_segment(memory.nbytes)
    memory = replace(memory, segment_key=segment.key)
    memory.initialize_locks(segment)
    peers, bridge = ProgramPeers(session.rank, memory), ProgramBridge(memory, segment, range(n_ranks))
    with peers.get_lock(0):
        bridge.set_agent_waiting(0, True)
        assert bridge.try_acquire(0, 7) is None
    assert not memory.get_semaphore(segment, 0).acquire(0)  # a rank of this host holds it
    assert bridge.try_acquire(0, 7) == 1
    bridge.set_agent_waiting(0, False)
    bridge.release(0)
    with peers.get_lock(0) as lock:
        assert lock.turn == 2
    session.memory.release("segment", memory.segment_key)
