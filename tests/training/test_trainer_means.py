"""Means under every exchange rule: reported losses, running averages, warnings."""

import warnings

import numpy as np
import pytest
from library import NAME, XLA, shared, tensor
from masked_model import MaskedModel, N, take_rows
from trainer_model import ALL

import synkhronos as synk
from synkhronos import exchange_rules
from synkhronos.graph_libraries import get_library
from synkhronos.graph_libraries.dependence_analysis import DependenceAnalysis
from synkhronos.training import CheckpointFolder, make_train_function_serial, make_trainer
from synkhronos.training.updates import nesterov_momentum, sgd

T = tensor

# -- losses with weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_trainer_reports_the_weighted_mean_loss(tmp_path, name, two_ranks_per_test):
    make, update = ALL[name]
    kwargs = {"momentum": 0.5} if update is nesterov_momentum else {}
    model = MaskedModel()
    metrics = {"masked": (model.loss, "mean", model.weight), "items": (model.weight, "sum")}
    trainer = make_trainer(
        model.loss, [model.w], model.x, [model.y, model.mask], update, make(), 1e-9, weight=model.weight, validate=metrics,
        **kwargs,
    )  # fmt: skip
    rows = np.tile(np.arange(N), 2)[:-1]
    x, y, m = take_rows(rows)
    errors = (x - y) ** 2
    expected = (m * errors).sum() / m.sum()
    for report in trainer.epochs(x, [y, m], batch_size=2, epochs=2, valid=(x, [y, m])):
        np.testing.assert_allclose(report.loss, expected, rtol=1e-6)
        np.testing.assert_allclose(report.validation["masked"], expected, rtol=1e-6)
        assert report.validation["items"] == m.sum()


@pytest.mark.parametrize("precision", [None, "bfloat16"])
@pytest.mark.parametrize("average", ["gradient", "params"])
def test_trainer_bsp_with_weight_equals_one_process(fork, average, precision):
    n = 2 if XLA else 3
    fork(n)
    model, alone = MaskedModel(), MaskedModel(make_train_function_serial)
    trainer = make_trainer(
        model.loss, [model.w], model.x, [model.y, model.mask], sgd, exchange_rules.BSP(average, precision=precision), 0.1,
        weight=model.weight,
    )  # fmt: skip
    rows = np.arange(3, N)  # in the last step some ranks have none
    x, y, m = take_rows(rows)
    for epoch, _ in enumerate(trainer.epochs(x, [y, m], batch_size=2, epochs=2)):
        order = np.random.default_rng((0, epoch)).permutation(len(rows))
        for first in range(0, len(rows), 2 * n):
            alone.train(x, [y, m], batch=order[first : first + 2 * n])
        expected = [alone.w.get_value()] * n
        np.testing.assert_allclose(synk.gather(model.w), expected, rtol=1e-2 if precision else 1e-9)


def test_trainer_rows_of_zero_weight_change_nothing(two_ranks_per_test):
    model = MaskedModel()
    trainer = make_trainer(
        model.loss, [model.w], model.x, [model.y, model.mask], sgd, exchange_rules.LocalSGD(1), 0.1, weight=model.weight
    )
    x, y, m = take_rows([1, 4, 5, 11, 1, 4, 5, 0])
    (report,) = trainer.epochs(x, [y, m], batch_size=1, epochs=1)
    np.testing.assert_allclose(report.loss, ((m * (x - y) ** 2).sum() / m.sum()), rtol=1e-9)
    assert np.isfinite(model.w.get_value()).all()


def test_trainer_weight_counts_items():
    model = MaskedModel()
    cases = [
        (TypeError, "weight: expected a symbolic scalar", 3.0),
        (TypeError, "weight: expected a symbolic scalar", model.mask.sum(axis=1)),
        (ValueError, "depends on the parameter 'w'", (model.mask * model.w).sum()),
    ]
    for error, message, weight in cases:
        for make in (make_train_function_serial, make_trainer):
            with pytest.raises(error, match=message):
                make(model.loss, [model.w], model.x, [model.y, model.mask], sgd, weight=weight, learning_rate=0.1)


# -- denominators ------------------------------------------------------------------------------------------------


def build_losses():
    x, m, y = T.dmatrix("x"), T.dmatrix("m"), T.ivector("y")
    w = shared(np.ones((3, 3)), "w")
    e = (T.dot(x, w) - m) ** 2
    n, exps = m.sum(), T.exp(T.dot(x, w))
    chosen = T.neq(m, 0)
    softmax = exps / exps.sum(axis=1, keepdims=True)
    depend = [
        (m * e).sum() / n, (m * e).sum() / T.maximum(n, 1), (m * e).sum() / (n + 1e-3), (m * e).sum() * (1 / n),
        ((m * e).sum(keepdims=True) / m.sum(keepdims=True)).sum(), (m / n * e).sum(), e[chosen.nonzero()].mean(),
        e[chosen].mean(), 1 - 2 * (e * m).sum() / (e.sum() + n), (e**2).sum() / (m**2).sum(),
        (e * m).sum() / T.sqrt((m**2).sum()), (m * e).sum(axis=1).sum() / chosen.sum(), (m * e).mean() / m.mean(),
        (m * e).sum() / T.cast(chosen.sum(), "float64") + (w**2).sum(), -T.log((m * e).sum() / n),
        (m * e).sum() * n**-1, (m * e).mean() * T.pow(m.mean(), -1.0), T.dot(m.flatten(), e.flatten()) / n, (m * e).sum() / T.switch(T.eq(n, 0), 1, n),
    ]  # fmt: skip
    do_not = [
        e.mean(), -T.log(softmax[T.arange(y.shape[0]), y]).mean(), ((m * e).sum(axis=1) / m.sum(axis=1)).mean(),
        ((x - x.mean(axis=0)) / T.sqrt(x.var(axis=0) + 1e-5)).mean(), (m * e).sum() / x.shape[0],
        (m * e).sum() / T.cast(x.shape[0] * x.shape[1], "float64"), e.sum() / T.ones_like(e).sum(),
        ((x * m).sum(axis=1) / T.sqrt((x**2).sum(axis=1) * (m**2).sum(axis=1))).mean(), e.mean() / (w**2).sum(),
        ((x - x.mean()) / x.std() * e).mean(), (x / abs(x).max() * e).mean(), e.sum() / e.size,
        e[T.arange(y.shape[0]), y].mean(), (exps / exps.sum() * e).mean(), (e / x[0, 0]).mean(),
        (x / T.sqrt((x**2).sum(axis=1, keepdims=True))).mean(),
    ]  # fmt: skip
    return [x, m, y], depend, do_not


def test_trainer_finds_value_dependent_denominators():
    inputs, depend, do_not = build_losses()
    analysis = DependenceAnalysis(get_library(inputs[0]), [*depend, *do_not], inputs)
    assert [i for i, expression in enumerate(depend) if not analysis.find_denominators(expression)] == []
    assert [i for i, expression in enumerate(do_not) if analysis.find_denominators(expression)] == []


def test_trainer_warns_of_masked_means_without_weight(fork):
    fork(1)
    model = MaskedModel()
    errors = (model.x * model.w) ** 2
    if NAME == "pytensor":
        random = T.cast(T.random.RandomStream(1).uniform(size=errors.shape) < 0.5, "float64")
    else:
        from theano.sandbox.rng_mrg import MRG_RandomStreams

        random = T.cast(MRG_RandomStreams(1).uniform(size=errors.shape) < 0.5, "float64")
    inputs = [model.w], model.x, [model.y, model.mask], sgd
    with pytest.warns(UserWarning, match="loss: the denominator"):
        make_trainer((random * errors).sum() / random.sum(), *inputs)
    with pytest.warns(UserWarning, match="validate: valid_0: the denominator.*mask"):
        make_trainer(errors.mean(), *inputs, validate=model.loss)
    average = shared(np.zeros(()), "average")
    with pytest.warns(UserWarning, match="extra_updates: average: the denominator.*mask"):
        make_trainer(errors.mean(), *inputs, extra_updates={average: 0.9 * average + 0.1 * model.loss})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        metrics = [(model.loss, "mean", model.weight), (model.loss, "max"), errors.mean()]
        make_trainer(model.loss, *inputs, weight=model.weight, validate=metrics)


# -- running averages ----------------------------------------------------------------------------------------------

ROWS = 41
ROWS_X = np.random.default_rng(8).normal(2, 1, size=(ROWS, 3))


class Averaging:
    """A regression whose steps update an average of the rows, and one of integers and parameters."""

    def __init__(self, rule, update=sgd, rate=0.01, **kwargs):
        self.x, self.w = T.dmatrix("x"), shared(np.zeros(3), "w")
        self.average, self.steps = shared(np.zeros(3), "average"), shared(np.int64(0), "steps")
        self.own = shared(np.zeros(3), "own")
        mean = self.x.mean(axis=0)
        extra = [
            (self.average, 0.9 * self.average + 0.1 * mean), (self.steps, self.steps + 1),
            (self.own, 0.9 * self.own + 0.1 * mean, None),
        ]  # fmt: skip
        loss = ((T.dot(self.x, self.w) - 1) ** 2).mean()
        self.trainer = make_trainer(loss, [self.w], self.x, [], update, rule, rate, extra_updates=extra, **kwargs)

    def epochs(self, **kwargs):
        return self.trainer.epochs(ROWS_X, [], batch_size=10, **kwargs)


def compute_averages(n_ranks, epochs):
    average, averages = np.zeros(3), []
    for epoch in range(epochs):
        order = np.random.default_rng((0, epoch)).permutation(ROWS)
        for first in range(0, ROWS, 10 * n_ranks):
            average = 0.9 * average + 0.1 * ROWS_X[order[first : first + 10 * n_ranks]].mean(axis=0)
        averages.append(average)
    return averages


#: Rules under which all ranks exchange after each step.
EACH_STEP = {
    "BSP": exchange_rules.BSP,
    "BSP of parameters": lambda: exchange_rules.BSP("params"),
    "LocalSGD": lambda: exchange_rules.LocalSGD(1),
    "LocalSGD in 16 bits": lambda: exchange_rules.LocalSGD(1, precision="bfloat16"),
    "PostLocal": lambda: exchange_rules.PostLocal(1, 3),
    "SlowMo": lambda: exchange_rules.SlowMo(1),
    "DiLoCo": lambda: exchange_rules.DiLoCo(1),
    "Downpour together": lambda: exchange_rules.Downpour(asynchronous=False),
}


@pytest.mark.parametrize("name", list(EACH_STEP)[: 3 if XLA else None])
def test_trainer_running_averages_equal_one_process(fork, name):
    n = 2 if XLA else 3
    fork(n)
    model = Averaging(EACH_STEP[name]())
    tolerance = 1e-2 if "16 bits" in name else 1e-9
    expected = compute_averages(n, 2)
    for _, average in zip(model.epochs(epochs=2), expected, strict=True):
        np.testing.assert_allclose(synk.gather(model.average), [average] * n, rtol=tolerance)
    assert np.ptp(synk.gather(model.own), axis=0).min() > 1e-3


@pytest.mark.parametrize("name", [name for name in ALL if name not in EACH_STEP])
def test_trainer_report_averages_running_averages(name, two_ranks_per_test):
    make, update = ALL[name]
    kwargs = {"momentum": 0.5} if update is nesterov_momentum else {}
    model = Averaging(make(), update, **kwargs)
    for _ in model.epochs(epochs=3, every=1):
        gathered = np.asarray(synk.gather(model.average))
        np.testing.assert_array_equal(gathered[0], gathered[1])
        assert np.isfinite(gathered).all()
    # The average approaches the rows' mean of about 2, and does not exceed it.
    assert (gathered > 0.1).all() and (gathered < 2.5).all()


def test_diloco_leaves_running_averages_within_range(two_ranks_per_test):
    model = Averaging(exchange_rules.DiLoCo(1, lr=1.0, momentum=0.99))
    for _ in model.epochs(epochs=3 if XLA else 8):
        pass
    assert (model.average.get_value() < ROWS_X.max(axis=0)).all()


def test_resume_restores_running_averages(tmp_path, two_ranks_per_test):
    whole, first, second = (Averaging(exchange_rules.LocalSGD(2)) for _ in range(3))
    for _ in whole.epochs(epochs=3):
        pass
    for _ in first.epochs(epochs=2, checkpoints=CheckpointFolder(tmp_path)):
        pass
    for _ in second.epochs(epochs=3, checkpoints=CheckpointFolder(tmp_path), resume="latest"):
        pass
    for name in ("average", "w"):
        np.testing.assert_array_equal(getattr(whole, name).get_value(), getattr(second, name).get_value())


def test_metrics_without_a_mean_need_an_op():
    model = MaskedModel()
    count, total = shared(np.int64(0), "count"), shared(np.zeros(()), "total")
    n_rows = shared(np.int64(0), "n_rows")

    def make(*extra):
        return make_train_function_serial(
            (model.x * model.w).mean(), [model.w], model.x, [], sgd, extra_updates=list(extra), learning_rate=0.1
        )

    with pytest.raises(TypeError, match="extra_updates: 'count' of .* has no mean.*None"):
        make((count, count + model.x.shape[0]))
    with pytest.raises(TypeError, match="extra_updates: 'count' of .* has no mean"):  # as each rank has its own average
        make((n_rows, n_rows + model.x.shape[0], None), (count, count + n_rows))
    with pytest.raises(TypeError, match="'count': op 'mean' needs a variable of floats"):
        make((count, count + 1, "mean"))
    with pytest.raises(ValueError, match="'total': expected the op 'mean' or None, got 'sum'"):
        make((total, total + model.x.sum(), "sum"))
    make((count, count + 1), (n_rows, n_rows + model.x.shape[0], None), (total, total + model.x.mean()))


# -- validation ------------------------------------------------------------------------------------------------


def test_trainer_refuses_wrong_metrics(fork):
    fork(1)
    x, w = T.dvector("x"), shared(np.zeros(()), "w")
    cases = [
        (ValueError, "validate: m: .*got 'gather'", {"m": (x.mean(), "gather")}),
        (ValueError, "validate: m: .*got None", {"m": (x.mean(), None)}),
        (ValueError, "validate: m: expected a scalar variable", {"m": x}),
        (ValueError, "an op 'max' has no weight", {"m": (x.max(), "max", x.sum())}),
        (ValueError, "validate: m: expected a scalar variable", {"m": (x.mean(), "mean", x)}),
        (TypeError, "validate: valid_1: expected a scalar variable", [x.mean(), 3.0]),
        (TypeError, "validate: m: expected a scalar variable", {"m": (x.mean(), "mean", x.sum(), 1)}),
    ]
    for error, message, validate in cases:
        with pytest.raises(error, match=message):
            make_trainer((x * w).mean(), [w], x, [], sgd, validate=validate)
    make_trainer((x * w).mean(), [w], x, [], sgd, validate=(x.max(), "max"))
    make_trainer((x * w).mean(), [w], x, [], sgd, validate=(x.max(), x.min()))
