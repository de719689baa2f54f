"""Trainings that can resume from a checkpoint, the errors of others, and the names in a checkpoint."""

import functools
import os

import numpy as np
import pytest
from library import XLA, shared, tensor
from trainer_model import X, Y

from synkhronos import exchange_rules
from synkhronos.training import CheckpointError, CheckpointFolder, make_trainer, schedules
from synkhronos.training.updates import adagrad, adam, apply_momentum, momentum, nesterov_momentum, rmsprop, sgd

pytestmark = pytest.mark.skipif(XLA, reason="the trainer's own bookkeeping, and XLA takes seconds to compile")


def build_trainer(update_rule=momentum, rule=None, rate=0.01, extra=(), op="mean", counts=(), names="wb", **kwargs):
    """Return a trainer of a small model, with averages and counts of these names."""
    x, y = tensor.dmatrix("x"), tensor.dvector("y")
    w, b = (shared(np.zeros(n), name) for n, name in zip((4, 1), names, strict=True))
    loss = ((tensor.dot(x, w) + b[0] - y) ** 2).mean()
    updates = [(mean := shared(np.zeros(()), name), 0.5 * mean + 0.5 * loss, op) for name in extra]
    updates += [(count := shared(np.zeros((), "int64"), name), count + 1) for name in counts]
    return make_trainer(
        loss, [w, b], x, y, update_rule, rule or exchange_rules.BSP(), rate, extra_updates=updates, **kwargs
    )


def train_with_checkpoint(folder, trainer):
    list(trainer.epochs(X, Y, 5, 1, checkpoints=CheckpointFolder(folder)))
    return CheckpointFolder(folder).list_paths()[-1]


def resume_training(path, trainer):
    return list(trainer.epochs(X, Y, 5, 2, resume=path))


def scaled_sgd(loss, params, learning_rate, weight, start=2.0):
    """Update rule with an option whose name is also that of an exchange rule's option."""
    return sgd(loss, params, start * learning_rate, weight=weight)


SLOW, FAST = functools.partial(momentum, momentum=0.5), functools.partial(momentum, momentum=0.25)
OTHER_TRAININGS = {
    "update rule": ({"update_rule": rmsprop}, {}, "is of the update rule rmsprop, but this run has momentum"),
    "update rule of the same variables": (
        {"update_rule": nesterov_momentum},
        {},
        "the update rule nesterov_momentum, but this run has momentum",
    ),
    "update rule of more variables": (
        {},
        {"update_rule": adam},
        "is of the update rule momentum, but this run has adam",
    ),
    "update rule without variables": (
        {"update_rule": sgd},
        {"update_rule": adagrad},
        "the update rule sgd, but this run has adagrad",
    ),
    "option of the update rule": (
        {},
        {"momentum": 0.5},
        r"is of momentum with momentum=0\.9, but this run has momentum=0\.5",
    ),
    "option of a partial update rule": (
        {"update_rule": SLOW},
        {"update_rule": FAST},
        r"with momentum=0\.5, but this run has momentum=0\.25",
    ),
    "option of the user's update rule": (
        {"update_rule": scaled_sgd},
        {"update_rule": scaled_sgd, "start": 3},
        r"of scaled_sgd with start=2\.0, but this run has start=3",
    ),
    "variables of one name": (
        {"update_rule": lambda *args, **kwargs: apply_momentum(sgd(*args, **kwargs))},
        {"update_rule": lambda *args, **kwargs: sgd(*args, **kwargs)},
        r"its variables of the update rule are .*w_velocity \[4\] float64.*, and those of this run are none",
    ),
    "exchange rule": (
        {"rule": exchange_rules.LocalSGD()},
        {"rule": exchange_rules.EASGD()},
        "has the state of the rule LocalSGD, but this run has EASGD",
    ),
    "option of the exchange rule": (
        {"rule": exchange_rules.LocalSGD(state="keep")},
        {"rule": exchange_rules.LocalSGD(state="reset")},
        "is of LocalSGD with state='keep', but this run has state='reset'",
    ),
    "option of the exchange rule, not given": (
        {"rule": exchange_rules.EASGD(asynchronous=False)},
        {"rule": exchange_rules.EASGD(asynchronous=False, alpha=0.5)},
        r"is of EASGD with alpha=None, but this run has alpha=0\.5",
    ),
    "gradients and parameters": (
        {},
        {"rule": exchange_rules.BSP("params")},
        "with average='gradient', but this run has average='params'",
    ),
    "exclude": (
        {"rule": exchange_rules.LocalSGD()},
        {"rule": exchange_rules.LocalSGD(exclude=lambda p: p.name == "b")},
        r"its exchanged parameters are w \[4\] float64, b \[1\] float64, and those of this run are w \[4\] float64$",
    ),
    "params": ({}, {"names": "wc"}, r"exchanged parameters are .* b \[1\] float64, and .* c \[1\] float64"),
    "extra update": (
        {"extra": ["ema"]},
        {"extra": ["best"]},
        r"its averaged extra updates are ema \[\] float64, and those of this run are best \[\] float64",
    ),
    "order of extra updates": ({"extra": ["a", "b"]}, {"extra": ["b", "a"]}, r"extra updates are a \[\] float64, b"),
    "no extra update": ({"extra": ["ema"]}, {}, r"extra updates are ema \[\] float64, and those of this run are none"),
    "count": (
        {"counts": ["steps"]},
        {"counts": ["rows"]},
        "its other updated variables are steps 0-d int64, and those of this run are rows 0-d int64",
    ),
    "extra update that is not averaged": (
        {"extra": ["ema"]},
        {"extra": ["ema"], "op": None},
        r"its averaged extra updates are ema \[\] float64, and those of this run are none",
    ),
}


@pytest.mark.parametrize("name", OTHER_TRAININGS)
def test_resume_refuses_a_checkpoint_of_another_training(fork, tmp_path, name):
    fork(1)
    before, after, message = OTHER_TRAININGS[name]
    path = train_with_checkpoint(tmp_path, build_trainer(**before))
    new_trainer = build_trainer(**after)
    with pytest.raises(CheckpointError, match=message):
        resume_training(path, new_trainer)
    assert new_trainer.params[0].get_value().tolist() == [0.0] * 4


def return_three(step):
    return 3


@pytest.mark.parametrize("rate", [0.02, schedules.cosine(0.02, epochs=3)], ids=["rate", "schedule"])
def test_resume_uses_another_learning_rate(fork, tmp_path, rate):
    fork(1)
    path = train_with_checkpoint(tmp_path, build_trainer(rate=0.01))
    (report,) = resume_training(path, build_trainer(rate=rate))
    assert report.rows_seen == 120
    # The rate of the last of the 12 steps of the second epoch.
    assert report.learning_rate == pytest.approx(rate(1 + 11 / 12) if callable(rate) else rate, rel=1e-6)


@pytest.mark.parametrize(
    ("period", "expected_steps"), [(5, [17, 22]), (return_three, [15, 18, 21, 24])], ids=["number", "function"]
)
def test_resume_uses_another_period(fork, monkeypatch, tmp_path, period, expected_steps):
    fork(1)
    path = train_with_checkpoint(tmp_path, build_trainer(rule=exchange_rules.LocalSGD(3)))
    trainer = build_trainer(rule=exchange_rules.LocalSGD(period))
    exchange, steps = exchange_rules.LocalSGD.exchange, []

    def exchange_and_record(rule, context, state):
        steps.append(state.step)
        return exchange(rule, context, state)

    monkeypatch.setattr(exchange_rules.LocalSGD, "exchange", exchange_and_record)
    (report,) = resume_training(path, trainer)
    assert report.rows_seen == 120 and steps == expected_steps


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"rule": exchange_rules.DiLoCo(3, lr=0.7)}, {"rule": exchange_rules.DiLoCo(3, lr=0.5)}),
        ({"momentum": 0.5}, {"momentum": shared(np.float64(0.25), "m")}),
    ],
    ids=["outer rate", "a variable for a number"],
)
def test_resume_uses_another_outer_rate_and_a_variable(fork, tmp_path, before, after):
    fork(1)
    path = train_with_checkpoint(tmp_path, build_trainer(**before))
    params = []
    for options in (before, after):
        trainer = build_trainer(**options)
        (report,) = resume_training(path, trainer)
        assert report.rows_seen == 120
        params.append(trainer.params[0].get_value())
    assert not np.array_equal(*params)


def test_checkpoint_has_the_names_of_its_format(fork, tmp_path):
    """A name that is changed in the source alone would keep a training of an earlier version from resuming."""
    fork(1)
    rule = exchange_rules.DiLoCo(3)
    stored = CheckpointFolder(tmp_path).load(
        train_with_checkpoint(tmp_path, build_trainer(rule=rule, extra=["mean"], counts=["count"]))
    )
    state = [
        "excluded",
        "optimizer",
        "others.0",
        "own.anchor",
        "own.batches",
        "own.velocity",
        "params",
        "step",
        "steps_since_exchange",
    ]
    assert sorted(stored.arrays) == [f"0.{name}" for name in state]
    assert sorted(stored.meta) == [
        "alike", "asynchronous", "batch_size", "count", "epoch", "generators", "kind", "metrics", "outcomes", "parts",
        "ranks", "row", "rule", "rule_options", "schedule", "seed", "seen", "start", "started", "steps_taken", "stop",
        "streams", "update_rule", "update_rule_options", "variables",
    ]  # fmt: skip
    assert stored.meta["rule_options"] == {"lr": 0.7, "momentum": 0.9, "nesterov": True, "period": 3}
    assert stored.meta["variables"] == {
        "params": [["w", [4], "float64"], ["b", [1], "float64"]],
        "averages": [["mean", [], "float64"]],
        "optimizer": [["w_velocity", [4], "float64"], ["b_velocity", [1], "float64"]],
        "excluded": [],
        "others": [["count", "0-d", "int64"]],
    }


def test_resume_refuses_checkpoints_of_the_user(tmp_path, two_ranks_per_test):
    trainer = build_trainer()
    path = CheckpointFolder(tmp_path).save(1, {"w": np.ones(3)}, {"epoch": 1})
    with pytest.raises(CheckpointError, match="rows-000000000001 is a checkpoint of a user, not of a trainer"):
        resume_training(path, trainer)
    with pytest.raises(CheckpointError, match="expected a checkpoint"):
        resume_training(tmp_path, trainer)


def test_checkpoint_folder_refuses_a_second_training(fork, tmp_path):
    fork(1)
    checkpoints = CheckpointFolder(tmp_path)
    reports = build_trainer().epochs(X, Y, 5, 3, checkpoints=checkpoints)
    next(reports)
    with pytest.raises(CheckpointError, match=f"training run of process {os.getpid()} on host "):
        next(build_trainer().epochs(X, Y, 5, 3, checkpoints=CheckpointFolder(tmp_path), resume="latest"))
    assert len(resume_training(checkpoints.list_paths()[0], build_trainer())) == 1  # reading needs no lock
    reports.close()
    # Two epochs are left: the refused training has written no checkpoint.
    assert len(list(build_trainer().epochs(X, Y, 5, 3, checkpoints=CheckpointFolder(tmp_path), resume="latest"))) == 2
