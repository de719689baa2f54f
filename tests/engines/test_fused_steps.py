"""Training steps that XLA runs in one launch, one or many at once."""

import numpy as np
import pytest
from library import XLA, shared
from library import tensor as T
from xla_launches import get_runner, on_host

import synkhronos as synk
from synkhronos.devices.jax.scalar_log import LOG_CAPACITY
from synkhronos.engines.xla import XlaEngine
from synkhronos.engines.xla.executable import Executable
from synkhronos.graphs import library_of
from synkhronos.training import make_train_function, make_train_function_serial
from synkhronos.training.updates import adam, momentum, sgd

pytestmark = pytest.mark.skipif(not XLA, reason="about JAX arrays")

VALUE = np.arange(4.0)


@pytest.fixture
def many_steps_a_launch(monkeypatch):
    """Fuse many steps into one launch on the CPU too, where the library does not by default."""
    monkeypatch.setattr(XlaEngine, "get_max_repeats", lambda self, dtype=None: LOG_CAPACITY)


@on_host
def test_shared_variables_keep_their_memory_between_launches(fork):
    fork(1)
    rng = np.random.default_rng(0)
    ws = [shared(rng.normal(size=(64, 64)), f"w{i}") for i in range(3)]
    x = T.dmatrix("x")
    h = x
    for w in ws:
        h = T.tanh(h.dot(w))
    train = make_train_function((h**2).mean(), ws, x, [], momentum, learning_rate=0.1)
    held = [*ws, *train.optimizer_state, train.grad_shared]

    def addresses():
        return [library_of(variable).borrow_value(variable).unsafe_buffer_pointer() for variable in held]

    for _ in range(2):
        train(np.ones((5, 64)), [])
    before = addresses()
    for _ in range(3):
        train(np.ones((5, 64)), [])
        assert addresses() == before


LENGTHS_AND_CONSTANTS = {
    "a length": (np.int64(0), lambda x, y: x.shape[0]),
    "of lengths": (np.int64(0), lambda x, y: x.shape[0] + y.shape[0]),
    "a number": (np.float64(0), lambda x, y: T.constant(np.float64(3))),
    "a filled array": (np.zeros(3), lambda x, y: T.alloc(np.float64(2), 3)),
    "an integer": (np.int8(0), lambda x, y: T.cast(x.shape[1], "int8")),
}


@pytest.mark.parametrize("which", LENGTHS_AND_CONSTANTS)
def test_updates_by_lengths_and_constants_are_compiled_once(fork, many_steps_a_launch, which):
    fork(1)
    made = []
    value, expression = LENGTHS_AND_CONSTANTS[which]
    for make in (make_train_function, make_train_function_serial):
        x, y, w, k = T.dmatrix("x"), T.dvector("y"), shared(np.zeros(3), "w"), shared(value, "k")
        loss = ((x @ w - y) ** 2).mean()
        made += [make(loss, [w], x, y, sgd, extra_updates=[(k, expression(x, y), None)], learning_rate=0.1), w, k]
    train, w, k, alone, w_alone, k_alone = made
    data = np.eye(4, 3), np.ones(4)
    for one in (train, alone):
        for _ in range(3):
            one(*data, batch=[0, 1])
            one.steps(*data, batches=[[0, 1], [2, 3], [3, 1]])
    for shared_, expected in ((w, w_alone), (k, k_alone)):
        np.testing.assert_allclose(shared_.get_value(), expected.get_value())
        assert np.asarray(shared_.get_value()).dtype == np.asarray(expected.get_value()).dtype
    runs = [get_runner(train.gradient), get_runner(train.update)]
    for times in (1, 3):
        assert runs[0].fuse(second=runs[1], n_repeats=times)._run._cache_size() == 1


def test_training_step_of_one_rank_is_one_launch(fork, monkeypatch):
    fork(1)
    launches = []
    launch = Executable._launch
    monkeypatch.setattr(Executable, "_launch", lambda self, arguments: launches.append(1) or launch(self, arguments))
    x, y, w = T.dmatrix("x"), T.dvector("y"), shared(np.zeros(3), "w")
    train = make_train_function(((x @ w - y) ** 2).mean(), [w], x, y, sgd, learning_rate=0.1)
    data = np.eye(3), np.ones(3)
    for _ in range(3):
        train(*data)
    assert launches == [1, 1, 1]
    np.testing.assert_allclose(np.asarray(w.get_value()), 1 - (1 - 2 * 0.1 / 3) ** 3, rtol=1e-6)


def test_steps_that_cannot_be_fused_run_one_by_one(fork, many_steps_a_launch):
    fork(2)
    made = []
    for make in (make_train_function, make_train_function_serial):
        x, y, w, k = T.dmatrix("x"), T.dvector("y"), shared(np.zeros(3), "w"), shared(np.int64(3), "k")
        # PyTensor compiles again for each value of a variable that is a length.
        loss = ((x @ w - y) ** 2).mean() + (x.reshape((-1, k)).sum() * w[0]) / x.shape[0]
        made += [make(loss, [w], x, y, sgd, learning_rate=0.1), w]
    train, w, alone, w_alone = made
    batches = [[0, 1], [2, 3], [3, 1]]
    for _ in range(2):
        losses = train.steps(np.eye(4, 3), np.ones(4), batches)
        np.testing.assert_allclose(np.array(losses, float), alone.steps(np.eye(4, 3), np.ones(4), batches))
        np.testing.assert_allclose(synk.gather(w), [w_alone.get_value()] * 2)


def test_repeated_launch_keeps_shapes(fork, many_steps_a_launch):
    fork(1)
    x, y, w, last = T.dmatrix("x"), T.dvector("y"), shared(np.zeros(3), "w"), shared(np.zeros((1, 3)), "last")
    loss = ((x @ w - y) ** 2).mean()
    train = make_train_function(loss, [w], x, y, sgd, extra_updates=[(last, x, None)], learning_rate=0.1)
    with pytest.raises(ValueError, match=r"variable of shape \(1, 3\) is updated by a value of shape \(2, 3\)"):
        train.steps(np.eye(4, 3), np.ones(4), [[0, 1], [2, 3]])
    np.testing.assert_array_equal(w.get_value(), np.zeros(3))
    train(np.eye(4, 3), np.ones(4), [0, 1])
    np.testing.assert_array_equal(last.get_value(), np.eye(4, 3)[:2])


@pytest.mark.parametrize("held", [False, True])
def test_steps_of_one_rank_are_one_launch(fork, monkeypatch, many_steps_a_launch, held):
    fork(1)
    launches = []
    launch = Executable._launch
    monkeypatch.setattr(Executable, "_launch", lambda self, arguments: launches.append(1) or launch(self, arguments))
    made = []
    for make in (make_train_function, make_train_function_serial):
        x, y, w = T.dmatrix("x"), T.dvector("y"), shared(np.zeros(3), "w")
        held_by = [shared(VALUE[:, None] * [1.0, 2.0, 3.0], "x"), shared(VALUE, "y")] if held else None
        loss = ((x @ w - y) ** 2).mean()
        made += [make(loss, [w], x, y, adam, sliceable_shareds=held_by, learning_rate=0.1), w]
    train, w, alone, w_alone = made
    batches = [[0, 1], [2, 3], [3, 1], [0, 3]]
    of_host = {"x_data": np.eye(4, 3), "y_data": np.ones(4), "batches": batches}
    arguments = {"batches_s": batches} if held else of_host
    losses = [train.steps(**arguments) for _ in range(70)]
    assert launches == [1] * 70
    launches.clear()
    # A shorter step in between is a separate launch, and launches that need too much memory are split.
    argument = "batches_s" if held else "batches"
    some = {**arguments, argument: [*batches[:2], [1], *batches[2:]]}
    losses.append(train.steps(**some))
    assert launches == [1, 1, 1]
    monkeypatch.setattr("synkhronos.training.train_function.train_function._MAX_LAUNCH_NBYTES", 2 * 2 * 4 * 8)
    losses.append(train.steps(**arguments))
    assert launches == [1] * (4 if held else 5)  # an array on the device needs no copy
    # A step on many bytes is a separate launch.
    monkeypatch.setattr("synkhronos.training.train_function.train_function._LONG_STEP_NBYTES", 2 * 4 * 8)
    launches.clear()
    losses.append(train.steps(**arguments))
    assert launches == [1] * (1 if held else 4)
    expected = [alone.steps(**keywords) for keywords in [*[arguments] * 70, some, arguments, arguments]]
    for got, wanted in zip(losses, expected, strict=True):
        np.testing.assert_allclose(np.array(got, float), np.array(wanted, float))
    np.testing.assert_allclose(w.get_value(), w_alone.get_value())
