"""The trainer learns under each rule, and uses each row once."""

import numpy as np
import pytest
from library import XLA, shared, tensor
from trainer_model import ALL, ROWS, Model, X, Y

from synkhronos.training import make_train_function_serial, schedules
from synkhronos.training.updates import sgd


@pytest.mark.parametrize("name", ALL)
def test_trainer_learns_with_every_rule(n_ranks, name):
    model = Model(name, rate=0.01 if name in ("Downpour", "ASGD") else 0.05)
    # An epoch is a few milliseconds here, and a rank that wakes late takes none of its rows.  Under gossip it may have
    # received most of the weight by then.
    epochs = 48 if name == "GoSGD" else 12
    reports = list(model.epochs(epochs=epochs, valid=(X, Y)))
    assert [report.epoch for report in reports] == list(range(1, epochs + 1))
    assert reports[-1].validation["mse"] < 0.05 * reports[0].loss
    assert reports[-1].batch_description == f"{n_ranks} x 5 = {5 * n_ranks}"
    np.testing.assert_allclose(
        reports[-1].validation["mse"], np.mean((X @ model.w.get_value() + model.b.get_value() - Y) ** 2)
    )
    for report in reports:
        assert str(report).startswith(f"epoch {report.epoch:g}: loss ")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("rows", "batch", "every"), [(53, 7, 2), (31, 5, 1)])
@pytest.mark.slow
def test_trainer_uses_every_row_once_an_epoch(n_ranks, name, rows, batch, every):
    if XLA and rows != 53:
        pytest.skip("compiled for each number of rows")
    model = Model(name, rows)
    reports = list(model.epochs(batch, 2, rows, every=every))
    # BSP in one command excludes the counts of single ranks from the average.
    assert model.count_uses().tolist() == [2.0] * rows
    assert sum(report.rows_seen == rows for report in reports) == 1
    assert reports[-1].rows_seen == 2 * rows


@pytest.mark.parametrize("name", [name for name in ("BSP", "LocalSGD", "EASGD", "Downpour", "GoSGD") if name in ALL])
def test_data_that_grow_between_epochs_do_not_block(n_ranks, name):
    if XLA:
        pytest.skip("compiled for each number of rows")
    model = Model(name, 60)
    for epochs, rows in ((1, 31), (2, 53)):  # the first batch of 1 row, then of 5, leaves some ranks without one
        list(model.epochs(6, epochs, rows))
    assert model.count_uses().tolist() == [2.0] * 31 + [1.0] * 22 + [0.0] * 7


@pytest.mark.parametrize("name", ["BSP"] if XLA else ["BSP", "BSP of parameters", "PostLocal", "SlowMo"])
def test_trainer_learning_rate_of_0_changes_nothing(n_ranks, name):
    model = Model(name, rate=schedules.cosine(0.05, epochs=1))
    first, second = (model.values() for _ in model.epochs(epochs=2))
    np.testing.assert_allclose(second, first, rtol=1e-12)


def test_trainer_bsp_equals_one_process(n_ranks):
    model = Model("BSP")
    losses = [report.loss for report in model.epochs(5, 2)]
    x, y, w, b = tensor.dmatrix("x"), tensor.dvector("y"), shared(np.zeros(4), "w"), shared(np.zeros(1), "b")
    train = make_train_function_serial(
        ((tensor.dot(x, w) + b[0] - y) ** 2).mean(), [w, b], x, y, sgd, learning_rate=0.05
    )
    expected = []
    for epoch in range(2):
        order = np.random.default_rng((0, epoch)).permutation(ROWS)
        batches = [order[start : start + 5 * n_ranks] for start in range(0, ROWS, 5 * n_ranks)]
        expected.append(sum(len(batch) * float(train(X, Y, batch=batch)) for batch in batches) / ROWS)
    np.testing.assert_allclose(losses, expected, rtol=1e-10)
    np.testing.assert_allclose(model.values(), np.concatenate([w.get_value(), b.get_value()]), rtol=1e-10)


def test_trainer_averaging_after_each_step_equals_bsp(n_ranks):
    if XLA:
        pytest.skip("compiled three times")
    results = []
    for name in ("BSP", "BSP of parameters"):
        model = Model(name)
        losses = [report.loss for report in model.epochs(5, 2)]
        results.append((losses, model.values()))
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-9)
