"""`rank_mean`: batch normalization over the rows of all ranks equals that of one process with all rows."""

import numpy as np
import pytest
from library import NAME, XLA, package
from library import tensor as T

import synkhronos as synk
from synkhronos import exchange_rules
from synkhronos.extensions.rank_mean import rank_mean
from synkhronos.functions.rank_mean_context import RankMeanContext, average_over_ranks
from synkhronos.training import make_train_function, make_train_function_serial, make_trainer
from synkhronos.training.updates import adam

rng = np.random.default_rng(3)
X = rng.normal([1.0, -20.0, 5.0], [1.0, 0.1, 30.0], (13, 3))
Y = rng.normal(size=13)
WEIGHTS = rng.normal(size=(3, 4)), rng.normal(size=4)


class Network:
    """Two layers with batch normalization after the first, and another batch normalization in parallel."""

    def __init__(self):
        self.x, self.y = T.dmatrix("x"), T.dvector("y")
        self.w, self.v = (package.shared(value, name) for value, name in zip(WEIGHTS, "wv", strict=True))
        self.mean = package.shared(np.zeros(4), "mean")
        hidden, mean = self.normalize(T.dot(self.x, self.w), 4)
        beside, _ = self.normalize(self.x, 3)
        self.loss = T.sqr(T.dot(T.tanh(hidden), self.v) + beside.sum(axis=1) - self.y).mean()
        self.averages = {self.mean: 0.5 * self.mean + 0.5 * mean}

    def normalize(self, value, size):
        moments = rank_mean(T.concatenate([value.mean(axis=0), T.sqr(value).mean(axis=0)]), value.shape[0])
        mean, variance = moments[:size], moments[size:] - T.sqr(moments[:size])
        return (value - mean) / T.sqrt(variance + 0.1), mean

    def train_by(self, make, **options):
        return make(
            self.loss,
            [self.w, self.v],
            self.x,
            self.y,
            adam,
            learning_rate=0.1,
            extra_updates=self.averages,
            **options,
        )

    def values(self):
        return [shared.get_value() for shared in (self.w, self.v, self.mean)]


def check_equal(results, expected):
    for value, expected_value in zip(results, expected, strict=True):
        np.testing.assert_allclose(value, expected_value, rtol=1e-8, atol=1e-10)


def test_rank_mean_statistics_and_gradients_equal_one_process(n_ranks):
    """Steps on 13, 5 and 1 rows, so that some ranks have none."""
    serial, parallel = Network(), Network()
    alone = serial.train_by(make_train_function_serial)
    train = parallel.train_by(make_train_function)
    for rows in (None, list(range(5)), [7], None):
        losses = [step(X, Y, batch=rows) for step in (train, alone)]
        np.testing.assert_allclose(*losses, rtol=1e-8)
        check_equal(parallel.values(), serial.values())


def test_rank_mean_in_a_trainer_accepts_ranks_without_rows(n_ranks):
    network, serial = Network(), Network()
    trainer = network.train_by(make_trainer)
    for report in trainer.epochs(X, Y, 12 // n_ranks, 3, seed=1):  # a batch of 12 rows, then one of 1
        assert np.isfinite(report.loss)
    alone = serial.train_by(make_train_function_serial)
    for epoch in range(3):
        order = np.random.default_rng((1, epoch)).permutation(13)
        for rows in (order[:12], order[12:]):
            alone(X, Y, batch=rows)
    check_equal(network.values(), serial.values())


def test_rank_mean_is_refused_in_wrong_calls(n_ranks):
    network = Network()
    train = network.train_by(make_train_function)
    with pytest.raises(
        ValueError, match="num_slices: expected 1, got 2: train_gradient has means over all ranks' rows"
    ):
        train(X, Y, num_slices=2)
    train(X, Y)  # the ranks remain usable
    with pytest.raises(ValueError, match="weight: expected None for a loss with means over ranks"):
        network.train_by(make_train_function, weight=T.sqr(network.y).sum())
    trainer = Network().train_by(make_trainer, rule=exchange_rules.LocalSGD(2))
    with pytest.raises(RuntimeError, match="sync=True: ranks call this function at their own pace"):
        list(trainer.epochs(X, Y, 2, 1))
    train(X, Y)


def test_rank_mean_in_a_scan_is_refused(n_ranks):
    x = T.dmatrix("x")
    options = {} if NAME == "theano" else {"return_updates": False}
    steps = package.scan(lambda row: rank_mean(row, row.shape[0]), sequences=[x], **options)
    steps = steps[0] if NAME == "theano" else steps
    f = synk.function([x], [(steps, None)])
    with pytest.raises(NotImplementedError, match="sync=True: not within loops"):
        f(X)


def test_rank_mean_in_one_process_is_the_mean(n_ranks):
    x = T.dmatrix("x")
    f = package.function([x], rank_mean(x.mean(axis=0), x.shape[0]))
    np.testing.assert_allclose(f(X), X.mean(axis=0))
    g = synk.function([x], [(rank_mean(x.mean(axis=0), x.shape[0]), "gather")])
    np.testing.assert_allclose(np.reshape(g(X), (-1, 3)), np.tile(X.mean(axis=0), (n_ranks, 1)))


def test_rank_mean_error_of_one_rank_ends_the_call(n_ranks):
    if XLA:
        pytest.skip("lengths that follow from values of floats")
    x = T.dmatrix("x")
    flat = x.flatten().reshape((T.cast(x[-1, 0], "int64"),))
    f = synk.function([x], [(rank_mean(flat.mean().reshape((1,)), x.shape[0]), None)])
    rows = np.full((2 * n_ranks, 3), 6.0)
    if n_ranks > 1:
        np.testing.assert_allclose(f(rows)[0], [6.0])
    rows[-1] = 5  # on the last rank only
    for _ in range(2):
        with pytest.raises((ValueError, synk.WorkerError, RuntimeError)):
            f(rows)
    train = Network().train_by(make_train_function)
    assert np.isfinite(train(X, Y))


def test_rank_mean_forbidden_twice_stays_forbidden():
    values = np.ones(2)
    with RankMeanContext.forbid():
        with RankMeanContext.forbid():
            pass
        with pytest.raises(RuntimeError, match="at their own pace"):
            average_over_ranks(values, 1)
    np.testing.assert_array_equal(average_over_ranks(values, 1), values)
