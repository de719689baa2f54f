"""`restore_best` restores the best checkpoint."""

import numpy as np
import pytest
from library import XLA, shared, tensor
from trainer_model import Model, X, Y

import synkhronos as synk
from synkhronos import exchange_rules
from synkhronos.training import CheckpointError, CheckpointFolder, Recorder, make_trainer, schedules
from synkhronos.training.monitoring.recorder import read_records
from synkhronos.training.updates import momentum, sgd

pytestmark = pytest.mark.skipif(XLA, reason="the trainer's own bookkeeping, and XLA takes seconds to compile")


def raise_rate_until_divergence(epoch):
    return 0.05 if epoch < 3 else 0.9


def compute_mse(model):
    return np.mean((X @ model.w.get_value() + model.b.get_value() - Y) ** 2)


@pytest.mark.parametrize("name", ["BSP", "LocalSGD", "EASGD"])
def test_restore_best_restores_the_best_epoch(fork, tmp_path, name):
    fork(2)
    model = Model(name, rate=raise_rate_until_divergence)
    checkpoints = CheckpointFolder(tmp_path, keep=2, every=2, keep_best="mse")
    reports = list(model.epochs(5, 50, valid=(X, Y), patience=3, checkpoints=checkpoints))
    values = [report.validation["mse"] for report in reports]
    best = int(np.argmin(values))
    assert len(values) == best + 4 and best >= 1
    assert checkpoints.find_best() in checkpoints.list_paths() and len(checkpoints.list_paths()) <= 3
    assert checkpoints.load(checkpoints.find_best()).metrics == {"loss": reports[best].loss, "mse": values[best]}
    assert compute_mse(model) > 1.05 * values[best]
    assert model.trainer.restore_best() == checkpoints.find_best()
    np.testing.assert_allclose(compute_mse(model), values[best], rtol=1e-12)
    params = np.asarray(synk.gather(model.w, nd_up=1))
    np.testing.assert_allclose(params, [model.w.get_value()] * 2, rtol=1e-12)
    # In a new program, after the training, the best checkpoint still exists.
    synk.close()
    fork(2)
    again = Model(name, rate=raise_rate_until_divergence)
    assert list(again.epochs(5, 50, valid=(X, Y), patience=3, checkpoints=checkpoints, resume="latest")) == []
    again.trainer.restore_best()
    np.testing.assert_allclose(compute_mse(again), values[best], rtol=1e-12)
    # Resuming from the best checkpoint is a new training, which ignores later checkpoints.
    resumed_reports = again.epochs(
        5, 50, valid=(X, Y), patience=3, checkpoints=checkpoints, resume=checkpoints.find_best()
    )
    assert next(resumed_reports).epoch == best + 2


def test_restore_best_works_within_a_training(fork, tmp_path):
    fork(1)
    model = Model("BSP", rate=raise_rate_until_divergence)
    checkpoints = CheckpointFolder(tmp_path, keep_best="mse")
    epochs = []
    for report in model.epochs(5, 7, valid=(X, Y), checkpoints=checkpoints, recorder=Recorder(tmp_path / "records")):
        epochs.append(report.epoch)
        if len(epochs) == 5:
            best = model.trainer.restore_best()
            assert best.name == "rows-000000000180"
    assert epochs == [1, 2, 3, 4, 5, 4, 5, 6, 7]
    assert checkpoints.load().meta["seen"] == 420
    records = read_records(tmp_path / "records")
    assert [line["epoch"] for line in records["reports"]] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["seen"] for line in records["rank-0"]] == list(range(60, 421, 60))


def test_restore_best_accepts_mode_max(fork, tmp_path):
    fork(1)
    x, w = tensor.dmatrix("x"), shared(np.zeros(4), "w")
    loss = ((tensor.dot(x, w) - 1) ** 2).mean()
    high = 0 * loss - abs(w[0] - 0.05)
    trainer = make_trainer(loss, [w], x, [], sgd, exchange_rules.BSP(), 0.05, validate={"mse": loss, "high": high})
    checkpoints = CheckpointFolder(tmp_path, keep=1, keep_best=("high", "max"))
    reports = list(trainer.epochs(X, [], 5, 20, valid=(X, []), patience=2, checkpoints=checkpoints))
    values = [report.validation["high"] for report in reports]
    assert len(values) == np.argmax(values) + 3 < 20  # by the loss, training would have continued
    assert checkpoints.load(checkpoints.find_best()).metrics["high"] == max(values)


@pytest.mark.parametrize(("mode", "n_falls"), [("max", 0), ("min", 5)])
def test_plateau_follows_the_mode_of_the_first_metric(fork, tmp_path, mode, n_falls):
    fork(1)
    x, w = tensor.dmatrix("x"), shared(np.zeros(4), "w")
    loss = (tensor.dot(x, w) ** 2).mean() - w.sum()
    rate = schedules.plateau(0.05, factor=0.5, patience=1)
    trainer = make_trainer(loss, [w], x, [], sgd, None, rate, validate={"high": 0 * loss + w[0]})
    checkpoints = CheckpointFolder(tmp_path, keep_best=("high", mode))
    values = [r.validation["high"] for r in trainer.epochs(X, [], 30, 6, valid=(X, []), checkpoints=checkpoints)]
    assert values == sorted(values)
    assert rate(0) == 0.05 * 0.5**n_falls


def test_restore_best_accepts_the_loss(fork, tmp_path):
    fork(1)
    checkpoints = CheckpointFolder(tmp_path, keep_best="loss")
    model = Model("BSP", rate=raise_rate_until_divergence, update=momentum)
    reports = list(model.epochs(5, 20, patience=2, checkpoints=checkpoints))
    assert len(reports) < 20
    assert checkpoints.load(checkpoints.find_best()).metrics == {"loss": min(report.loss for report in reports)}


def test_restore_best_refuses_missing_settings(fork, tmp_path):
    fork(1)
    model = Model("BSP")
    with pytest.raises(ValueError, match="checkpoints: keep_best expects one of loss, got 'mse'"):
        model.epochs(5, 1, checkpoints=CheckpointFolder(tmp_path, keep_best="mse"))
    message = r"restore_best\(\): expected a call of epochs\(\.\.\., checkpoints=CheckpointFolder\(folder, keep_best=\.\.\.\)\)"
    with pytest.raises(RuntimeError, match=message):
        model.trainer.restore_best()
    list(model.epochs(5, 1, checkpoints=CheckpointFolder(tmp_path)))
    with pytest.raises(RuntimeError, match=message):
        model.trainer.restore_best()
    checkpoints = CheckpointFolder(tmp_path / "other", keep_best="loss")
    list(model.epochs(5, 2, checkpoints=checkpoints))
    model.trainer.restore_best()
    for path in checkpoints.list_paths():
        (path / "meta.json").unlink()
    with pytest.raises(CheckpointError, match="other: expected a checkpoint with loss, found none"):
        model.trainer.restore_best()
    synk.close()
    fork(1)
    with pytest.raises(RuntimeError, match=message):
        model.trainer.restore_best()
