"""Means of training functions and of validation on several ranks equal those of one process."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from library import function, grad, limit_examples, shared, tensor
from masked_model import MASK, STEPS, MaskedModel, N, X, take_rows

import synkhronos as synk
from synkhronos import exchange_rules
from synkhronos.training import make_train_function, make_train_function_serial, make_trainer
from synkhronos.training.updates import adam, sgd

T = tensor


class Oracle(MaskedModel):
    """The model in one process, by the graph library only."""

    def __init__(self):
        super().__init__()
        new = self.w - 0.1 * grad(self.loss, self.w)
        self.step = function([self.x, self.y, self.mask], self.loss, updates=[(self.w, new)])


# -- losses with weights -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def masked_models(n_ranks):
    return n_ranks, MaskedModel(make_train_function), Oracle()


def draw_weighted_rows():
    return st.lists(st.integers(0, N - 1), min_size=1, max_size=N).filter(lambda rows: MASK[rows].any())


@limit_examples(25)
@given(rows=draw_weighted_rows(), slices=st.integers(1, 4))
def test_train_masked_mean_equals_one_process(masked_models, rows, slices):
    n_ranks, data_parallel, oracle = masked_models
    for model in (data_parallel, oracle):
        model.w.set_value(np.ones(STEPS))
    synk.broadcast(data_parallel.w)
    x, y, m = take_rows(rows)
    for _ in range(2):
        loss = data_parallel.train(x, [y, m], num_slices=slices)
        np.testing.assert_allclose(loss, oracle.step(x, y, m), rtol=1e-9)
    np.testing.assert_allclose(synk.gather(data_parallel.w), [oracle.w.get_value()] * n_ranks, rtol=1e-9)


def test_train_masked_mean_needs_a_weight(masked_models):
    n_ranks, _, oracle = masked_models
    with pytest.warns(UserWarning, match="loss: the denominator of a mean depends on the values of mask"):
        plain = MaskedModel(make_train_function, with_weight=False)
    oracle.w.set_value(np.ones(STEPS))
    rows = [7, 8, 3, 1, 4, 2, 5]
    x, y, m = take_rows(rows)
    losses = float(plain.train(x, [y, m])), float(oracle.step(x, y, m))
    assert (n_ranks == 1) == (abs(losses[0] - losses[1]) < 1e-9)


def test_train_steps_accept_a_weight_and_other_dtypes(n_ranks):
    batches = [[0, 1, 2, 3], [4, 5, 6, 7], [1, 4, 5, 2], [9]]
    for dtype in ("float32", "float64"):
        data_parallel, serial = (
            MaskedModel(make_train_function, adam, dtype),
            MaskedModel(make_train_function_serial, adam, dtype),
        )
        x, y, m = take_rows(slice(None), dtype)
        losses = data_parallel.train.steps(x, [y, m], batches)
        expected = [serial.train(x, [y, m], batch) for batch in batches]
        assert all(np.asarray(loss).dtype == dtype for loss in losses)
        np.testing.assert_allclose(np.array(losses, float), np.array(expected, float), rtol=1e-5)
        np.testing.assert_allclose(data_parallel.w.get_value(), serial.w.get_value(), rtol=1e-4)


def test_train_rows_of_zero_weight_change_nothing(n_ranks):
    for make in (make_train_function, make_train_function_serial):
        model = MaskedModel(make)
        x, y, m = take_rows([1, 4, 5, 11])
        assert np.isnan(float(model.train(x, [y, m])))
        if make is make_train_function:
            assert np.isnan(float(model.train(x, [y, m], num_slices=2)))
        np.testing.assert_array_equal(model.w.get_value(), np.ones(STEPS))


# -- running averages --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def averaging_functions(n_ranks):
    """Give training functions whose learning rate is a running average, on which another average depends."""
    functions = []
    for make in (make_train_function, make_train_function_serial):
        x, w = T.dmatrix("x"), shared(np.ones(STEPS), "w")
        a, b = shared(np.ones(()), "a"), shared(np.zeros((1, 2)), "b")
        new = 0.5 * a + 0.5 * (x**2).mean()
        extra = [(a, new), (b, 0.5 * b + a * x[:, :2].mean(axis=0, keepdims=True), "mean")]
        loss = ((x * w - 1) ** 2).mean()
        functions.append((make(loss, [w], x, [], sgd, extra_updates=extra, learning_rate=0.01 * a), (w, a, b)))
    return functions


@limit_examples(15)
@given(rows=st.integers(1, N), slices=st.integers(1, 3))
def test_extra_updates_of_expressions_are_found(averaging_functions, rows, slices):
    values = []
    for train, shareds in averaging_functions:
        for variable, value in zip(shareds, (np.ones(STEPS), np.ones(()), np.zeros((1, 2))), strict=True):
            variable.set_value(value)
            if not values:
                synk.broadcast(variable)
        for _ in range(2):
            train(X[:rows], [], **({} if values else {"num_slices": slices}))
        values.append([variable.get_value() for variable in shareds])
    for rank_value, serial_value in zip(*values, strict=True):
        np.testing.assert_allclose(rank_value, serial_value, rtol=1e-9)


# -- validation ----------------------------------------------------------------------------------------------------


class ValidatedModel:
    def __init__(self, n_ranks):
        self.n_ranks, self.epochs = n_ranks, 0
        self.x, w = T.dvector("x"), shared(np.zeros(()), "w")
        e, x = self.x, self.x
        self.metrics = {
            "plain": e.mean(), "mean": (e.mean(), "mean"), "max": (abs(e).max(), "max"), "min": (e.min(), "min"),
            "sum": ((e > 0).sum(), "sum"), "prod": (e.prod(), "prod"),
            "weighted": ((e * (e > 0)).sum() / (e > 0).sum(), "mean", (e > 0).sum()),
        }  # fmt: skip
        self.trainer = make_trainer(
            (0 * x * w).mean(), [w], x, [], sgd, exchange_rules.BSP(), 0.1, validate=self.metrics
        )


@pytest.fixture(scope="module")
def validated_model(n_ranks):
    return ValidatedModel(n_ranks)


@limit_examples(20)
@given(rows=st.integers(1, 11), batch=st.integers(1, 4), seed=st.integers(0, 9))
def test_train_metrics_equal_one_process(validated_model, rows, batch, seed):
    values = np.random.default_rng(seed).normal(size=rows)
    values[0] = abs(values[0])  # so that the sum of weights is positive
    # Each call continues after the epochs of the last one.
    model = validated_model
    model.epochs += 1
    train = np.ones(4 * model.n_ranks)
    (report,) = model.trainer.epochs(train, [], batch, model.epochs, valid=(values, []))
    positive = values[values > 0]
    expected = {
        "plain": values.mean(), "mean": values.mean(), "max": abs(values).max(), "min": values.min(),
        "sum": len(positive), "prod": values.prod(), "weighted": positive.mean(),
    }  # fmt: skip
    assert list(report.validation) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(report.validation[name], value, rtol=1e-9, err_msg=name)
