"""JAX arrays in shared variables, inputs and outputs; interrupts of launches.

The tests start XLA in this process, after which workers start as new processes rather than forks.  So they run only
with SYNKHRONOS_TEST_DEVICE=jax or gpu.
"""

import signal
import time

import numpy as np
import pytest
from library import DEVICE, INTERPRETED, XLA, read_results, shared
from library import tensor as T
from xla_launches import Alarm, get_runner

import synkhronos as synk
from synkhronos import ranks
from synkhronos.devices import JAX
from synkhronos.devices.jax.scalar_log import ScalarLog
from synkhronos.graph_libraries import get_library
from synkhronos.graph_libraries.library import has_other_references
from synkhronos.launcher.model_class.model_variables import group_variables, track_generators
from synkhronos.ranks import Command

pytestmark = pytest.mark.skipif(not XLA, reason="about JAX arrays")

VALUE = np.arange(4.0)


@pytest.mark.parametrize("look", [lambda borrowed: borrowed, np.asarray], ids=["array", "view"])
def test_get_value_borrow_survives_donated_updates(look, two_ranks_per_test):
    w = shared(np.arange(1000.0), "w")
    f = synk.function([], updates=[(w, w + 1)])
    f()
    borrowed = look(w.get_value(borrow=True))
    for _ in range(3):
        f()
        read_results(synk.function([], (w.sum(), "sum"))())
    np.testing.assert_array_equal(borrowed, np.arange(1000.0) + 1)
    np.testing.assert_array_equal(w.get_value(), np.arange(1000.0) + 4)
    np.testing.assert_array_equal(synk.get_value(1, w), np.arange(1000.0) + 4)


def test_launch_passes_one_array_per_random_generator(two_ranks_per_test):
    random = T.random.RandomStream(seed=1)
    w = shared(np.zeros(3), "w")
    f = synk.function([], (w.sum(), "avg"), updates=[(w, w + random.normal(size=3) * random.uniform(size=3))])
    first = [float(f()) for _ in range(3)]
    assert len(set(first)) == 3
    executable = get_runner(f)
    storages = [storage[0] for storage in executable._storages]
    assert len(storages) == 3 and all(JAX.owns(value) for value in storages)
    assert sorted(value.shape for value in storages) == [(2,), (2,), (3,)]


def test_references_to_a_containers_array_are_detected(two_ranks_per_test):
    w = shared(np.arange(3.0), "w")
    f = synk.function([], updates=[(w, w + 1)])
    f()
    assert not has_other_references(w.container.storage)
    borrowed = w.get_value(borrow=True)
    assert JAX.owns(borrowed) and has_other_references(w.container.storage)
    del borrowed
    assert not has_other_references(w.container.storage)


def test_get_value_survives_updates_and_collectives(two_ranks_per_test):
    w = shared(np.arange(3.0), "w")
    f = synk.function([], (w, None), updates=[(w, w + 1)])
    results = [f() for _ in range(3)]
    value = w.get_value()
    synk.all_reduce(w, "sum")
    f()
    for i, result in enumerate(results):
        np.testing.assert_array_equal(result, np.arange(3.0) + i)
    np.testing.assert_array_equal(value, np.arange(3.0) + 3)
    np.testing.assert_array_equal(w.get_value(), 2 * (np.arange(3.0) + 3) + 1)


@pytest.mark.parametrize("batch", [None, [3, 1, 2, 0], slice(None, None, -1)])
def test_identity_outputs_do_not_alias_inputs(batch, two_ranks_per_test):
    # XLA may return an input as an output, and the memory of inputs is reused.
    x = T.dvector("x")
    s, t = shared(np.zeros(1), "s"), shared(np.zeros(1), "t")
    f = synk.function([x], [(x, "gather"), (x, None)], updates=[(s, x), (t, x)])
    data = synk.data(VALUE)
    order = np.arange(4) if batch is None else np.arange(4)[batch]
    results = []
    for i in range(5):
        data[:] = VALUE + i
        results.append((f(data, batch=batch), f(VALUE - i, batch=batch)))
        for rank_value in synk.gather([s, t], nd_up=0):
            np.testing.assert_array_equal(rank_value, (VALUE - i)[order])
    for i, (data_results, array_results) in enumerate(results):
        for (joined, rank_value), value in ((data_results, VALUE + i), (array_results, VALUE - i)):
            np.testing.assert_array_equal(joined, value[order])
            np.testing.assert_array_equal(rank_value, value[order][:2])


def test_updates_of_two_variables_do_not_alias(two_ranks_per_test):
    s, t = shared(np.zeros(2), "s"), shared(np.zeros(2), "t")
    add = synk.function([], updates=[(s, s + t + 1), (t, s + t + 1)])
    scale = synk.function([], updates=[(s, s * 10)])
    for _ in range(2):
        add()
        synk.all_reduce(s, "avg")
    scale()
    np.testing.assert_array_equal(synk.gather([s, t]), np.stack([np.full((2, 2), 30), np.full((2, 2), 3)]))


def test_updates_can_swap_variables(two_ranks_per_test):
    s, t = shared(np.zeros(2), "s"), shared(np.ones(2), "t")
    swap = synk.function([], updates=[(s, t), (t, s)])
    for i in range(3):
        swap()
        ones, zeros = np.ones((2, 2)), np.zeros((2, 2))
        np.testing.assert_array_equal(synk.gather([s, t]), [zeros, ones] if i % 2 else [ones, zeros])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "int8", "uint16", "int64", "bool"])
def test_shared_variables_keep_their_dtype(dtype, two_ranks_per_test):
    w = shared(np.ones(4, dtype), "w")
    f = synk.function([], (w, "gather"), updates=[(w, w[::-1])])
    assert f().dtype == dtype
    for collective in (
        lambda: synk.all_reduce(w, "max"),
        lambda: synk.broadcast(w),
        lambda: synk.scatter(w, w.get_value()),
    ):
        if dtype != "complex64":
            collective()
    assert {synk.get_value(r, w).dtype for r in range(2)} == {np.dtype(dtype)}


COLLECTIVES = {
    "call": (lambda f, w: f(), [5, 5, 1, 1]),
    "broadcast": (lambda f, w: synk.broadcast(w), [5, 5, 5, 5]),
    "broadcast values": (lambda f, w: synk.broadcast(w, [7.0, 7.0]), [7, 7, 7, 7]),
    "scatter": (lambda f, w: synk.scatter(w, np.arange(4.0)), [0, 1, 2, 3]),
    "gather": (lambda f, w: synk.gather(w), [5, 5, 1, 1]),
    "all_gather": (lambda f, w: synk.all_gather(w), [5, 5, 1, 1] * 2),
    "reduce": (lambda f, w: synk.reduce(w, "sum"), [6, 6, 1, 1]),
    "all_reduce": (lambda f, w: synk.all_reduce(w, "sum"), [6, 6, 6, 6]),
    "reduce_scatter": (lambda f, w: synk.reduce_scatter(w, "sum"), [6, 6]),
    "set_value": (lambda f, w: synk.set_value(1, w, [3.0, 3.0]), [5, 5, 3, 3]),
    "get_value": (lambda f, w: synk.get_value(0, w), [5, 5, 1, 1]),
    "get_shapes": (lambda f, w: synk.get_shapes(w), [5, 5, 1, 1]),
}


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("nccl", [True, False] if DEVICE == "gpu" else [True])
def test_numpy_values_of_shared_variables_become_jax_arrays(name, nccl, monkeypatch, two_ranks_per_test):
    act, expected = COLLECTIVES[name]
    w = shared(np.ones(2), "w")
    f = synk.function([], (w, "gather"))
    f()
    assert JAX.owns(w.container.storage[0])
    w.set_value(np.full(2, 5.0))
    act(f, w)
    np.testing.assert_array_equal(f(), expected)
    w.set_value(np.full(2, 9.0))
    assert np.asarray(f())[0] == 9
    assert JAX.owns(w.container.storage[0])


def test_jax_and_host_functions_share_variables(two_ranks_per_test):
    x = T.dvector("x")
    w = shared(np.ones(2), "w")
    compiled = synk.function([x], (w * x.sum(), "gather"), updates=[(w, w + 1)])
    interpreted = synk.function([x], (w * x.sum(), "gather"), updates=[(w, w + 1)], mode=INTERPRETED)
    for i in range(3):
        np.testing.assert_array_equal(compiled(np.ones(2)), [1 + 2 * i] * 4)
        np.testing.assert_array_equal(interpreted(np.ones(2)), [2 + 2 * i] * 4)
        synk.all_reduce(w)
    np.testing.assert_array_equal(synk.gather(w), np.full((2, 2), 7))


@pytest.mark.usefixtures("alarm_handler")
def test_interrupt_in_a_launch_keeps_values(two_ranks_per_test):
    # The old value is donated, and the new one is not stored yet.
    w = shared(np.zeros(1000), "w")
    f = synk.function([], [(w.sum() / 1000, None)], updates=[(w, w + 1)])
    losses = [f()[0] for _ in range(20)]
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        losses.append(f()[0])
        seconds.append(time.perf_counter() - start)
    median = np.median(seconds)  # on a machine with other programs too
    count, interrupted = len(losses), 0
    for delay in np.random.default_rng(0).uniform(1e-5, 1.2 * median, 150):
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                losses.append(f()[0])
                count += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Alarm:
            interrupted += 1
            now = float(np.asarray(w.get_value())[0])
            assert now in (count, count + 1)
            count = int(now)
    assert interrupted > 10
    values = [float(loss) for loss in losses]
    assert values == sorted(values) and values[0] == 0 and f()[0] == count


def test_interrupt_of_a_launch_for_which_jax_compiles_keeps_values(fork, monkeypatch):
    from jax._src.interpreters import pxla

    fork(1)
    n, w = T.lscalar("n"), shared(np.ones(3), "w")
    f = synk.function([], updates=[(w, w + 1)])
    f_of_length = synk.function([], bcast_inputs=[n], updates=[(w, T.concatenate([1 + w[:n], w[n:] + 1]))])
    synk.distribute()
    execute = pxla.ExecuteReplicated.__call__

    def execute_and_interrupt(*arguments):
        results = execute(*arguments)
        if any(getattr(array, "is_deleted", bool)() for array in arguments):  # else JAX traces
            signal.raise_signal(signal.SIGINT)
        return results

    def scatter(rows):
        synk.scatter(w, rows)

    for call, lengths, set_rows, size in [
        (f, [], w.set_value, 3),
        (f, [], w.set_value, 4),
        (f, [], scatter, 5),
        (f_of_length, [2], scatter, 5),
        (f_of_length, [3], scatter, 5),
    ]:
        set_rows(np.ones(size))
        monkeypatch.setattr(pxla.ExecuteReplicated, "__call__", execute_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            call(*lengths)
        monkeypatch.undo()
        np.testing.assert_array_equal(w.get_value(), np.full(size, 2.0))
        call(*lengths)


@pytest.mark.usefixtures("alarm_handler")
@pytest.mark.parametrize("entry_added", [False, True])
def test_interrupt_after_a_launch_keeps_results_aligned(monkeypatch, entry_added, two_ranks_per_test):
    # The launch has written its number, which is unread; the next launch's number could be confused with it.
    w = shared(np.zeros(3), "w")
    f = synk.function([], [(w.sum() / 3, None)], updates=[(w, w + 1)])
    first, entries, raised = f()[0], ScalarLog.record_launch, []

    def interrupted(log, times):
        if not raised:
            raised.append(entries(log, times) if entry_added else 1)
            raise Alarm
        return entries(log, times)

    monkeypatch.setattr(ScalarLog, "record_launch", interrupted)
    with pytest.raises(Alarm):
        f()
    assert [float(f()[0]) for _ in range(3)] == [2, 3, 4] and float(first) == 0


class InterruptingMetadata:
    """Metadata of an argument of a JAX function, which an interrupt hits as JAX compares it."""

    def __eq__(self, other):
        signal.raise_signal(signal.SIGINT)
        return True

    def __hash__(self):
        return 0


class CompareArguments(Command):
    """Command that calls a JAX function twice, so that JAX compares the second argument with the first."""

    def run(self, rank):
        import jax

        class Argument:
            pass

        jax.tree_util.register_pytree_node(Argument, lambda _: ((), InterruptingMetadata()), lambda *_: Argument())
        count = jax.jit(lambda argument: 1)
        for _ in range(2):
            count(Argument())


def test_interrupt_as_jax_compares_arguments_is_raised(fork):
    fork(1)
    with pytest.raises(KeyboardInterrupt):
        ranks.get_session().run(CompareArguments())


class Draws:
    """Class of the launcher that compiles its own functions, with the same seed on all ranks."""

    def __init__(self):
        import pytensor

        self.rng, self.params = T.random.shared_rng(seed=5), [shared(np.zeros(3), "w")]
        new, drawn = self.rng.normal(size=3)
        self.train = pytensor.function([], drawn, updates={self.rng: new}, mode="JAX")
        self.again = pytensor.function([], drawn * 1.0, updates={self.rng: new}, mode="JAX")


def test_random_streams_of_own_functions_are_seeded_and_saved():
    plain, model = Draws(), Draws()
    track_generators(model)
    groups = group_variables(model)
    assert groups.generators == [model.rng]
    library = get_library(model.rng)
    library.set_generator(model.rng, library.jump_generator(library.copy_generator(model.rng), 1))
    first, again = model.train(), model.again()
    assert not np.intersect1d(plain.train(), [first, again]).size
    saved = library.copy_generator(model.rng)
    drawn = model.train()
    assert not np.intersect1d(drawn, first).size
    library.set_generator(model.rng, saved)
    np.testing.assert_array_equal(model.train(), drawn)


def test_in_place_updates_reuse_memory():
    for is_there in (True, False):
        # Not from_numpy: on the CPU, JAX may share NumPy's memory if it is aligned to 64 bytes, and copies it if donated.
        array = JAX.empty((3,), np.dtype("float32"))
        address = JAX.get_address(array)
        written = JAX.rewrap(array, is_there)
        # JAX's cached host copy of the old array would not be updated.
        assert written is not array and JAX.get_address(written) == address
