"""A user-defined device is one file in synkhronos/devices/ (here in tests/support/toy_devices/), without other edits."""

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
from library import DEVICE, shared, tensor
from paths import SUPPORT

import synkhronos as synk
from synkhronos import devices, exchange_rules
from synkhronos.devices import NUMPY, find_device, get_rank_device
from synkhronos.training import make_train_function, make_train_function_serial
from synkhronos.training.updates import adam

pytestmark = [
    pytest.mark.skipif(DEVICE != "host", reason="the toy is a device of its own"),
    pytest.mark.new_ranks,
]

X = np.random.default_rng(0).normal(size=(7, 3))
FOLDER = str(SUPPORT / "toy_devices")


@pytest.fixture
def toy(monkeypatch):
    """Add toy.py to the package of devices, and select it by the environment variable."""
    yield from register_device(monkeypatch, "toy")


@pytest.fixture
def island(monkeypatch):
    """As `toy`, with a device whose memory the host cannot read, like a GPU's."""
    yield from register_device(monkeypatch, "island")


def register_device(monkeypatch, name):
    monkeypatch.setattr(devices, "__path__", [*devices.__path__, FOLDER])
    monkeypatch.setenv("SYNKHRONOS_DEVICE", name)
    devices.list_devices.cache_clear()
    yield devices.get_device(name)
    synk.close()
    devices.list_devices.cache_clear()


def get_array(s):
    """Return the array in the container of a shared variable."""
    return s.container.storage[0]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_functions_run_on_a_toy_device(toy, fork, n):
    fork(n)
    x, s = tensor.dmatrix("x"), shared(np.zeros(3), "s")
    f = synk.function([x], [(x.sum(axis=0), "sum"), (x**2, "gather"), x.max()], updates=[(s, x.sum(axis=0), "sum")])
    data = synk.data(X)
    for num_slices in (1, 3):
        total, squares, _ = f(data, num_slices=num_slices)
        np.testing.assert_allclose(total, X.sum(axis=0))
        np.testing.assert_allclose(squares, X**2)
        assert toy.owns(get_array(s))
    np.testing.assert_allclose(f(data, batch=[5, 1, 1])[0], X[[5, 1, 1]].sum(axis=0))
    synk.all_reduce(s, "sum")
    np.testing.assert_allclose(synk.get_value(0, s), X[[5, 1, 1]].sum(axis=0))


def test_sliceable_shareds_are_sliced_on_a_toy_device(toy, two_ranks_per_test):
    sliceable = shared(np.zeros((1, 3)), "rows")
    f = synk.function([], (sliceable.sum(axis=0), "sum"), sliceable_shareds=[sliceable])
    synk.distribute()
    synk.scatter(sliceable, X)
    np.testing.assert_allclose(f(), X.sum(axis=0))
    np.testing.assert_allclose(f(batch_s=[[2, 0], [1]]), X[[2, 0, 5]].sum(axis=0))
    np.testing.assert_allclose(f(num_slices=2), X.sum(axis=0))


def test_collectives_run_on_a_toy_device(toy, fork):
    n = fork(3)
    communicator = sys.modules["synkhronos.devices.toy"].CountingCommunicator
    s = shared(np.zeros(3), "s")
    f = synk.function([], [], updates=[(s, s + 1)])
    synk.distribute()
    assert toy.owns(get_array(s)), f  # f lives until here: distribute() sends the variables of live functions
    start = communicator.n_collective_calls
    for r in range(n):
        synk.set_value(r, s, X[r])
    assert toy.owns(get_array(s))
    np.testing.assert_allclose(gather_on_device(s), X[:n])
    np.testing.assert_allclose(synk.reduce(s, "prod", in_place=False).inside, X[:n].prod(axis=0))
    synk.all_reduce(s)
    np.testing.assert_allclose(gather_on_device(s), [X[:n].mean(axis=0)] * n)
    synk.set_value(1, s, X[6])
    np.testing.assert_allclose(synk.get_value(1, s), X[6])
    synk.broadcast(s, X[5])
    np.testing.assert_allclose(gather_on_device(s, nd_up=0), np.tile(X[5], n))
    synk.reduce(s, "sum")
    np.testing.assert_allclose(synk.get_value(0, s), 3 * X[5])
    synk.all_gather(s)
    np.testing.assert_allclose(synk.get_value(2, s), [*(3 * X[5]), *X[5], *X[5]])
    assert synk.get_shapes(s) == [(9,)] * n
    synk.reduce_scatter(s, "sum")
    assert synk.get_shapes(s) == [(3,)] * n
    np.testing.assert_allclose(gather_on_device(s, nd_up=0), [*(9 * X[5]), *(3 * X[5]), *(3 * X[5])])
    # Gather four times, all-gather, all-reduce, reduce twice, reduce-scatter; other values go through the host's
    # shared memory.
    assert communicator.n_collective_calls - start == 9 and toy.owns(get_array(s))


def gather_on_device(s, **kwargs):
    """Check that gathered arrays are on this rank's device, as on GPUs; return them."""
    return synk.gather(s, **kwargs).inside


def sum_rank_numbers(context):
    device = get_rank_device(context._rank)
    return device.to_numpy(context.all_reduce(device.from_numpy(np.full(3, float(context.number))), "sum"))


def test_run_programs_on_a_toy_device(toy, two_ranks_per_test):
    np.testing.assert_array_equal(synk.run(sum_rank_numbers), np.ones((2, 3)))


def make_model():
    x, y, w = tensor.dmatrix("x"), tensor.dvector("y"), shared(np.ones(3), "w")
    return x, y, w, ((tensor.dot(x, w) - y) ** 2).mean()


def train_on_two_ranks():
    """Check steps of a training function against a serial one; return its parameter, and the parameter's value."""
    x, y, w, loss = make_model()
    train = make_train_function(loss, [w], x, y, adam, learning_rate=0.1)
    x, y, alone, loss = make_model()
    train_alone = make_train_function_serial(loss, [alone], x, y, adam, learning_rate=0.1)
    for batch, num_slices in [(None, 1), ([3, 1, 6], 1), (None, 3)]:
        value = train(X, X[:, 0], batch=batch, num_slices=num_slices)
        np.testing.assert_allclose(value, train_alone(X, X[:, 0], batch=batch))
    return w, alone.get_value()


def test_training_step_runs_on_a_toy_device(toy, two_ranks_per_test):
    w, expected = train_on_two_ranks()
    np.testing.assert_allclose(gather_on_device(w), [expected] * 2)
    assert toy.owns(get_array(w))


def test_error_leaves_variables_on_a_toy_device(toy, two_ranks_per_test):
    x, s = tensor.dmatrix("x"), shared(np.zeros(3), "s")
    f = synk.function([x], updates=[(s, s + tensor.dot(x, s))], mode="FAST_COMPILE")
    with pytest.raises((ValueError, synk.WorkerError)):  # whichever rank raises first
        f(np.ones((4, 2)))
    assert toy.owns(get_array(s))
    np.testing.assert_array_equal(gather_on_device(s), np.zeros((2, 3)))


def test_device_without_communicator_goes_through_the_host(toy, fork, monkeypatch):
    monkeypatch.delattr(type(toy), "can_transfer_directly")
    monkeypatch.delattr(type(toy), "get_communicator")
    fork(2)
    s = shared(np.ones(3), "s")
    f = synk.function([], [], updates=[(s, s + 1)])
    synk.distribute()
    assert toy.owns(get_array(s)), f  # f lives until here: distribute() sends the variables of live functions
    synk.all_reduce(s, "sum")
    np.testing.assert_array_equal(synk.gather(s), np.full((2, 3), 2.0))
    assert toy.owns(get_array(s))


@pytest.mark.parametrize("name", ["toy", "island"])
def test_device_is_written_in_fewer_than_200_lines(name):
    assert len((Path(FOLDER) / f"{name}.py").read_text().splitlines()) < 200


def test_fork_names_the_known_devices(toy, monkeypatch):
    monkeypatch.setenv("SYNKHRONOS_DEVICE", "abacus")
    with pytest.raises(
        ValueError, match=r"SYNKHRONOS_DEVICE: expected one of \[.*'island', 'toy'\], or nothing, got 'abacus'"
    ):
        synk.fork(1)


def test_device_is_used_only_by_name(toy, fork, monkeypatch):
    monkeypatch.delenv("SYNKHRONOS_DEVICE")
    fork(1)
    s = shared(np.zeros(3), "s")
    synk.function([], updates=[(s, s + 1)])()
    assert isinstance(get_array(s), np.ndarray)


# -- a device that lives like a GPU ------------------------------------------------------------------------------


def test_island_device_has_its_own_memory_and_collectives(island, two_ranks_per_test):
    counts = sys.modules["synkhronos.devices.island"].counts
    before = counts["collectives"]
    w, expected_value = train_on_two_ranks()
    assert island.owns(get_array(w)) and counts["collectives"] == before + 3
    np.testing.assert_allclose(island.to_numpy(synk.gather(w, nd_up=1)), [expected_value] * 2)
    for op, expected in [("sum", 2), ("avg", 1), ("max", 1)]:
        synk.broadcast(w, np.ones(3))
        synk.all_reduce(w, op)
        np.testing.assert_array_equal(synk.get_value(1, w), np.full(3, expected))
    synk.reduce_scatter(w, "sum")
    assert synk.get_shapes(w) == [(2,), (1,)] and island.owns(get_array(w))


def test_function_copy_keeps_device_arrays(island, two_ranks_per_test):
    w = shared(np.ones(3), "w")
    f = synk.function([], (w.sum(), "sum"), updates=[(w, w + 1)])
    f()
    again = copy.deepcopy(f)
    assert float(again()) == float(f()) == 12
    (copied,) = again.get_shared()
    assert copied is not w and island.owns(get_array(copied))


RULES = {
    "BSP": exchange_rules.BSP("params"),
    "LocalSGD": exchange_rules.LocalSGD(2),
    "float32": exchange_rules.LocalSGD(2, state="average", precision="float32"),
    "reset": exchange_rules.LocalSGD(2, state="reset"),
    "EASGD": exchange_rules.EASGD(0.5, 2),
    "together": exchange_rules.EASGD(0.5, 2, asynchronous=False),
    "EAMSGD": exchange_rules.EAMSGD(0.5, 2, momentum=0.5),
    "ASGD": exchange_rules.ASGD(2),
    "Downpour": exchange_rules.Downpour(2, 4),
    "SlowMo": exchange_rules.SlowMo(2),
    "GoSGD": exchange_rules.GoSGD(1.0),
    "Swap": exchange_rules.Swap(2),
}


def train_by_rule(context, rule, w, v, average, memory, on_device):
    """Train; return the rank's vector, the report, and whether the rule computes on the device."""
    device = get_rank_device(context._rank) if on_device else NUMPY
    for variable in (w, v, average):
        variable.container.storage[0] = device.from_numpy(NUMPY.as_array(variable.container.storage[0]))
    state = exchange_rules.ExchangeState([w, average], [v], memory, n_averages=1)
    rule.setup(context, state)
    for step in range(4):
        state.vector = state.vector * 0.5 + (context.number + step)
        state.step += 1
        state.steps_since_exchange += 1
        if state.step % 2 == 0:
            for r in range(context.size) if rule.asynchronous else [context.number]:  # in a fixed order
                if r == context.number:
                    rule.exchange(context, state)
                if rule.asynchronous:
                    context.barrier("the next rank's exchange")
            state.steps_since_exchange = 0
    host_values = [
        find_device(value).to_numpy(value) for value in (state.vector, rule.compute_consensus(context, state))
    ]
    return host_values, state.params.device is device


def test_exchange_rules_on_a_device_equal_rules_on_the_host(island, two_ranks_per_test):
    values = [np.arange(3.0), np.ones(3), np.full(2, 7.0)]
    for name, rule in RULES.items():
        results = []
        for on_device in (False, True):
            shareds = [shared(value, name) for value, name in zip(values, ("w", "v", "average"), strict=True)]
            memory = exchange_rules.allocate_shared_arrays(rule, 2, 5, np.dtype("float64"))
            results.append(synk.run(train_by_rule, rule, *shareds, memory, on_device))
        for (host_values, is_there), (island_values, is_on_island) in zip(*results, strict=True):
            assert is_there and is_on_island, name
            for host_value, island_value in zip(host_values, island_values, strict=True):
                np.testing.assert_array_equal(host_value, island_value, err_msg=name)


def test_rules_without_device_arithmetic_run_on_the_host(toy, two_ranks_per_test):
    shareds = [shared(np.ones(3), name) for name in ("w", "v", "average")]
    memory = exchange_rules.allocate_shared_arrays(RULES["EASGD"], 2, 6, np.dtype("float64"))
    for on_host, is_on_toy in synk.run(train_by_rule, RULES["EASGD"], *shareds, memory, True):
        assert not is_on_toy and np.isfinite(on_host).all()


def write_rows(context, rows, shape):
    value = get_rank_device(context._rank).from_numpy(np.full(shape, 5.0))
    rows[2 * context.number : 2 * context.number + 2].write(value)


def test_set_rows_from_device_arrays(island, two_ranks_per_test):
    data = synk.data(np.zeros((5, 3)))
    counts = sys.modules["synkhronos.devices.island"].counts
    before = counts["stores"]
    synk.run(write_rows, data, (2, 3))
    np.testing.assert_array_equal(np.asarray(data)[:, 0], [5, 5, 5, 5, 0])
    assert counts["stores"] == before + 1  # the master's own
    for shape in [(3, 2), (3, 3)]:
        with pytest.raises(ValueError, match="shape|broadcast"):
            synk.run(write_rows, data, shape)
    np.testing.assert_array_equal(np.asarray(data)[:, 0], [5, 5, 5, 5, 0])
