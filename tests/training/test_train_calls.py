"""Training functions: wrong arguments, rows by batch_s, and calls after a new fork."""

from functools import partial

import numpy as np
import pytest
from library import package
from library import tensor as T

import synkhronos as synk
from synkhronos.training import make_train_function, make_train_function_serial, updates

N_ROWS = 7
rng = np.random.default_rng(3)
X, Y, W = rng.normal(size=(N_ROWS, 3)), rng.normal(size=N_ROWS), rng.normal(size=3)
SHARED = package.shared(X, "s")


class Model:
    """Linear regression."""

    def __init__(self):
        self.x, self.y = T.matrix("x", dtype="float64"), T.vector("y", dtype="float64")
        self.w = package.shared(W, name="w")
        self.params = [self.w]
        self.loss = ((T.dot(self.x, self.w) - self.y) ** 2).mean()

    def train_by(self, make):
        return make(self.loss, self.params, self.x, self.y, updates.sgd, learning_rate=0.1)


def test_train_functions_work_after_a_new_fork(fork):
    together, alone = Model(), Model()
    fork(3)
    train = together.train_by(make_train_function)
    train_alone = alone.train_by(make_train_function_serial)
    train(X, Y)
    train_alone(X, Y)
    synk.close()
    fork(2)
    for rows in [1, None]:
        np.testing.assert_allclose(train(X, Y, batch=rows), train_alone(X, Y, batch=rows), rtol=1e-9)
    np.testing.assert_allclose(synk.gather(together.w), [alone.w.get_value()] * 2, rtol=1e-9)


@pytest.fixture(scope="module")
def trained(two_ranks):
    """Return a model with parameters W, a training function of two ranks, and the loss of its first step."""
    model, alone = Model(), Model()
    return model, model.train_by(make_train_function), alone.train_by(make_train_function_serial)(X, Y)


def make_sliceable_model():
    """Return a model, and a training function whose rows are in sliceable shared variables."""
    model = Model()
    rows = [package.shared(X), package.shared(Y)]
    return model, make_train_function(
        model.loss, model.params, model.x, model.y, updates.sgd, sliceable_shareds=rows, learning_rate=0.1
    )


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (
            TypeError,
            r"^update_rule: expected <lambda> to return \(grad_updates, ",
            {"update_rule": lambda loss, params, weight: {}},
        ),
        (ValueError, "beta1: expected from 0 up to", {"update_rule": partial(updates.lion, beta1=2)}),
        (TypeError, "^x: expected a variable or a list of variables; .* got 3 of type", {"x": 3}),
        (ValueError, "^x: expected at least one variable, got none", {"x": []}),
        (ValueError, "^y: expected a variable .* with rows to scatter, got y of", {"y": T.scalar("y")}),
        (TypeError, "^params: expected a list of shared variables of floats; .* got 3 of type", {"params": [3]}),
        (ValueError, "params: the loss does not depend on other of type", {"params": [package.shared(Y, "other")]}),
        (ValueError, "^loss_or_grads: expected a symbolic scalar .* got v of type", {"loss": T.vector("v")}),
        (TypeError, "^loss: expected a symbolic scalar, got a list", {"loss": []}),
        (ValueError, "sliceable_shareds: expected 2 .*got 1", {"sliceable_shareds": [package.shared(X)]}),
        (TypeError, "sliceable_shareds: expected shared", {"sliceable_shareds": [package.shared(X), T.dvector()]}),
        (TypeError, "sliceable_shareds: expected a list", {"sliceable_shareds": package.shared(X)}),
        (TypeError, "extra_updates: expected a dict or a list", {"extra_updates": package.shared(X)}),
        (ValueError, "extra_updates: there are two for 's'", {"extra_updates": [(SHARED, SHARED), (SHARED, SHARED)]}),
        (TypeError, "extra_updates: expected pairs", {"extra_updates": [package.shared(X)]}),
        (TypeError, "extra_updates: expected shared", {"extra_updates": {T.dmatrix(): T.dmatrix()}}),
        (
            TypeError,
            "sliceable_shareds: 'of_x' of .* can't stand for x of",
            {"sliceable_shareds": [package.shared(Y, "of_x"), package.shared(Y)]},
        ),
    ],
)
def test_make_train_function_refuses_wrong_arguments(two_ranks, error, message, change):
    model = Model()
    arguments = {
        "loss": model.loss,
        "params": model.params,
        "x": model.x,
        "y": model.y,
        "update_rule": updates.sgd,
        "learning_rate": 0.1,
    }
    if callable(change.get("update_rule")):
        del arguments["learning_rate"]
    for make in [make_train_function] + [make_train_function_serial] * ("sliceable_shareds" not in change):
        with pytest.raises(error, match=message):
            make(**{**arguments, **change})


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, "batch: .*at least one row", {"batch": 0}),
        (ValueError, "batch: .*at least one row", {"batch": []}),
        (ValueError, "batch: .*at least one row", {"batch": slice(4, 2)}),
        (ValueError, "batch: .*at least one row", {"batch": np.zeros(N_ROWS, bool)}),
        (IndexError, "^batch=8: expected an int from 0 to 7, the number of rows", {"batch": N_ROWS + 1}),
        (IndexError, "^batch=-1: expected an int from 0 to 7, the number of rows", {"batch": -1}),
        (IndexError, "^batch: index 7 is out of range for 7 rows", {"batch": [0, N_ROWS]}),
        (ValueError, "^batch: a mask needs one entry for each of the 7 rows, got 3", {"batch": np.ones(3, bool)}),
        (TypeError, "^batch: expected a number of rows, a slice, .* got True", {"batch": True}),
        (TypeError, "^num_slices: expected an integer, got 1.5", {"num_slices": 1.5}),
        (ValueError, "^num_slices: expected at least 1, got 0", {"num_slices": 0}),
        (ValueError, r"scattered inputs need equally many rows, got \[7, 5\]", {"y_data": Y[:5]}),
        (TypeError, "y_data: expected rows, got None", {"y_data": None}),
        (TypeError, "batch_s: .*without sliceable_shareds", {"batch_s": [0]}),
    ],
)
def test_train_refuses_wrong_arguments(trained, error, message, arguments):
    model, train, first_loss = trained
    with pytest.raises(error, match=message):
        train(**{"x_data": X, "y_data": Y, **arguments})
    np.testing.assert_array_equal(model.w.get_value(), W)
    np.testing.assert_allclose(train(X, Y), first_loss)
    synk.broadcast(model.w, W)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "batches: expected a sequence", {}),
        (TypeError, "batches: expected a sequence", {"batches": 3}),
        (TypeError, "batches: expected a sequence", {"batches": "all"}),
        (TypeError, r"^batches\[0\]: expected a number of rows, .* got True", {"batches": [True, [1, 2]]}),
        (TypeError, "batches: expected a sequence", {"batches": np.array(3)}),
        (TypeError, "^num_slices: expected an integer, got 1.0", {"batches": [[0, 1], [2, 3]], "num_slices": 1.0}),
        (
            ValueError,
            r"scattered inputs need equally many rows, got \[7, 5\], and batch=slice\(2, 6, None\) selects different rows",
            {"batches": [slice(2, 6), slice(0, 4)], "y_data": Y[:5]},
        ),
        (TypeError, "x_data: expected rows, got None", {"batches": [[0, 1]], "x_data": None}),
        (TypeError, "^num_slices: expected an integer, got True", {"batches": [[0, 1], [2, 3]], "num_slices": True}),
        (TypeError, "batches_s: .*without sliceable_shareds; rows are chosen by batches$", {"batches_s": [[0]]}),
    ],
)
def test_train_steps_refuses_wrong_arguments(trained, error, message, arguments):
    model, train, _ = trained
    with pytest.raises(error, match=message):
        train.steps(**{"x_data": X, "y_data": Y, **arguments})
    np.testing.assert_array_equal(model.w.get_value(), W)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, "batch: expected at least one row", {"batch": []}),
        (IndexError, "^batch: index 7 is out of range for 7 rows", {"batch": [0, N_ROWS]}),
        (TypeError, "^batch: expected a number of rows, a slice, .* got True", {"batch": True}),
        (ValueError, "x_data, y_data: expected the same number of rows", {"y_data": Y[:5]}),
        (TypeError, "y_data: expected rows, got None", {"y_data": None}),
    ],
)
def test_serial_step_refuses_wrong_arguments(error, message, arguments):
    model = Model()
    with pytest.raises(error, match=message):
        model.train_by(make_train_function_serial)(**{"x_data": X, "y_data": Y, **arguments})
    np.testing.assert_array_equal(model.w.get_value(), W)


@pytest.mark.parametrize(
    ("error", "message", "batches"),
    [
        (IndexError, r"batches\[1\]: index 7 is out of range", [[0, 1], [0, N_ROWS]]),
        (ValueError, r"batches\[2\]: expected at least one row", [[0], [1], slice(3, 3)]),
    ],
)
def test_train_steps_checks_all_rows_first(trained, error, message, batches):
    model, train, _ = trained
    with pytest.raises(error, match=message):
        train.steps(X, Y, batches)
    np.testing.assert_array_equal(model.w.get_value(), W)


def test_train_steps_error_reports_completed_steps(two_ranks):
    model, train = make_sliceable_model()
    with pytest.raises(IndexError, match=f"index {N_ROWS} ") as caught:
        train.steps(batches_s=[[[0, 1], [2, 3]], [[0, 1], [2]], [[0], [N_ROWS]]])
    assert "2 of the 3 steps had been taken before." in caught.value.__notes__
    assert not np.array_equal(model.w.get_value(), W)


def test_train_steps_refuses_wrong_batches_s(two_ranks):
    _, train = make_sliceable_model()
    for wrong in ({"x_data": X}, {"batches": [[0]]}):
        with pytest.raises(TypeError, match="the data are in sliceable_shareds: expected batches_s alone"):
            train.steps(**wrong)
    with pytest.raises(ValueError, match=r"^batches_s\[1\]: expected one selection of rows for each of 2 ranks, got 3"):
        train.steps(batches_s=[[0], [[0], [1], [2]]])


def test_error_names_the_ragged_input(trained):
    _, train, _ = trained
    with pytest.raises(ValueError, match=r"^input 0 \(x\) of train_gradient: "):
        train.steps([[1.0], [1.0, 2.0]], Y[:2], [[0], [1]])


def test_train_refuses_wrong_batch_s(two_ranks):
    model, train = make_sliceable_model()
    for wrong in ({"x_data": X}, {"y_data": Y}, {"batch": [0]}):
        with pytest.raises(TypeError, match="the data are in sliceable_shareds: expected batch_s alone"):
            train(**wrong)
    for error, message, wrong in (
        (IndexError, "index 7 is out of range for 7 rows on rank 0", [0, N_ROWS]),
        (ValueError, "expected at least one row on some rank, got none", []),
        (ValueError, "expected at least one row on some rank, got none", slice(N_ROWS, None)),
        (TypeError, "expected a slice, a list of indexes, .* got 3", 3),
        (TypeError, "expected integer indexes, got dtype bool", np.ones(N_ROWS, bool)),
    ):
        with pytest.raises(error, match=f"^batch_s: {message}"):
            train(batch_s=wrong)
    np.testing.assert_array_equal(model.w.get_value(), W)


def test_train_refuses_lists_of_other_lengths(two_ranks):
    model = Model()
    for make in [make_train_function, make_train_function_serial]:
        train = make(model.loss, model.params, [model.x], model.y, updates.sgd, learning_rate=0.1)
        with pytest.raises(TypeError, match="x_data: expected a list of 1"):
            train(X, Y)
        with pytest.raises(ValueError, match="x_data: expected a list of 1 arrays, got 2"):
            train([X, X], Y)


@pytest.mark.parametrize("make", [make_train_function, make_train_function_serial])
def test_make_train_function_refuses_double_updates(two_ranks, make):
    model = Model()
    extra = [(model.w, 0 * model.w)]
    with pytest.raises(ValueError, match="extra_updates: the update rule has an update of 'w' already"):
        make(model.loss, model.params, model.x, model.y, updates.sgd, extra_updates=extra, learning_rate=0.1)
