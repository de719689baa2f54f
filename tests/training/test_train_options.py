"""Options of training functions and trainers: clipping, slices and averages of parameters."""

import re

import numpy as np
import pytest
from library import package
from library import tensor as T
from paths import ROOT

import synkhronos as synk
from synkhronos import ranks
from synkhronos.launcher.configuration.settings import check_model_options
from synkhronos.training import (
    CheckpointError,
    CheckpointFolder,
    make_train_function,
    make_train_function_serial,
    make_trainer,
)
from synkhronos.training.updates import adam, sgd

rng = np.random.default_rng(5)
X, START = rng.normal(size=(13, 3)), rng.normal(size=3)
Y = X @ [1.0, -2.0, 3.0]


class LinearRegression:
    def __init__(self, dtype="float64"):
        self.x, self.y = T.matrix("x", dtype=dtype), T.vector("y", dtype=dtype)
        self.w = package.shared(START.astype(dtype), name="w")
        self.loss = ((T.dot(self.x, self.w) - self.y) ** 2).mean()

    def train_by(self, make, update_rule=sgd, learning_rate=0.1, **kwargs):
        return make(self.loss, [self.w], self.x, self.y, update_rule, learning_rate=learning_rate, **kwargs)


def train_in_numpy(n_steps, clip_norm=np.inf, ema=0.0, rows=slice(None)):
    """Return parameters, and their average, after some steps of gradient descent."""
    w = average = START
    for _ in range(n_steps):
        g = 2 * X[rows].T @ (X[rows] @ w - Y[rows]) / len(X[rows])
        w = w - 0.1 * g * min(1, clip_norm / np.sqrt((g**2).sum()))
        average = ema * average + (1 - ema) * w
    return w, average


@pytest.mark.parametrize("num_slices", [1, 3])
def test_train_with_clip_and_ema_equals_one_process(n_ranks, num_slices):
    options = {"clip_norm": 0.5, "ema": 0.8}
    parallel_options = {**options, "num_slices": num_slices}
    for make, make_options in ((make_train_function, parallel_options), (make_train_function_serial, options)):
        problem = LinearRegression()
        train = problem.train_by(make, **make_options)
        assert train.optimizer_state[0] is train.get_ema()[0]
        for n in range(1, 8):
            train(X, Y)
            w, average = train_in_numpy(n, 0.5, 0.8)
            np.testing.assert_allclose(problem.w.get_value(), w, rtol=1e-10)
            np.testing.assert_allclose(train.get_ema()[0].get_value(), average, rtol=1e-10)
    together = LinearRegression()
    train = together.train_by(make_train_function, **parallel_options)
    train.steps(X, Y, batches=[7] * 4)
    w, average = train_in_numpy(4, 0.5, 0.8, rows=slice(7))
    for variable, expected in ((together.w, w), (train.get_ema()[0], average)):
        for value in np.asarray(synk.gather(variable)).reshape(n_ranks, 3):
            np.testing.assert_allclose(value, expected, rtol=1e-10)


def test_ema_starts_at_the_initial_parameters():
    problem = LinearRegression()
    train = problem.train_by(make_train_function_serial, ema=0.9)
    problem.w.set_value(np.array([1.0, -2.0, 3.0]))  # where the gradient is 0
    train(X, Y)
    np.testing.assert_allclose(train.get_ema()[0].get_value(), [1.0, -2.0, 3.0], rtol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "expected"), [("float16", "float32"), ("float32", "float32"), ("float64", "float64")]
)
def test_ema_is_at_least_float32(dtype, expected):
    w = package.shared(np.ones(2, dtype), "w")
    x = T.matrix("x", dtype=dtype)
    train = make_train_function_serial((x * w).mean(), [w], x, [], sgd, learning_rate=0.5, ema=0.999, clip_norm=1e3)
    assert train.get_ema()[0].dtype == expected
    average = np.ones(2)
    for _ in range(3):
        train(np.ones((4, 2), dtype), [])
        average = 0.999 * average + 0.001 * w.get_value().astype("float64")
        np.testing.assert_allclose(train.get_ema()[0].get_value(), average, rtol=1e-6)


def test_ema_is_none_by_default():
    train = LinearRegression().train_by(make_train_function_serial, adam)
    assert train.get_ema() is None
    assert [variable.name for variable in train.optimizer_state] == ["t", "w_m", "w_v"]


# -- trainers --------------------------------------------------------------------------------------------


def train_adam(folder, epochs, resume=None, **options):
    problem = LinearRegression()
    trainer = make_trainer(
        problem.loss,
        [problem.w],
        problem.x,
        problem.y,
        adam,
        learning_rate=0.1,
        validate={"mse": problem.loss},
        **options,
    )
    reports = trainer.epochs(
        X, Y, 2, epochs, valid=(X, Y), checkpoints=CheckpointFolder(folder) if folder else None, resume=resume
    )
    return problem, trainer, list(reports)


def compute_mse(w):
    return ((X @ w - Y) ** 2).mean()


def test_trainer_validates_and_saves_ema(n_ranks, tmp_path):
    options = {"clip_norm": 0.5, "ema": 0.9, "num_slices": 2}
    problem, trainer, reports = train_adam(tmp_path, 3, validate_ema=True, **options)
    average = trainer.get_ema()[0].get_value()
    np.testing.assert_allclose(reports[-1].validation["mse"], compute_mse(average), rtol=1e-10)
    other, _, plain = train_adam(None, 3, **options)
    np.testing.assert_array_equal(other.w.get_value(), problem.w.get_value())
    np.testing.assert_allclose(plain[-1].validation["mse"], compute_mse(problem.w.get_value()), rtol=1e-10)
    assert abs(plain[-1].validation["mse"] - reports[-1].validation["mse"]) > 1e-3
    # After resuming, the average continues.
    train_adam(tmp_path / "half", 1, **options)
    resumed, trainer, _ = train_adam(tmp_path / "half", 3, resume="latest", **options)
    np.testing.assert_array_equal(resumed.w.get_value(), problem.w.get_value())
    np.testing.assert_array_equal(trainer.get_ema()[0].get_value(), average)
    for change in ({"ema": 0.8}, {"clip_norm": 1.0}, {"clip_norm": None}, {"ema": None}):
        with pytest.raises(CheckpointError):
            train_adam(tmp_path / "half", 4, resume="latest", **{**options, **change})


# -- loss scaling ----------------------------------------------------------------------------------------


def make_mean_problem(make, dtype="float16", **options):
    """Return a problem with the loss ``mean(x) * w``, whose gradient is the mean of x."""
    x, w = T.vector("x", dtype=dtype), package.shared(np.ones((), dtype), "w")
    train = make((x * w).mean(), [w], x, [], sgd, learning_rate=0.5, loss_scale="dynamic", **options)
    return w, train, {variable.name: variable for variable in train.optimizer_state}


def test_loss_scale_overflow_on_one_rank_skips_the_step(n_ranks):
    for make in (make_train_function, make_train_function_serial):
        w, train, state = make_mean_problem(make, ema=0.5)
        scale, average = state["loss_scale"], train.get_ema()[0]

        def values(variable, make=make):
            gathered = (
                np.asarray(synk.gather(variable)).ravel() if make is make_train_function else variable.get_value()
            )
            return np.unique(gathered)

        train(np.full(6, 0.5, "float16"), [])
        assert (values(w), values(average), values(scale)) == (0.75, 0.875, 2**15)
        overflow = np.array([0.5, 0.5, 0.5, 0.5, 0.5, 500], "float16")  # 500 / 2 * 2**15 is infinite in float16
        train(overflow, [])
        assert (values(w), values(average), values(scale)) == (0.75, 0.875, 2**14)
        train(np.full(6, 0.5, "float16"), [])
        assert (values(w), values(average), values(scale)) == (0.5, 0.6875, 2**14)


def test_loss_scale_keeps_gradients(n_ranks):
    together, plain = LinearRegression(), LinearRegression()
    train = together.train_by(make_train_function, adam, loss_scale="dynamic", clip_norm=0.5, num_slices=2)
    train_plain = plain.train_by(make_train_function_serial, adam, clip_norm=0.5)
    for batch in (None, 7, [3, 1], 1):
        np.testing.assert_allclose(train(X, Y, batch=batch), train_plain(X, Y, batch=batch), rtol=1e-9)
        np.testing.assert_allclose(together.w.get_value(), plain.w.get_value(), rtol=1e-9)


def test_extra_updates_are_averaged_with_clipped_gradients(n_ranks):
    for make in (make_train_function, make_train_function_serial):
        problem, mean = LinearRegression(), package.shared(np.zeros(3), "mean")
        moved = [(mean, problem.x.mean(axis=0), "mean")]
        train = problem.train_by(make, clip_norm=0.5, ema=0.8, loss_scale="dynamic", extra_updates=moved)
        for n in range(1, 4):
            train(X, Y)
            w, average = train_in_numpy(n, 0.5, 0.8)
            np.testing.assert_allclose(problem.w.get_value(), w, rtol=1e-10)
            np.testing.assert_allclose(train.get_ema()[0].get_value(), average, rtol=1e-10)
            np.testing.assert_allclose(mean.get_value(), X.mean(axis=0), rtol=1e-10)


def test_loss_scale_grows_after_finite_steps(n_ranks):
    w, train, state = make_mean_problem(make_train_function, "float32")
    synk.broadcast(state["loss_scale_steps"], np.asarray(1999, "float32"))
    train(np.full(6, 0.5, "float32"), [])
    assert (state["loss_scale"].get_value(), state["loss_scale_steps"].get_value()) == (2**16, 0)
    assert w.get_value() == 0.75


# -- the table of docs/training.rst ------------------------------------------------------------------------

VALUES = {
    "clip_norm": 0.5,
    "num_slices": 2,
    "ema": 0.9,
    "validate_ema": True,
    "loss_scale": "dynamic",
    "shard_optimizer": True,
}
TABLE = re.findall(r"^``(\w+)`` +(yes|no) +(yes|no) +(yes|no)$", (ROOT / "docs" / "training.rst").read_text(), re.M)


def check_equals_one_process(problem, averages, batches, **options):
    """Compare parameters and averages with those of one process after steps on these batches."""
    serial = LinearRegression()
    step_options = {name: options[name] for name in options if name in ("clip_norm", "ema", "loss_scale")}
    train = serial.train_by(make_train_function_serial, adam, **step_options)
    for rows in batches:
        train(X, Y, batch=rows)
    for values in zip([problem.w, *(averages or ())], [serial.w, *(train.get_ema() or ())], strict=True):
        np.testing.assert_allclose(*(variable.get_value() for variable in values), rtol=1e-9)


def train_by_function(**options):
    problem = LinearRegression()
    train = problem.train_by(make_train_function, adam, **options)
    for rows in (None, 7):
        train(X, Y, batch=rows)
    check_equals_one_process(problem, train.get_ema(), (None, 7), **options)


def train_by_trainer(**options):
    problem = LinearRegression()
    trainer = problem.train_by(make_trainer, adam, validate={"mse": problem.loss}, **options)
    (report,) = trainer.epochs(X, Y, 2, 1, seed=1, valid=(X, Y))
    order, step = np.random.default_rng((1, 0)).permutation(len(X)), 2 * ranks.get_session().size
    batches = [order[start : start + step] for start in range(0, len(X), step)]
    check_equals_one_process(problem, trainer.get_ema(), batches, **options)
    validated = trainer.get_ema()[0] if "validate_ema" in options else problem.w
    np.testing.assert_allclose(report.validation["mse"], compute_mse(validated.get_value()), rtol=1e-9)


def set_in_a_model(**options):
    check_model_options(options)  # equality with one process is tested in tests/launcher/test_launch_options.py


@pytest.mark.parametrize("option", VALUES)
def test_training_options_table_is_right(n_ranks, option):
    cells = {name: accepted for name, *accepted in TABLE}
    assert set(cells) == set(VALUES)
    options = {option: VALUES[option], **({"ema": 0.9} if option == "validate_ema" else {})}
    uses = train_by_function, train_by_trainer, set_in_a_model
    for use, accepted in zip(uses, cells[option], strict=True):
        if accepted == "yes":
            use(**options)
        else:
            with pytest.raises((TypeError, ValueError), match=option):
                use(**options)
