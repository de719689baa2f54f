"""Errors of training functions, trainers and `epochs` name the wrong argument."""

import numpy as np
import pytest
from library import DEVICE, HOSTS, fork_ranks, shared, tensor
from messages import raises

import synkhronos as synk
from synkhronos import exchange_rules
from synkhronos.loading import Loader
from synkhronos.training import (
    CheckpointFolder,
    Trainer,
    make_train_function,
    make_train_function_serial,
    make_trainer,
    schedules,
)
from synkhronos.training.updates import adam, adamw, chain, clip, lamb, momentum, muon, nesterov_momentum, sgd

pytestmark = [pytest.mark.skipif(DEVICE != "host" or bool(HOSTS), reason="one host")]

BSP, EASGD = exchange_rules.BSP, exchange_rules.EASGD
ROWS = np.ones((8, 3)), np.ones(8)

#: Wrong options of training functions and of trainers, and parts of the messages.
OPTIONS = {
    "unknown option": (sgd, {"clipnorm": 1.0}, "clip_norm"),
    "unknown option of a chain": (chain(clip(1.0), sgd), {"clipnorm": 1.0}, "clip_norm"),
    "unknown option of a function": (lambda loss, params, **_: sgd(loss, params, **_), {"emma": 0.9}, "emma"),
    "unknown option of adam": (adam, {"beta3": 0.9}, "beta3"),
    "clip_norm, 0": (sgd, {"clip_norm": 0}, "clip_norm"),
    "clip_norm, negative": (sgd, {"clip_norm": -1.0}, "clip_norm"),
    "clip_norm, NaN": (sgd, {"clip_norm": float("nan")}, "clip_norm"),
    "clip_norm, infinite": (sgd, {"clip_norm": float("inf")}, "clip_norm"),
    "clip_norm, a word": (sgd, {"clip_norm": "1"}, "clip_norm"),
    "clip_norm, a flag": (sgd, {"clip_norm": True}, "clip_norm"),
    "clip_norm, an array": (sgd, {"clip_norm": np.ones(2)}, "clip_norm"),
    "ema, 1.5": (sgd, {"ema": 1.5}, "ema"),
    "ema, 1": (sgd, {"ema": 1}, "ema"),
    "ema, negative": (sgd, {"ema": -0.5}, "ema"),
    "ema, NaN": (sgd, {"ema": float("nan")}, "ema"),
    "ema, a word": (sgd, {"ema": "0.9"}, "ema"),
    "ema, a flag": (sgd, {"ema": True}, "ema"),
    "num_slices, 0": (sgd, {"num_slices": 0}, "num_slices"),
    "num_slices, a fraction": (sgd, {"num_slices": 1.5}, "num_slices"),
    "num_slices, a flag": (sgd, {"num_slices": True}, "num_slices"),
    "num_slices, a word": (sgd, {"num_slices": "2"}, "num_slices"),
    "loss_scale, a word": (sgd, {"loss_scale": "static"}, "loss_scale"),
    "loss_scale, a number": (sgd, {"loss_scale": 1024}, "loss_scale"),
    "loss_scale, a flag": (sgd, {"loss_scale": True}, "loss_scale"),
    "shard_optimizer, a number": (adam, {"shard_optimizer": 1}, "shard_optimizer"),
    "shard_optimizer, a word": (adam, {"shard_optimizer": "yes"}, "shard_optimizer"),
    "shard_optimizer, lamb": (lamb, {"shard_optimizer": True}, "shard_optimizer"),
    "a rule, a name": ("adam", {}, "update_rule"),
    "a rule, another function": (lambda *_, **__: None, {}, "update_rule"),
    "a rule, a function without a weight": (lambda loss_or_grads, params, learning_rate: {}, {}, "update_rule"),
    "learning_rate, a word": (sgd, {"learning_rate": "fast"}, "learning_rate"),
    "momentum, NaN": (momentum, {"momentum": float("nan")}, "momentum"),
    "momentum, a word": (momentum, {"momentum": "0.9"}, "momentum"),
    "momentum, a flag": (momentum, {"momentum": True}, "momentum"),
    "weight_decay, a word": (adamw, {"weight_decay": "no"}, "weight_decay"),
    "weight, a number": (sgd, {"weight": 3}, "weight"),
    "matrices, a word": (muon, {"is_matrix": "yes"}, "is_matrix"),
    "extra_updates, a number": (sgd, {"extra_updates": 3}, "extra_updates"),
}

#: Wrong options of trainers only.
TRAINER = {
    "clip_norm under EASGD": ({"rule": EASGD(), "clip_norm": 1.0}, "clip_norm"),
    "ema under EASGD": ({"rule": EASGD(), "ema": 0.9}, "ema"),
    "num_slices under EASGD": ({"rule": EASGD(), "num_slices": 2}, "num_slices"),
    "loss_scale under BSP of parameters": ({"rule": BSP("params"), "loss_scale": "dynamic"}, "loss_scale"),
    "shard_optimizer under EASGD": ({"rule": EASGD(), "shard_optimizer": True}, "shard_optimizer"),
    "validate_ema without ema": ({"validate_ema": True}, "validate_ema"),
    "validate_ema, a number": ({"validate_ema": 1, "ema": 0.9}, "validate_ema"),
    "rule, a name": ({"rule": "BSP"}, "rule"),
    "rule, a class": ({"rule": BSP}, "rule"),
    "EAMSGD of another momentum": ({"rule": exchange_rules.EAMSGD()}, "update_rule"),
    "EAMSGD, momentum 0.5": (
        {"rule": exchange_rules.EAMSGD(), "update_rule": nesterov_momentum, "momentum": 0.5},
        "momentum",
    ),
    "exclude, all parameters": ({"rule": exchange_rules.LocalSGD(exclude=lambda p: True)}, "exclude"),
    "learning_rate, 0": ({"learning_rate": 0}, "learning_rate"),
    "learning_rate, a list": ({"learning_rate": [0.1]}, "learning_rate"),
    "learning_rate, NaN": ({"learning_rate": float("nan")}, "learning_rate"),
    "learning_rate, a schedule of words": ({"learning_rate": lambda epoch: "fast"}, "learning_rate"),
    "learning_rate, a schedule of NaN": ({"learning_rate": lambda epoch: float("nan")}, "learning_rate"),
    "validate, a number": ({"validate": 3}, "validate"),
}

#: Wrong arguments of `epochs`.
EPOCHS = {
    "batch_size, 0": ({"batch_size": 0}, "batch_size"),
    "batch_size, a fraction": ({"batch_size": 1.5}, "batch_size"),
    "batch_size, more than the rows": ({"batch_size": 5}, "batch_size"),
    "epochs, 0": ({"epochs": 0}, "epochs"),
    "epochs, a word": ({"epochs": "2"}, "epochs"),
    "epochs, a fraction": ({"epochs": 1.5}, "epochs"),
    "seed, negative": ({"seed": -1}, "seed"),
    "seed, a fraction": ({"seed": 1.5}, "seed"),
    "every, 0": ({"every": 0}, "every"),
    "patience, 0": ({"patience": 0}, "patience"),
    "patience, nothing to compare": ({"patience": 2}, "patience"),
    "valid, one array": ({"valid": ROWS[0]}, "valid"),
    "valid, no targets": ({"valid": ROWS[:1]}, "valid"),
    "valid, no metric": ({"valid": ROWS}, "valid"),
    "grace, 0": ({"grace": 0}, "grace"),
    "grace, a word": ({"grace": "long"}, "grace"),
    "recorder, a number": ({"recorder": 3}, "recorder"),
    "checkpoints, a path": ({"checkpoints": "folder"}, "checkpoints"),
    "resume, no checkpoint": ({"resume": "latest"}, "resume"),
    "resume, a number": ({"resume": 3}, "resume"),
    "progress, a word": ({"progress": "bar"}, "progress"),
    "on_death, a word": ({"on_death": "go on"}, "on_death"),
    "on_death, a flag": ({"on_death": True}, "on_death"),
    "max_deaths, 0": ({"max_deaths": 0}, "max_deaths"),
    "max_deaths, a fraction": ({"max_deaths": 1.5}, "max_deaths"),
    "x_data, none": ({"x_data": None}, "x_data"),
    "x_data, words": ({"x_data": np.array([["a"] * 3] * 8)}, "x_data"),
    "y_data, fewer rows": ({"y_data": np.ones(7)}, "y_data"),
}


@pytest.fixture(scope="module")
def model():
    """Fork two ranks; yield a loss, its parameters and inputs."""
    fork_ranks(2)
    x, y, w = tensor.dmatrix("x"), tensor.dvector("y"), shared(np.zeros(3), "w")
    yield ((tensor.dot(x, w) - y) ** 2).mean(), [w], x, y
    synk.close()


@pytest.mark.parametrize("name", OPTIONS)
def test_training_function_refuses_wrong_options(name, model):
    rule, options, fault = OPTIONS[name]
    with raises((TypeError, ValueError), fault):
        make_train_function(*model, rule, **{"learning_rate": 0.1, **options})


def test_training_function_refuses_wrong_losses_and_shapes_of_updates(model):
    loss, (w,), x, y = model
    with raises(TypeError, "loss"):
        make_train_function(tensor.cast(loss, "int64"), [w], x, y, sgd, learning_rate=0.1)
    average = shared(np.zeros(3), "average")
    with raises(TypeError, "average"):
        make_train_function(*model, sgd, learning_rate=0.1, extra_updates=[(average, x.mean())])


def test_serial_training_function_names_options_of_training_functions(model):
    with raises(TypeError, "num_slices"):
        make_train_function_serial(*model, sgd, learning_rate=0.1, num_slices=2)


@pytest.mark.parametrize("name", OPTIONS)
def test_trainer_refuses_wrong_options(name, model):
    rule, options, fault = OPTIONS[name]
    with raises((TypeError, ValueError), fault):
        make_trainer(*model, rule, **options)


@pytest.mark.parametrize("name", TRAINER)
def test_trainer_refuses_wrong_options_of_its_own(name, model):
    options, fault = TRAINER[name]
    with raises((TypeError, ValueError), fault):
        make_trainer(*model, **{"update_rule": momentum, **options})


@pytest.fixture(scope="module")
def trainer(model):
    """Return a trainer of the model."""
    return make_trainer(*model, sgd)


@pytest.mark.parametrize("name", EPOCHS)
def test_epochs_refuses_wrong_arguments(name, trainer):
    options, fault = EPOCHS[name]
    arguments = {"x_data": ROWS[0], "y_data": ROWS[1], "batch_size": 2, "epochs": 1, **options}
    with raises((TypeError, ValueError), fault):
        trainer.epochs(**arguments)


def end_in_infinity(epoch):
    return 0.1 if epoch < 0.5 else float("inf")


@pytest.mark.parametrize("rule", [BSP, exchange_rules.LocalSGD])
def test_schedule_that_returns_no_number_ends_training(model, rule):
    trainer = make_trainer(*model, sgd, rule(), end_in_infinity)
    with pytest.raises(
        (ValueError, synk.WorkerError), match=r"learning_rate: expected .* a finite number, got inf for epoch 0\.5"
    ):
        list(trainer.epochs(*ROWS, 2, 1))


#: Wrong schedules, and the argument that the error names.
SCHEDULES = {
    "steps, a factor of 0": (lambda: schedules.steps(0.1, {3: 0}), "factors"),
    "steps, a list": (lambda: schedules.steps(0.1, [3]), "factors"),
    "cosine, a word": (lambda: schedules.cosine(0.1, 10, "0"), "min_rate"),
    "cosine, no epoch": (lambda: schedules.cosine(0.1, 0), "epochs"),
    "warmup, a word": (lambda: schedules.warmup(0.1, 5, "0"), "start"),
    "scaled, half a rank": (lambda: schedules.scaled(0.1, 0.5), "n_ranks"),
    "plateau, no patience": (lambda: schedules.plateau(0.1, patience=0), "patience"),
    "plateau, a word": (lambda: schedules.plateau(0.1, min_rate="0"), "min_rate"),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_refuses_wrong_arguments(name):
    make, fault = SCHEDULES[name]
    with raises((TypeError, ValueError), fault):
        make()


@pytest.mark.parametrize("options", [{"keep": 0}, {"every": 0}, {"keep_best": 3}])
def test_checkpoint_refuses_wrong_options(options, tmp_path):
    with raises((TypeError, ValueError), *options):
        CheckpointFolder(tmp_path, **options)


def test_unknown_keywords_name_similar_ones():
    for call, similar in (
        (lambda: EASGD(perod=3), "perod: unknown argument of EASGD.*similar: period"),
        (lambda: Loader([np.ones(3)], process=2), "process: unknown argument of Loader.*similar: processes"),
        (lambda: Trainer.epochs(None, *ROWS, 2, 1, validate=3), "validate: unknown argument of .*similar: valid"),
        (lambda: CheckpointFolder("unused", best=1), "best: unknown argument of CheckpointFolder.*similar: keep_best"),
    ):
        with pytest.raises(TypeError, match=similar):
            call()
