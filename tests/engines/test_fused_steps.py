"""Training steps that XLA runs in one launch, one or many at once."""

import gc
import weakref

import numpy as np
import pytest
from library import XLA, shared
from library import tensor as T
from xla_launches import get_runner, not_on_gpus

import synkhronos as synk
from synkhronos.devices.jax.scalar_log import LOG_CAPACITY
from synkhronos.engines.xla.executable import Executable
from synkhronos.engines.xla_engine import XlaEngine
from synkhronos.functions import get_dispatcher
from synkhronos.graph_libraries import get_library
from synkhronos.training import make_train_function, make_train_function_serial
from synkhronos.training.train_function.train_function import TrainFunction
from synkhronos.training.updates import adam, momentum, sgd

pytestmark = pytest.mark.skipif(not XLA, reason="about JAX arrays")

VALUE = np.arange(4.0)


@pytest.fixture
def many_steps_a_launch(monkeypatch):
    """Fuse many steps into one launch on the CPU too, where the library does not by default."""
    monkeypatch.setattr(XlaEngine, "get_max_repeats", lambda self, dtype=None: LOG_CAPACITY)


@not_on_gpus
def test_shared_variables_keep_their_memory_between_launches(fork):
    fork(1)
    rng = np.random.default_rng(0)
    ws = [shared(rng.normal(size=(64, 64)), f"w{i}") for i in range(3)]
    x = T.dmatrix("x")
    h = x
    for w in ws:
        h = T.tanh(h.dot(w))
    train = make_train_function((h**2).mean(), ws, x, [], momentum, learning_rate=0.1)
    variables = [*ws, *train.optimizer_state, train.grad_shared]

    def list_addresses():
        return [get_library(variable).borrow_value(variable).unsafe_buffer_pointer() for variable in variables]

    for _ in range(2):
        train(np.ones((5, 64)), [])
    addresses = list_addresses()
    for _ in range(3):
        train(np.ones((5, 64)), [])
        assert list_addresses() == addresses


LENGTHS_AND_CONSTANTS = {
    "length": (np.int64(0), lambda x, y: x.shape[0]),
    "sum of lengths": (np.int64(0), lambda x, y: x.shape[0] + y.shape[0]),
    "number": (np.float64(0), lambda x, y: T.constant(np.float64(3))),
    "filled array": (np.zeros(3), lambda x, y: T.alloc(np.float64(2), 3)),
    "integer": (np.int8(0), lambda x, y: T.cast(x.shape[1], "int8")),
}


def make_linear_model(make, update_rule=sgd, **options):
    """Return a training function of a linear model, and its parameters."""
    x, y, w = T.dmatrix("x"), T.dvector("y"), shared(np.zeros(3), "w")
    return make(((x @ w - y) ** 2).mean(), [w], x, y, update_rule, learning_rate=0.1, **options), w


@pytest.fixture
def launches(monkeypatch):
    """Return a list that grows by an item with each launch of the master."""
    items = []
    launch = Executable._launch
    monkeypatch.setattr(Executable, "_launch", lambda self, arguments: items.append(1) or launch(self, arguments))
    return items


@pytest.mark.parametrize("case", LENGTHS_AND_CONSTANTS)
def test_updates_by_lengths_and_constants_are_compiled_once(fork, many_steps_a_launch, case):
    fork(1)
    value, expression = LENGTHS_AND_CONSTANTS[case]

    def train_model(make):
        x, y, w, k = T.dmatrix("x"), T.dvector("y"), shared(np.zeros(3), "w"), shared(value, "k")
        loss = ((x @ w - y) ** 2).mean()
        train = make(loss, [w], x, y, sgd, extra_updates=[(k, expression(x, y), None)], learning_rate=0.1)
        data, batches = (np.eye(4, 3), np.ones(4)), [[0, 1], [2, 3], [3, 1]]
        for _ in range(3):
            train(*data, batch=[0, 1])
            if make is make_train_function:
                train.steps(*data, batches=batches)
            else:
                for batch in batches:
                    train(*data, batch=batch)
        return train, w.get_value(), np.asarray(k.get_value())

    train, w, k = train_model(make_train_function)
    _, serial_w, serial_k = train_model(make_train_function_serial)
    np.testing.assert_allclose(w, serial_w)
    np.testing.assert_allclose(k, serial_k)
    assert k.dtype == serial_k.dtype
    gradient, update = get_runner(train.gradient), get_runner(train.update)
    for n_steps in (1, 3):
        assert gradient.fuse(others=[update], n_repeats=n_steps)._program._cache_size() == 1


def test_training_step_of_one_rank_is_one_launch(fork, launches):
    fork(1)
    train, w = make_linear_model(make_train_function)
    data = np.eye(3), np.ones(3)
    for _ in range(3):
        train(*data)
    assert launches == [1, 1, 1]
    np.testing.assert_allclose(np.asarray(w.get_value()), 1 - (1 - 2 * 0.1 / 3) ** 3, rtol=1e-6)


def test_equal_steps_are_fused_once_until_the_update_is_compiled_again(fork, monkeypatch):
    fork(1)
    fuse_step, fused = XlaEngine.fuse_step, []
    monkeypatch.setattr(XlaEngine, "fuse_step", lambda *arguments: fused.append(1) or fuse_step(*arguments))
    (train, w), (serial_train, serial_w) = (
        make_linear_model(make_train_function),
        make_linear_model(make_train_function_serial),
    )
    rng = np.random.default_rng(0)

    def take_steps(n_steps, rows):
        fused.clear()
        for _ in range(n_steps):
            data = rng.normal(size=(rows, 3)), rng.normal(size=rows)
            np.testing.assert_allclose(train(*data), serial_train(*data))
        np.testing.assert_allclose(w.get_value(), serial_w.get_value())
        return len(fused)

    take_steps(2, 4)  # compiles
    assert take_steps(5, 4) == 0
    assert take_steps(3, 6) == 1  # another command
    get_dispatcher(train.update).computation.compiled_variants.clear()
    assert take_steps(3, 6) == 1


def test_last_fused_step_keeps_no_runner_alive(fork):
    fork(1)
    train, _ = make_linear_model(make_train_function)
    for _ in range(3):
        train(np.eye(3), np.ones(3))
    runner = weakref.ref(get_runner(train.gradient))
    gc.collect()
    gc.disable()
    try:
        train = None
        assert runner() is None
    finally:
        gc.enable()


def test_steps_that_cannot_be_fused_run_one_by_one(many_steps_a_launch, monkeypatch, two_ranks_per_test):
    attempts = []  # for each command: its number of steps, and whether these were taken
    run_step_command = TrainFunction._run_step_command

    def record_attempt(self, arrays, batch, batch_s, num_slices, n_steps=1):
        losses = run_step_command(self, arrays, batch, batch_s, num_slices, n_steps)
        attempts.append((n_steps, losses is not None))
        return losses

    monkeypatch.setattr(TrainFunction, "_run_step_command", record_attempt)

    def make_model(make):
        x, y, w, k = T.dmatrix("x"), T.dvector("y"), shared(np.zeros(3), "w"), shared(np.int64(3), "k")
        # PyTensor compiles again for each value of a variable that is a length.
        loss = ((x @ w - y) ** 2).mean() + (x.reshape((-1, k)).sum() * w[0]) / x.shape[0]
        return make(loss, [w], x, y, sgd, learning_rate=0.1), w

    train, w = make_model(make_train_function)
    train_serial, serial_w = make_model(make_train_function_serial)
    arguments = np.eye(4, 3), np.ones(4), [[0, 1], [2, 3], [3, 1]]
    for _ in range(2):
        expected = [train_serial(*arguments[:2], batch) for batch in arguments[2]]
        np.testing.assert_allclose(np.array(train.steps(*arguments), float), expected)
        np.testing.assert_allclose(synk.gather(w), [serial_w.get_value()] * 2)
    assert attempts == [(3, False), (1, True), (1, True), (1, True)] * 2


def test_steps_in_one_launch_refuse_updates_of_another_shape(fork, many_steps_a_launch):
    fork(1)
    x, y, w, last = T.dmatrix("x"), T.dvector("y"), shared(np.zeros(3), "w"), shared(np.zeros((1, 3)), "last")
    loss = ((x @ w - y) ** 2).mean()
    train = make_train_function(loss, [w], x, y, sgd, extra_updates=[(last, x, None)], learning_rate=0.1)
    with pytest.raises(ValueError, match=r"variable of shape \(1, 3\) is updated by a value of shape \(2, 3\)"):
        train.steps(np.eye(4, 3), np.ones(4), [[0, 1], [2, 3]])
    np.testing.assert_array_equal(w.get_value(), np.zeros(3))
    train(np.eye(4, 3), np.ones(4), [0, 1])
    np.testing.assert_array_equal(last.get_value(), np.eye(4, 3)[:2])


class SteppedModels:
    """A training function and its serial counterpart, which take the same steps; rows are arguments or sliceable."""

    BATCHES = ([0, 1], [2, 3], [3, 1], [0, 3])

    def __init__(self, is_sliceable):
        self.argument = "batches_s" if is_sliceable else "batches"
        self.data = {} if is_sliceable else {"x_data": np.eye(4, 3), "y_data": np.ones(4)}
        rows = [VALUE[:, None] * [1.0, 2.0, 3.0], VALUE] if is_sliceable else list(self.data.values())
        sliceable = [shared(rows[0], "x"), shared(rows[1], "y")] if is_sliceable else None
        self.rows = rows
        self.train, w = make_linear_model(make_train_function, adam, sliceable_shareds=sliceable)
        self.train_serial, serial_w = make_linear_model(make_train_function_serial, adam)
        self.ws = [w, serial_w]

    def take_steps(self, batches=BATCHES):
        """Take a step on each batch with both functions; check that the losses and the parameters are equal."""
        losses = self.train.steps(**self.data, **{self.argument: list(batches)})
        expected = [self.train_serial(*self.rows, batch) for batch in batches]
        np.testing.assert_allclose(np.array(losses, float), np.array(expected, float))
        np.testing.assert_allclose(*(w.get_value() for w in self.ws))


@pytest.fixture(params=[False, True], ids=["arguments", "sliceable"])
def models(request, fork, many_steps_a_launch):
    """Return a `SteppedModels`.  The parameter is whether rows are in sliceable shared variables."""
    fork(1)
    return SteppedModels(request.param)


def test_steps_of_one_rank_are_one_launch(models, launches):
    n_launches = LOG_CAPACITY // len(models.BATCHES) + 2  # more scalars than a log has entries
    for _ in range(n_launches):
        models.take_steps()
    assert launches == [1] * n_launches


def test_shorter_step_is_a_separate_launch(models, launches):
    first, second, *others = models.BATCHES
    models.take_steps([first, second, [1], *others])
    assert launches == [1, 1, 1]


STEP_NBYTES = 2 * (3 + 1) * 8  # rows, columns of x and y, bytes of a float64


@pytest.fixture(params=[("MAX_LAUNCH_NBYTES", 2 * STEP_NBYTES, 2), ("_LONG_STEP_NBYTES", STEP_NBYTES, 4)])
def n_launches(request, monkeypatch):
    """Lower a limit of the bytes that a launch or a step copies.  Return the number of launches of four steps."""
    name, nbytes, n_launches = request.param
    monkeypatch.setattr(f"synkhronos.training.train_function.train_function.{name}", nbytes)
    return n_launches


@pytest.mark.parametrize("models", [False], ids=["arguments"], indirect=True)
def test_launches_that_copy_many_bytes_are_split(models, launches, n_launches):
    models.take_steps()
    assert launches == [1] * n_launches


@pytest.mark.parametrize("models", [True], ids=["sliceable"], indirect=True)
@pytest.mark.usefixtures("n_launches")
def test_launches_that_copy_no_rows_are_not_split(models, launches):
    models.take_steps()
    assert launches == [1]
