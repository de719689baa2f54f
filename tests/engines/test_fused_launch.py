"""Launches in which XLA runs a function, an all-reduce and another function."""

import contextlib
import ctypes
import gc
import signal
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from library import XLA, shared
from library import tensor as T
from xla_launches import Alarm, get_runner, not_on_gpus

import synkhronos as synk
from synkhronos.devices import JAX
from synkhronos.devices.jax.ffi_collectives import LaunchCollectives
from synkhronos.devices.jax.scalar_log import ScalarLog
from synkhronos.engines import StepShards
from synkhronos.engines.xla import traced_exchange
from synkhronos.engines.xla.fused_runner import FusedRunner
from synkhronos.engines.xla.traced_exchange import ExchangeSpec
from synkhronos.engines.xla.vector_parts import write_parts
from synkhronos.graph_libraries import get_library
from synkhronos.ranks.interrupts import defer_signals
from synkhronos.training.updates import momentum, sgd
from synkhronos.training.updates.sharded_updates import ShardedUpdates

pytestmark = pytest.mark.skipif(not XLA, reason="about JAX arrays")


def view_items(address, n_items, dtype):
    """Return the items at an address as an array."""
    dtype = np.dtype(dtype)
    return np.frombuffer((ctypes.c_char * (n_items * dtype.itemsize)).from_address(address), dtype)


class TwoEqualShards(LaunchCollectives):
    """Fake of the collectives of a sharded step between two ranks; this is rank 0, and rank 1 has its values.

    ``valid`` are the flags of the reduce-scatter and of the all-gather.
    """

    def __init__(self, valid=(1, 1)):
        self.valid, self.calls = list(valid), []

    def start(self, spans, stream):
        self.calls.append([span.n_items for span in spans])
        for source, target, count, dtype in spans:
            values = view_items(source, count, dtype)
            if len(self.valid) == 2:
                view_items(target, count // 2, dtype)[:] = values[: count // 2]
            else:
                view_items(target, 2 * count, dtype)[:] = np.tile(values, 2)

    def finish(self, spans, flag, stream):
        self.start(spans, stream)
        assert ctypes.c_int32.from_address(flag).value == 0
        ctypes.c_int32.from_address(flag).value = self.valid.pop(0)


class DoublingHandler(LaunchCollectives):
    """Fake of a second rank with the same values."""

    def __init__(self, calls=(), valid=1):
        self.calls, self.valid, self.begun, self.waits = [] if calls == () else calls, valid, [], 0

    def start(self, spans, stream):
        self.begun += spans

    def finish(self, spans, flag, stream):
        for source, target, count, dtype in [*self.begun, *spans]:
            view_items(target, count, dtype)[:] = 2 * view_items(source, count, dtype)
        self.calls.append([span.n_items for span in spans] if self.begun else spans[0].n_items)
        self.begun = []
        assert ctypes.c_int32.from_address(flag).value == 0
        ctypes.c_int32.from_address(flag).value = self.valid

    def join_side_stream(self, stream):
        self.begun = []
        self.waits += 1


@pytest.fixture
def pair(fork):
    """Make two functions; return their runners, and their variables."""
    fork(1)
    x = T.dvector("x")
    g, w, n = shared(np.zeros(3), "g"), shared(np.ones(3), "w"), shared(np.zeros((), "int64"), "n")
    first = synk.function([x], (x.sum(), "sum"), updates=[(g, x * w)])
    second = synk.function([], updates=[(w, w - g), (n, n + 1)])
    synk.distribute()
    return [get_runner(first), get_runner(second)], (g, w, n)


@pytest.fixture
def fused_launch(pair):
    """Return a fused launch of a function, an all-reduce and another function, and its variables."""
    runners, (g, w, n) = pair
    launch = runners[0].fuse(ExchangeSpec(g.container.storage), [runners[1]])
    assert launch is runners[0].fuse(ExchangeSpec(g.container.storage), [runners[1]])
    # Only outputs of the first function can be reduced after it.
    assert runners[0].fuse(ExchangeSpec(n.container.storage), [runners[1]]) is None
    return launch, (g, w, n)


def launch_and_wait(launch, shareds, handler):
    """Launch, wait, and return the outputs."""
    with defer_signals(), launch.ffi_collectives.use_launch_collectives(handler):
        (total,) = launch(JAX.from_numpy(np.arange(3.0)))
        JAX.wait([get_library(s).borrow_value(s) for s in shareds])
    return [float(JAX.to_numpy_many([total])[0]), *(np.asarray(s.get_value()).tolist() for s in shareds)]


@not_on_gpus
def test_fuse_runs_function_all_reduce_function_in_one_launch(fused_launch):
    launch, shareds = fused_launch
    calls = []
    assert launch_and_wait(launch, shareds, DoublingHandler(calls)) == [3.0, [0.0, 2.0, 4.0], [1.0, -1.0, -3.0], 1]
    assert launch_and_wait(launch, shareds, DoublingHandler(calls)) == [3.0, [0.0, -2.0, -12.0], [1.0, 1.0, 9.0], 2]
    assert calls == [3, 3]


@not_on_gpus
@pytest.mark.parametrize("is_valid", [True, False])
def test_fused_launch_advances_to_the_next_rows(pair, is_valid):
    runners, shareds = pair
    launch = runners[0].fuse(ExchangeSpec(shareds[0].container.storage), [runners[1]], n_repeats=4)
    rows, calls = np.arange(12.0), []
    for _ in range(2):
        g, w, n = (np.asarray(s.get_value()) for s in shareds)
        for row in rows.reshape(4, 3) if is_valid else []:
            g = 2 * row * w
            w, n = w - g, n + 1
        with defer_signals(), launch.ffi_collectives.use_launch_collectives(DoublingHandler(calls, is_valid), 4):
            totals = launch(JAX.from_numpy(rows))
            JAX.wait([get_library(s).borrow_value(s) for s in shareds])
        assert [float(total) for total in JAX.to_numpy_many(totals)] == [3.0, 12.0, 21.0, 30.0]
        np.testing.assert_array_equal(shareds[1].get_value(), w)
        assert int(shareds[2].get_value()) == n
        if is_valid:  # otherwise the reduced variable is undefined
            np.testing.assert_array_equal(shareds[0].get_value(), g)
    assert calls == [3] * 8


@not_on_gpus
def test_fused_launch_reduces_nothing_after_an_error(pair):
    runners, shareds = pair
    launch = runners[0].fuse(ExchangeSpec(shareds[0].container.storage), [runners[1]], n_repeats=4)
    calls = []

    class FailingHandler(DoublingHandler):
        def finish(self, *arguments):
            calls.append(arguments)
            if len(calls) == 2:
                raise Alarm
            super().finish(*arguments)

    failing_handler = FailingHandler()
    with pytest.raises(Alarm):
        with defer_signals(), launch.ffi_collectives.use_launch_collectives(failing_handler, 4):
            launch(JAX.from_numpy(np.arange(12.0)))
    assert len(calls) == failing_handler.waits == 2
    np.testing.assert_array_equal(shareds[1].get_value(), [1.0, -1.0, -3.0])
    assert int(shareds[2].get_value()) == 1


@not_on_gpus
def test_repeated_launch_all_reduces_each_time(pair):
    runners, shareds = pair
    launch = runners[0].fuse(ExchangeSpec(shareds[0].container.storage), [runners[1]], n_repeats=2)
    with pytest.raises(RuntimeError, match="made 2 collectives, expected 1"):
        with defer_signals(), launch.ffi_collectives.use_launch_collectives(DoublingHandler()):
            launch(JAX.from_numpy(np.arange(6.0)))


@not_on_gpus
def test_repeated_launch_all_reduces_constants_each_time(fork):
    fork(1)
    g, w, s = shared(np.zeros(3), "g"), shared(np.ones(3), "w"), shared(np.arange(3.0), "s")
    first = synk.function([], (w.sum(), "sum"), updates=[(g, s * 1)])
    second = synk.function([], updates=[(w, w - g)])
    synk.distribute()
    runners = [get_runner(first), get_runner(second)]
    launch, calls = runners[0].fuse(ExchangeSpec(g.container.storage), [runners[1]], n_repeats=4), []
    with defer_signals(), launch.ffi_collectives.use_launch_collectives(DoublingHandler(calls), 4):
        totals = launch()
        JAX.wait([get_library(w).borrow_value(w)])
    assert [float(total) for total in JAX.to_numpy_many(totals)] == [3.0, -3.0, -9.0, -15.0]
    np.testing.assert_array_equal(w.get_value(), [1.0, -7.0, -15.0])
    assert calls == [3] * 4


#: Lengths of three parameters' gradients, and of the number of rows that follows them.
SIZES = (5, 300, 700, 1)


@not_on_gpus
@pytest.mark.parametrize(
    ("n_tail_items", "min_chunk_nbytes", "wire_dtype", "n_repeats"),
    [  # each pair of values
        (1, 100, None, 1), (451, 100, "bfloat16", 3), (451, 100, None, 3), (1, 2000, "bfloat16", 3),
        (451, 2000, None, 1), (1, 10**6, None, 1), (1, 10**6, None, 3), (451, 10**6, "bfloat16", 1),
    ],
)  # fmt: skip
def test_fused_all_reduce_accepts_chunks_and_another_dtype(
    fork, monkeypatch, n_tail_items, min_chunk_nbytes, wire_dtype, n_repeats
):
    monkeypatch.setattr("synkhronos.engines.xla.vector_parts.MIN_NBYTES_IN_PLACE", 8)
    monkeypatch.setattr("synkhronos.engines.xla.traced_exchange.MIN_CHUNK_NBYTES", min_chunk_nbytes)
    written = []
    monkeypatch.setattr(traced_exchange, "write_parts", lambda *arguments: written.append(1) or write_parts(*arguments))
    fork(1)
    rng = np.random.default_rng(0)
    x = T.fmatrix("x")
    g, w = shared(np.zeros(sum(SIZES), "float32"), "g"), shared(np.ones(sum(SIZES) - 1, "float32"), "w")
    bounds = np.cumsum((0, *SIZES[:-1]))
    parts = [x[0, a:b] * w[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    first = synk.function([x], (x.sum(), "sum"), updates=[(g, T.join(0, *parts, x[0, -1:]))])
    second = synk.function([], updates=[(w, w - g[:-1] / g[-1])])
    synk.distribute()
    runners = [get_runner(first), get_runner(second)]
    launch = runners[0].fuse(
        ExchangeSpec(g.container.storage, wire_dtype, 2, n_tail_items), [runners[1]], n_repeats=n_repeats
    )
    rows = rng.uniform(1, 2, (n_repeats, sum(SIZES))).astype("float32")
    rows[:, -1] = 67  # rounds to 66 with eight bits of mantissa after a division by 3
    handler = DoublingHandler()
    with defer_signals(), launch.ffi_collectives.use_launch_collectives(handler, n_repeats):
        launch(JAX.from_numpy(rows))
        JAX.wait([get_library(w).borrow_value(w)])
    # With a wire dtype, the program itself divides the gradient and the number of rows by the number of ranks.
    expected, scale = np.ones(sum(SIZES) - 1), 1 if wire_dtype else 2
    for row in rows:
        total = scale * np.append(row[:-1] * expected, row[-1])
        expected = expected - total[:-1] / total[-1]
    g_value = np.asarray(g.get_value())
    if wire_dtype:
        np.testing.assert_allclose(g_value, total, rtol=0.01)
        np.testing.assert_allclose(w.get_value(), expected, rtol=1e-3)
    else:
        np.testing.assert_allclose(g_value, total, rtol=1e-5)
        np.testing.assert_allclose(w.get_value(), expected, rtol=1e-5)
    # The tail is sent in full precision; after several steps it depends on earlier, rounded gradients.
    np.testing.assert_allclose(g_value[-n_tail_items:], total[-n_tail_items:], rtol=1e-6 if n_repeats == 1 else 1e-3)
    np.testing.assert_allclose(g_value[-1], total[-1], rtol=1e-6)
    # A whole gradient is written into its own memory.
    assert bool(written) == (wire_dtype is None and (n_repeats > 1 or min_chunk_nbytes == 10**6))
    if n_repeats == 1 and wire_dtype is None:
        # The last chunk comes first, as it is computed last and waited for at once.
        assert handler.calls == {100: [[5]], 2000: [[305]], 10**6: [1006]}[min_chunk_nbytes]


def find_needed_equations(jaxpr, variables):
    """Return the equations that variables are computed from."""
    source = {id(v): i for i, equation in enumerate(jaxpr.eqns) for v in equation.outvars}
    needed, left = set(), [*variables]
    while left:
        i = source.get(id(left.pop()))
        if i is not None and i not in needed:
            needed.add(i)
            left += jaxpr.eqns[i].invars
    return [jaxpr.eqns[i] for i in sorted(needed)]


@not_on_gpus
@pytest.mark.parametrize(
    ("chunk", "calls", "valid"),
    [
        (1, [[2], [6], [24], [1], [3], [12]], (1, 1)),
        (8, [[8], [24], [4], [12]], (1, 0)),
        (100, [[32], [16]], (0, 0)),
    ],
)
def test_sharded_step_is_one_launch(fork, monkeypatch, chunk, calls, valid):
    monkeypatch.setattr("synkhronos.engines.xla.traced_exchange.MIN_CHUNK_NBYTES", 8 * chunk)
    fork(1)
    rng = np.random.default_rng(0)
    x, starts = T.dvector("x"), [rng.normal(size=shape) for shape in ((4, 6), (6,))]
    params = [shared(value, name) for value, name in zip(starts, "wb", strict=True)]
    loss = (x.dot(params[0]) * params[1]).sum()
    rule = momentum(loss, params, learning_rate=0.5, momentum=0.0, weight=x[0] * 0 + 1)
    shards = ShardedUpdates(rule, params, 2, "momentum")
    functions = [synk.function([x], (loss, "sum"), updates=list(shards.grad_updates.items()))]
    functions += [synk.function([], updates=list(u.items())) for u in (shards.local_updates, shards.whole_updates)]
    synk.distribute()
    first, *others = map(get_runner, functions)
    state_shards = [variable.shard for variable in shards.sharded_variables.values()]
    spec = ExchangeSpec(
        shards.grad_shared.container.storage, n_ranks=2, shards=StepShards(shards.row, state_shards, False)
    )
    launch = first.fuse(spec, others)
    ranks, row = TwoEqualShards(valid), np.arange(1.0, 5.0)
    with defer_signals(), launch.ffi_collectives.use_launch_collectives(ranks, 2):
        launch(JAX.from_numpy(row))
        JAX.wait([get_library(p).borrow_value(p) for p in (*params, *state_shards)])
    assert ranks.calls == calls
    w, b = starts
    for param, shard, start, grad in zip(params, state_shards, starts, (np.outer(row, b), row @ w), strict=True):
        step = -0.5 * grad.ravel()[: start.size // 2]
        new = np.tile(start.ravel()[: start.size // 2] + step, 2).reshape(start.shape)
        # A step is whole or not at all; a part of the state may be newer than the parameters, as the session ends then.
        np.testing.assert_allclose(param.get_value(), new if valid[1] else start, rtol=1e-12)
        np.testing.assert_allclose(shard.get_value(), step if valid[0] else 0 * step, rtol=1e-12)


@not_on_gpus
def test_chunk_all_reduce_starts_during_the_backward_pass(fork, monkeypatch):
    import jax

    monkeypatch.setattr("synkhronos.engines.xla.traced_exchange.MIN_CHUNK_NBYTES_OF_HOSTS", 100)
    fork(1)
    x = T.fmatrix("x")
    rng = np.random.default_rng(0)
    ws = [shared(rng.normal(size=(8, 8)).astype("float32"), f"w{i}") for i in range(3)]
    h = x
    for w in ws:
        h = T.tanh(h.dot(w))
    grad_updates, _, g = sgd((h**2).mean(), ws, learning_rate=0.1, weight=x.shape[0])
    first = synk.function([x], ((h**2).mean(), "mean"), updates=grad_updates)
    synk.distribute()
    executable = get_runner(first).fuse(ExchangeSpec(g.container.storage, spans_hosts=True))
    executable._scalar_log = ScalarLog(executable._logged_dtypes)
    jaxpr = (
        jax.make_jaxpr(executable._program)(*executable._get_arguments([np.ones((5, 8), "float32")]))
        .jaxpr.eqns[0]
        .params["jaxpr"]
    )
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    calls = [equation for equation in jaxpr.eqns if equation.primitive.name == "ffi_call"]
    assert [call.params["target_name"] for call in calls] == ["synkhronos_start"] * 2 + ["synkhronos_finish"]
    products = [
        [equation for equation in find_needed_equations(jaxpr, call.invars) if equation.primitive.name == "dot_general"]
        for call in calls
    ]
    # Three products of the forward pass, then the gradients by each layer's weights and by its input.
    assert [len(equations) for equations in products] == [4, 6, 8]
    for call, before, behind in zip(calls, products, products[1:], strict=False):
        for product in behind[len(before) :]:
            assert call in find_needed_equations(jaxpr, product.invars)
    # The forward pass precedes all chunks.
    (loss,) = [equation for equation in jaxpr.eqns if equation.primitive.name == "reduce_sum"][:1]
    assert not any(call in find_needed_equations(jaxpr, loss.invars) for call in calls)


@not_on_gpus
def test_error_after_a_started_chunk_waits_and_updates_nothing(fork, monkeypatch):
    monkeypatch.setattr("synkhronos.engines.xla.traced_exchange.MIN_CHUNK_NBYTES", 100)
    fork(1)
    g, w = shared(np.zeros(60, "float32"), "g"), shared(np.ones(60, "float32"), "w")
    first = synk.function([], (w.sum(), "sum"), updates=[(g, T.join(0, w[:30] * 2, w[30:] * 3))])
    second = synk.function([], updates=[(w, w - g)])
    synk.distribute()
    runners = [get_runner(first), get_runner(second)]
    launch = runners[0].fuse(ExchangeSpec(g.container.storage), [runners[1]])

    class FailingHandler(DoublingHandler):
        def start(self, spans, stream):
            raise Alarm

    failing_handler = FailingHandler()
    with pytest.raises(Alarm):
        with defer_signals(), launch.ffi_collectives.use_launch_collectives(failing_handler):
            launch()
    assert failing_handler.waits == 1 and failing_handler.calls == []
    np.testing.assert_array_equal(w.get_value(), np.ones(60))
    with defer_signals(), launch.ffi_collectives.use_launch_collectives(DoublingHandler()):
        launch()
    np.testing.assert_array_equal(w.get_value(), [-3.0] * 30 + [-5.0] * 30)


@not_on_gpus
def test_no_kernel_of_an_update_on_gpus_is_chosen_by_its_time(fork, monkeypatch):
    # Ranks could choose kernels that round sums in different ways.
    import jax

    fork(1)
    x, g, w = T.dmatrix("x"), shared(np.zeros((3, 3)), "g"), shared(np.ones((3, 3)), "w")
    functions = [
        synk.function([x], updates=[(g, x.T.dot(x))]),
        synk.function([], updates=[(w, w / (g**2).sum())]),
        synk.function([], updates=[(w, w.dot(g))]),
    ]
    synk.distribute()
    options, jit = [], jax.jit

    def record_jit(*args, **kwargs):
        options.append(kwargs.get("compiler_options"))
        return jit(*args, **kwargs)

    monkeypatch.setattr(jax, "jit", record_jit)
    monkeypatch.setattr(JAX, "_gpu", "0")
    runners, found = [], []
    for function in functions:
        options.clear()
        runners.append(get_runner(function))
        found.append([given for given in options if given is not None][-1])
    unmeasured_sums = {"xla_gpu_experimental_enable_fusion_autotuner": False}
    assert found == [unmeasured_sums, unmeasured_sums, {**unmeasured_sums, "xla_gpu_autotune_level": 0}]
    gradient, norm, product = runners
    # Products of the gradient are faster with autotuning, so they are in another program than those of the update.
    spec = ExchangeSpec(g.container.storage)
    assert gradient.fuse(spec, [product]) is None
    assert gradient.fuse(spec, [norm]) is not None


def test_device_has_one_copy_of_a_shared_variable(fork):
    import jax

    fork(1)
    x, w = T.dvector("x"), shared(np.ones((37, 11)), "w")
    step = synk.function([x], (w.sum(), "sum"), updates=[(w, w * x[0])])
    synk.distribute()
    for factor in (2.0, 3.0):
        step(np.full(2, factor))
    gc.collect()
    assert [array.shape for array in jax.live_arrays()].count((37, 11)) == 1
    np.testing.assert_array_equal(w.get_value(), np.full((37, 11), 6.0))


def test_recently_used_launches_are_cached(fork):
    fork(1)
    x, w = T.dvector("x"), shared(np.zeros(3), "w")
    f, g = synk.function([x], (x.sum(), "sum")), synk.function([], updates=[(w, w + 1)])
    runners = [get_runner(f), get_runner(g)]
    launches = {n: runners[0].fuse(others=[runners[1]], n_repeats=n) for n in range(1, 17)}
    assert launches[1] is runners[0].fuse(others=[runners[1]], n_repeats=1)
    runners[0].fuse(others=[runners[1]], n_repeats=17)
    assert launches[1] is runners[0].fuse(others=[runners[1]], n_repeats=1)
    assert launches[2] is not runners[0].fuse(others=[runners[1]], n_repeats=2)


def test_repeated_launch_returns_only_scalars(fork):
    fork(1)
    x, w = T.dvector("x"), shared(np.zeros(3), "w")
    f, g = synk.function([x], (x * 2, "gather")), synk.function([], updates=[(w, w + 1)])
    runners = [get_runner(f), get_runner(g)]
    assert runners[0].fuse(others=[runners[1]], n_repeats=2) is None


def test_repeated_launch_keeps_many_results(fork):
    fork(1)
    x, w = T.dvector("x"), shared(np.zeros(()), "w")
    f, g = synk.function([x], (x.sum(), "sum")), synk.function([], updates=[(w, w + 1)])
    runners = [get_runner(f), get_runner(g)]
    launch = runners[0].fuse(others=[runners[1]], n_repeats=100)
    rows = JAX.from_numpy(np.arange(200.0))
    expected = np.arange(200.0).reshape(100, 2).sum(axis=1)
    launches = [launch(rows) for _ in range(5)]
    for numbers in launches:
        np.testing.assert_array_equal(JAX.to_numpy_many(numbers), expected)
    assert float(w.get_value()) == 500


@not_on_gpus
def test_invalid_all_reduce_updates_nothing(fused_launch):
    launch, shareds = fused_launch
    assert launch_and_wait(launch, shareds, DoublingHandler(valid=0))[2:] == [[1.0, 1.0, 1.0], 0]
    assert launch_and_wait(launch, shareds, DoublingHandler())[2:] == [[1.0, -1.0, -3.0], 1]


@not_on_gpus
@pytest.mark.usefixtures("alarm_handler")
@pytest.mark.parametrize("by_signal", [False, True])
def test_error_in_all_reduce_is_raised_after_the_launch(fused_launch, by_signal):
    launch, shareds = fused_launch

    class FailingHandler(DoublingHandler):
        def finish(self, *arguments):
            if not by_signal:
                raise Alarm
            signal.raise_signal(signal.SIGALRM)  # a real timer could fire before the `with` block
            super().finish(*arguments)

    handler = signal.getsignal(signal.SIGALRM)
    for _ in range(2):
        with pytest.raises(Alarm):
            launch_and_wait(launch, shareds, FailingHandler(valid=0))
        assert np.asarray(shareds[1].get_value()).tolist() == [1.0, 1.0, 1.0]
        assert signal.getsignal(signal.SIGALRM) is handler
    assert launch_and_wait(launch, shareds, DoublingHandler())[2:] == [[1.0, -1.0, -3.0], 1]


@not_on_gpus
def test_fused_launch_all_reduces_once(fused_launch):
    launch, shareds = fused_launch
    with pytest.raises(RuntimeError, match="made 0 collectives, expected 1"):
        with defer_signals(), launch.ffi_collectives.use_launch_collectives(DoublingHandler()):
            pass
    # Launches outside of a block are not counted.
    launch(JAX.from_numpy(np.arange(3.0)))
    assert np.asarray(shareds[1].get_value()).tolist() == [1.0, 1.0, 1.0]
    assert launch_and_wait(launch, shareds, DoublingHandler())[2:] == [[1.0, -1.0, -3.0], 1]


@not_on_gpus
def test_callbacks_find_their_handler(fused_launch, pair):
    """Each callback finds the FfiCollectives of its own program by its number."""
    runners, _ = pair
    launch, shareds = fused_launch
    other = runners[0].fuse(ExchangeSpec(shareds[0].container.storage), [runners[1]], n_repeats=2)
    calls, other_calls = [], []
    with defer_signals(), launch.ffi_collectives.use_launch_collectives(DoublingHandler(calls)):
        with other.ffi_collectives.use_launch_collectives(DoublingHandler(other_calls), 2):
            other(JAX.from_numpy(np.arange(6.0)))
        launch(JAX.from_numpy(np.arange(3.0)))
        JAX.wait([get_library(s).borrow_value(s) for s in shareds])
    assert len(other_calls) == 2 and len(calls) == 1
    g, w = np.zeros(3), np.ones(3)
    for row in (np.arange(3.0), np.arange(3.0, 6.0), np.arange(3.0)):
        g = 2 * row * w
        w = w - g
    np.testing.assert_array_equal(shareds[1].get_value(), w)


def test_launches_are_freed_with_their_function(fork):
    fork(1)
    x, w = T.dvector("x"), shared(np.zeros(3), "w")
    f, g = synk.function([x], (x.sum(), "sum"), updates=[(w, w + x)]), synk.function([], updates=[(w, 2 * w)])
    f(np.ones(3)), g()
    runners = [get_runner(f), get_runner(g)]
    runners.append(runners[0].fuse(others=[runners[1]]))
    runners[-1](JAX.from_numpy(np.ones(3)))
    references = [weakref.ref(runner) for runner in runners]
    gc.collect()
    gc.disable()
    try:
        del f, g
        runners.clear()
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize(("n_finished", "has_effect"), [(0, False), (1, True)])
def test_failed_launch_of_steps_has_an_effect_once_a_gradient_is_reduced(n_finished, has_effect):
    effects, state = [], SimpleNamespace(n_finished=n_finished)

    def fail():
        raise ArithmeticError

    fail.n_repeats = 3
    fail.ffi_collectives = SimpleNamespace(
        nccl_call_mode="native", use_communicator=lambda *_: contextlib.nullcontext(state)
    )
    rank = SimpleNamespace(record_effect=lambda: effects.append(1))
    with pytest.raises(ArithmeticError):
        FusedRunner(rank, fail, exchange=None)._launch_native((), None, (3,))
    assert bool(effects) == has_effect
