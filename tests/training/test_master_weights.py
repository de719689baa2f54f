"""Float16 parameters with float32 copies accumulate small steps, and equal those of one process."""

import functools

import numpy as np
import pytest
from library import shared, tensor

import synkhronos as synk
from synkhronos.training import CheckpointFolder, make_train_function, make_train_function_serial, make_trainer
from synkhronos.training import updates as u

X = np.random.default_rng(0).normal(size=(13, 4)).astype("float16")
Y = np.random.default_rng(1).normal(size=(13, 3)).astype("float16")


def make(maker, rule, **options):
    """Return a training function of float16 parameters, and the parameters."""
    x, y = tensor.matrix("x", dtype="float16"), tensor.matrix("y", dtype="float16")
    w, b = shared(np.full((4, 3), 0.5, "float16"), "w"), shared(np.zeros(3, "float16"), "b")
    # Products in float32, as on tensor cores.
    product = tensor.dot(tensor.cast(x, "float32"), tensor.cast(w, "float32"))
    loss = ((product + b - y) ** 2).mean()
    return maker(loss, [w, b], x, y, rule, **options), [w, b]


def get_state(train):
    values = train.get_optimizer_state() if hasattr(train, "get_optimizer_state") else None
    values = values or [s.get_value() for s in train.optimizer_state]
    return dict(zip([s.name for s in train.optimizer_state], values, strict=True))


def test_small_steps_add_up(n_ranks):
    """A step is less than half the spacing of float16 numbers at 0.5."""
    values = {}
    for rule in (u.sgd, u.master_weights(u.sgd)):
        train, (w, _) = make(make_train_function, rule, learning_rate=1e-5)
        for _ in range(100):
            train(X, Y)
        values[rule] = w.get_value()
    plain, rule_of_masters = values.values()
    start = np.full((4, 3), 0.5, "float16")
    np.testing.assert_array_equal(plain, start)
    assert (rule_of_masters != start).any()


@pytest.mark.parametrize("shards", [False, True])
def test_assigned_values_are_where_the_next_step_starts(n_ranks, shards):
    train, (w, b) = make(make_train_function, u.master_weights(u.sgd), learning_rate=0.25, shard_optimizer=shards)
    train(X, Y)
    start = np.array(w.get_value())
    start[0] = [2, 3, 4]
    synk.broadcast(w, start)
    bias = b.get_value().astype("float32")
    train(X, Y)
    rows, targets = X.astype("float32"), Y.astype("float32")
    gradient = rows.T @ (rows @ start.astype("float32") + bias - targets) * np.float32(2 / targets.size)
    np.testing.assert_allclose(w.get_value()[0], start[0] - 0.25 * gradient[0], rtol=2e-3)


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize(
    "rule", [u.adam, functools.partial(u.adamw, mask=lambda p: p.name == "w")], ids=["adam", "adamw"]
)
def test_ranks_results_equal_one_process(n_ranks, rule, shards):
    options = {"rule": u.master_weights(rule), "learning_rate": 0.01, "clip_norm": 0.5, "loss_scale": "dynamic"}
    train, params = make(make_train_function, shard_optimizer=shards, num_slices=2, **options)
    serial, like = make(make_train_function_serial, **options)
    for batch in (None, 7, 2, None):
        train(X, Y, batch=batch)
        serial(X, Y, batch=batch)
    state, expected = get_state(train), get_state(serial)
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(state[name], value, rtol=2e-3, atol=1e-4, err_msg=name)
    for param, serial_param in zip(params, like, strict=True):
        assert param.get_value().dtype == np.float16
        np.testing.assert_array_equal(param.get_value(), state[f"{param.name}_master"].astype("float16"))
        np.testing.assert_allclose(param.get_value(), serial_param.get_value(), rtol=2e-3, atol=1e-3)


def test_checkpoints_hold_the_copies(n_ranks, tmp_path):
    def run(folder, epochs, resume=None):
        trainer, params = make(make_trainer, u.master_weights(u.momentum), learning_rate=1e-3)
        list(trainer.epochs(X, Y, 4, epochs, checkpoints=CheckpointFolder(folder), resume=resume))
        return [value.get_value() for value in (*params, *trainer.optimizer_state)]

    expected = run(tmp_path / "whole", 3)
    run(tmp_path / "parts", 1)
    for value, expected_value in zip(run(tmp_path / "parts", 3, "latest"), expected, strict=True):
        np.testing.assert_array_equal(value, expected_value)


def test_master_weights_learning_rate_is_not_rounded_to_float16(n_ranks):
    trainer, _ = make(make_trainer, u.master_weights(u.momentum), learning_rate=1e-5)
    assert trainer.learning_rate.get_value() == np.float32(1e-5)


def test_master_weights_copy_only_parameters_of_low_precision():
    w = shared(np.ones(3, "float32"), "w")
    updates = u.master_weights(u.momentum)((w**2).sum(), [w], learning_rate=0.1)
    assert [s.name for s in updates.param_updates] == ["w", "w_velocity"]


def test_step_of_master_weights_is_transformed_within_them():
    w = shared(np.ones(3, "float16"), "w")
    rule = functools.partial(u.master_weights(u.sgd), learning_rate=0.1)
    with pytest.raises(ValueError, match=r"keeps a copy of 'w', which scale\(0.5\) .*: expected master_weights\(chain"):
        u.chain(rule, u.scale(0.5))((w**2).sum(), [w])
    u.master_weights(u.chain(u.sgd, u.scale(0.5)))((w**2).sum(), [w], learning_rate=0.1)
    u.chain(u.clip(1.0), rule)((w**2).sum(), [w])


def test_master_weights_need_a_rule():
    with pytest.raises(TypeError, match="master_weights: expected an update rule, got 3"):
        u.master_weights(3)
