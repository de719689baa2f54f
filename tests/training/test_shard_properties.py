"""A sharded optimizer on any number of ranks has the bits of the unsharded one, and equals one process."""

import contextlib
import functools

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from library import DEVICE, NAME, XLA, fork_ranks, limit_examples, package, shared, tensor

import synkhronos as synk
from synkhronos.training import CheckpointFolder, make_train_function, make_train_function_serial, make_trainer
from synkhronos.training import updates as u

RULES = {
    "momentum": u.momentum,
    "adam": u.adam,
    "adamw": functools.partial(u.adamw, weight_decay=0.1, mask=lambda p: p.ndim > 1),
    "lion": u.lion,
    "amsgrad": u.amsgrad,
    "muon": u.muon,
    "chain": u.chain(u.clip(0.1), u.add_decayed_weights(0.01), u.rmsprop, u.scale(0.5)),
}


def make_rows(n_in, n_out, dtype="float64"):
    """Return inputs and targets of 13 rows."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(13, n_in)).astype(dtype), rng.normal(size=(13, n_out)).astype(dtype)


@contextlib.contextmanager
def fork_exact_ranks(n):
    """Fork ranks whose compiler rounds each operation; by default Numba may multiply by a reciprocal in some loops."""
    with contextlib.ExitStack() as stack:
        if NAME == "pytensor":
            stack.enter_context(package.config.change_flags(numba__fastmath=False))
        stack.callback(synk.close)
        fork_ranks(n)
        yield


def build_training(rule, shape, dtype, make=make_train_function, **options):
    """Return a training function and its parameters: a matrix, a vector and a scalar."""
    x, y = tensor.matrix("x", dtype=dtype), tensor.matrix("y", dtype=dtype)
    start = np.random.default_rng(1).normal(size=shape), np.ones(shape[1]), np.asarray(1.5)
    w, b, s = [shared(np.asarray(value, dtype), name) for value, name in zip(start, "wbs", strict=True)]
    loss = ((tensor.dot(x, w) * s + b - y) ** 2).mean()
    return make(loss, [w, b, s], x, y, rule, learning_rate=0.1, **options), [w, b, s]


def compute_results(train, params, x, y, batches):
    """Return losses, parameters and state after some steps."""
    losses = [np.array(train(x, y, batch=batch)) for batch in batches]
    is_parallel = hasattr(train, "get_optimizer_state")
    state = train.get_optimizer_state() if is_parallel else [s.get_value() for s in train.optimizer_state]
    return [*losses, *(p.get_value() for p in params), *state]


@settings(
    limit_examples(6), derandomize=True, phases=(Phase.explicit, Phase.generate)
)  # shrinking would compile for minutes
@given(
    n=st.integers(2, 4),
    name=st.sampled_from(sorted(RULES)),
    shape=st.tuples(st.integers(1, 6), st.integers(5, 6)),
    dtype=st.sampled_from(["float32", "float64"]),
    clip_norm=st.sampled_from([None, 0.1]),
    num_slices=st.integers(1, 3),
    batches=st.lists(st.integers(1, 13), min_size=2, max_size=4),
)
def test_sharded_and_unsharded_steps_have_the_same_bits(
    no_ranks, n, name, shape, dtype, clip_norm, num_slices, batches
):
    x, y = make_rows(*shape, dtype)
    options = {"rule": RULES[name], "shape": shape, "dtype": dtype, "clip_norm": clip_norm}
    with fork_exact_ranks(n):
        unsharded = compute_results(*build_training(**options, num_slices=num_slices), x, y, batches)
        sharded = compute_results(
            *build_training(**options, num_slices=num_slices, shard_optimizer=True), x, y, batches
        )
    serial = compute_results(*build_training(**options, make=make_train_function_serial), x, y, batches)
    tolerance = 1e-4 if dtype == "float32" else 1e-9
    for value, unsharded_value, serial_value in zip(sharded, unsharded, serial, strict=True):
        assert value.shape == unsharded_value.shape == serial_value.shape
        if DEVICE == "host":
            assert (value.dtype, value.tobytes()) == (unsharded_value.dtype, unsharded_value.tobytes())
        np.testing.assert_allclose(value, serial_value, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(unsharded_value, serial_value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("n", [2] if XLA else [2, 3])
def test_clipping_in_slices_has_the_same_bits(no_ranks, n):
    """Once the last digits differed: without a concatenation, the library simplified sharded updates further."""
    x, y = make_rows(5, 3)
    options = {"rule": u.adam, "shape": (5, 3), "dtype": "float64", "clip_norm": 0.1, "num_slices": 2}
    with fork_exact_ranks(n):
        unsharded = compute_results(*build_training(**options), x, y, [13, 7, 2, 13])
        sharded = compute_results(*build_training(**options, shard_optimizer=True), x, y, [13, 7, 2, 13])
    for value, unsharded_value in zip(sharded, unsharded, strict=True):
        if DEVICE == "host":
            np.testing.assert_array_equal(value, unsharded_value)
        np.testing.assert_allclose(value, unsharded_value, rtol=1e-12)


def train_epochs(folder, n, shards, epochs, resume=None):
    """Train with 12 rows a step on all ranks together; return the parameters."""
    x, y = np.random.default_rng(2).normal(size=(24, 5)), np.random.default_rng(3).normal(size=(24, 3))
    a, b = tensor.matrix("a", dtype="float64"), tensor.matrix("b", dtype="float64")
    w = shared(np.random.default_rng(4).normal(size=(5, 3)), "w")
    loss = ((tensor.dot(a, w) - b) ** 2).mean()
    with fork_exact_ranks(n):
        trainer = make_trainer(loss, [w], a, b, u.adam, learning_rate=0.1, shard_optimizer=shards)
        list(trainer.epochs(x, y, 12 // n, epochs, checkpoints=CheckpointFolder(folder), resume=resume))
        return w.get_value()


def test_trainers_with_shards_resume_on_other_numbers_of_ranks(no_ranks, tmp_path):
    steps = [(2, True), (1, False), (2, False)] if XLA else [(3, True), (2, False), (4, True), (1, True), (2, True)]
    expected = train_epochs(tmp_path / "whole", 1, False, len(steps))
    for epochs, (n, shards) in enumerate(steps, 1):
        resumed = train_epochs(tmp_path / "parts", n, shards, epochs, None if epochs == 1 else "latest")
    np.testing.assert_allclose(resumed, expected, rtol=1e-9)


@pytest.mark.parametrize("rule", [u.sgd, u.momentum])
def test_sharded_functions_refuse_other_ranks(rule):
    """Even a rule without state depends on the ranks: its matrix of gradients has a row for each rank."""
    x, w = tensor.dmatrix("x"), shared(np.zeros(3), "w")
    with fork_exact_ranks(2):
        train = make_train_function(tensor.dot(x, w).mean(), [w], x, [], rule, learning_rate=0.5, shard_optimizer=True)
        train(np.eye(3), [])
    with (
        fork_exact_ranks(2),
        pytest.raises(RuntimeError, match="^shard_optimizer: the ranks that had the parts .* have ended"),
    ):
        train(np.eye(3), [])
    with fork_exact_ranks(3), pytest.raises(RuntimeError, match="^shard_optimizer: .* was made for 2 ranks, got 3"):
        train(np.eye(3), [])
