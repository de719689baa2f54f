"""A sharded optimizer equals the unsharded one, with a shard of the state on each rank."""

import copy
import pickle
import signal

import numpy as np
import pytest
from library import XLA, shared, tensor

import synkhronos as synk
from synkhronos.functions.call import RankCall
from synkhronos.training import CheckpointFolder, make_train_function, make_trainer
from synkhronos.training import updates as u
from synkhronos.training.train_function import optimizer_state
from synkhronos.training.train_function.step_command import ShardedStepCommand
from synkhronos.training.updates.update_rule import update_rule

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(13, 5)), rng.normal(size=(13, 3))
START = rng.normal(size=(5, 3)), rng.normal(size=3), np.asarray(1.0)

RULES = {
    **{name: getattr(u, name) for name in ("sgd", "momentum", "nesterov_momentum", "adagrad", "rmsprop", "adadelta")},
    **{name: getattr(u, name) for name in ("adam", "adamax", "amsgrad", "adamw", "lion", "muon")},
    "chain": u.chain(u.clip(0.1), u.clip_by_global_norm(0.05), u.adamw, u.scale(0.5)),
    "decay of matrices": u.chain(u.add_decayed_weights(0.1, mask=lambda p: p.ndim > 1), u.adam),
    "partition": u.partition((lambda p: p.ndim == 2, u.momentum), u.adam),
    "norms of units": u.chain(lambda grads, params: [u.norm_constraint(grads[0], 0.01), *grads[1:]], u.adam),
}
if XLA:  # a rule takes seconds to compile
    RULES = {name: RULES[name] for name in ("adam", "chain")}
OPTIONS = {"clip_norm": 0.1, "ema": 0.9, "num_slices": 2, "loss_scale": "dynamic"}


class ThreeDtypeRegression:
    def __init__(self, dtypes=("float64", "float64", "float64")):
        self.x, self.y = tensor.dmatrix("x"), tensor.dmatrix("y")
        start = zip(START, dtypes, ("w", "b", "s"), strict=True)
        self.params = [shared(value.astype(dtype), name) for value, dtype, name in start]
        w, b, s = self.params
        self.loss = ((tensor.dot(self.x, w) * s + b - self.y) ** 2).mean()

    def train_by(self, rule, **options):
        return make_train_function(self.loss, self.params, self.x, self.y, rule, learning_rate=0.1, **options)


def compute_results(rule, dtypes=("float64", "float64", "float64"), **options):
    """Return losses, parameters, averages and state after steps on 13, 7, 2 and 13 rows."""
    problem = ThreeDtypeRegression(dtypes)
    train = problem.train_by(rule, **options)
    losses = [np.array(train(X, Y, batch=batch)) for batch in (None, 7, 2, None)]
    averages = [average.get_value() for average in train.get_ema() or ()]
    return [*losses, *(p.get_value() for p in problem.params), *averages, *train.get_optimizer_state()]


def assert_equal(results, expected):
    for value, expected_value in zip(results, expected, strict=True):
        assert (value.dtype, value.shape) == (expected_value.dtype, expected_value.shape)
        np.testing.assert_allclose(value, expected_value, rtol=1e-5 if value.dtype == "float32" else 1e-10, atol=1e-12)


def skip_one_rank(n_ranks):
    if n_ranks == 1:
        pytest.skip("the optimizer of one rank is not sharded")


@pytest.mark.parametrize("name", RULES)
def test_shard_optimizer_equals_unsharded(n_ranks, name):
    if name != "adam":
        skip_one_rank(n_ranks)
    assert_equal(compute_results(RULES[name], shard_optimizer=True), compute_results(RULES[name]))


@pytest.mark.parametrize("shape", [(5, 1)] if XLA else [(5, 1), (1, 3), (3, 4)])
@pytest.mark.parametrize("rule", [u.momentum] if XLA else [u.momentum, u.muon])
def test_sharded_parameters_may_have_axes_of_length_1(n_ranks, rule, shape):
    skip_one_rank(n_ranks)
    values = []
    for is_sharded in (True, False):
        x, y = tensor.dmatrix("x"), tensor.dmatrix("y")
        w, b = shared(np.arange(1.0, np.prod(shape) + 1).reshape(shape), "w"), shared(np.ones(shape[1]), "b")
        loss = ((tensor.dot(x, w) + b - y) ** 2).mean()
        train = make_train_function(loss, [w, b], x, y, rule, learning_rate=0.1, shard_optimizer=is_sharded)
        train(X[:, :1] * np.ones(shape[0]), Y[:, :1] * np.ones(shape[1]))
        values.append([w.get_value(), b.get_value(), *train.get_optimizer_state()])
    assert_equal(*values)


def test_shard_optimizer_accepts_options_and_several_dtypes(n_ranks):
    dtypes = "float32", "float64", "float32"
    sharded = compute_results(u.adam, dtypes, shard_optimizer=True, **OPTIONS)
    assert_equal(sharded, compute_results(u.adam, dtypes, **OPTIONS))


@pytest.mark.parametrize("is_sliceable", [False, True])
def test_many_sharded_steps_are_one_command(n_ranks, is_sliceable, monkeypatch):
    n_steps, run = [], ShardedStepCommand.run
    monkeypatch.setattr(ShardedStepCommand, "run", lambda self, rank: n_steps.append(self.n_steps) or run(self, rank))
    batches = [rng.permutation(12)[: 2 * n_ranks] for _ in range(5)]
    batches.insert(2, np.arange(2 * n_ranks + 1))
    results = []
    for takes_many in (True, False):
        problem, shareds = ThreeDtypeRegression(), None
        if is_sliceable:
            shareds = [shared(X, "x_rows"), shared(Y, "y_rows")]
        train = problem.train_by(u.adam, shard_optimizer=True, ema=0.9, clip_norm=0.1, sliceable_shareds=shareds)
        name, data = ("batches_s", ()) if is_sliceable else ("batches", (X, Y))
        losses = []
        for _ in range(2):
            n_steps.clear()
            for selected in [batches] if takes_many else [[batch] for batch in batches]:
                losses += map(float, train.steps(*data, **{name: selected}))
        if n_ranks > 1:  # the optimizer of one rank is not sharded
            assert n_steps == ([2, 1, 3] if takes_many and not XLA else [1] * 6)
        results.append([losses, *(p.get_value() for p in problem.params), *train.get_optimizer_state()])
    for value, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(value, expected)


def test_shard_optimizer_divides_the_state(n_ranks):
    train = ThreeDtypeRegression().train_by(u.adam, shard_optimizer=True)
    train(X, Y)
    sizes = {v.name: [int(np.prod(shape)) for shape in synk.get_shapes(v)] for v in train.optimizer_state}
    assert [sizes["w_m"], sizes["w_v"]] == [[-(-15 // n_ranks)] * n_ranks] * 2
    assert sizes["b_m"] == [max(2, -(-3 // n_ranks))] * n_ranks


def test_shard_optimizer_refuses_a_state_that_is_broadcast_against(n_ranks):
    @update_rule("learning_rate=0.25", 1.5)
    def column_momentum(p, g, c, learning_rate):
        """Momentum with a decay for each column."""
        v = c.zeros("velocity")
        new = (v * np.linspace(0, 1, 3)[None] if p.name == "w" else v) + g
        return {v: new, p: p - c(learning_rate) * new}

    if n_ranks > 1:  # one rank has the whole state
        with pytest.raises(ValueError, match="column_momentum cannot be sharded: it reads the whole of w_velocity, of"):
            ThreeDtypeRegression().train_by(column_momentum, shard_optimizer=True)


def test_shard_optimizer_refuses_deep_copies_after_a_step(n_ranks):
    problem = ThreeDtypeRegression()
    train = problem.train_by(u.adam, shard_optimizer=True)
    train(X, Y)
    for copied in (copy.deepcopy, pickle.dumps) if n_ranks > 1 else ():  # one rank has the whole state
        with pytest.raises(TypeError, match="^shard_optimizer: a training function can't be copied or pickled"):
            copied(train)
    copy.copy(train)(X, Y)
    twice = ThreeDtypeRegression()
    other = twice.train_by(u.adam, shard_optimizer=True)
    for _ in range(2):
        other(X, Y)
    assert_equal([p.get_value() for p in problem.params], [p.get_value() for p in twice.params])


@pytest.mark.parametrize("shards", [False, True])
def test_shard_optimizer_state_is_set_from_whole_arrays(n_ranks, shards):
    first = ThreeDtypeRegression()
    train = first.train_by(u.adam)
    train(X, Y)
    second = ThreeDtypeRegression()
    other = second.train_by(u.adam, shard_optimizer=shards)
    for variable, like in zip(second.params, first.params, strict=True):
        variable.set_value(like.get_value())
    other(X, Y, batch=1)  # the state is new, and the ranks have copies of the parameters
    synk.broadcast(second.params, [p.get_value() for p in first.params])
    other.set_optimizer_state(train.get_optimizer_state())
    for function in (train, other):
        function(X, Y)
    assert_equal([p.get_value() for p in second.params], [p.get_value() for p in first.params])
    with pytest.raises(ValueError, match="values"):
        other.set_optimizer_state([])


def test_shard_optimizer_state_is_set_for_all_sharded_variables(n_ranks):
    if n_ranks == 1:
        pytest.skip("one rank has the whole state")
    train = ThreeDtypeRegression().train_by(u.adam, shard_optimizer=True)
    train(X, Y)
    before = train.get_optimizer_state()
    others = [variable for variable in train._graph.optimizer_state if variable.name != "w_m"]
    vector = train.gather_state_vector(others)
    with pytest.raises(ValueError, match=r"^whole_variables: expected all sharded variables; missing: \['w_m'\]"):
        train.set_state_vector(others, vector)
    assert_equal(train.get_optimizer_state(), before)


def test_interrupt_before_the_first_sharded_step_keeps_initial_values(n_ranks, monkeypatch):
    if n_ranks == 1:
        pytest.skip("one rank has the whole state")
    train = ThreeDtypeRegression().train_by(u.adam, shard_optimizer=True, ema=0.9)
    expected = [np.array(variable.get_value()) for variable in train._graph.optimizer_state]

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(optimizer_state, "scatter", interrupt)
        train(X, Y)
    assert_equal(train.get_optimizer_state(), expected)


def train_adam(folder, epochs, shards, resume=None):
    problem = ThreeDtypeRegression()
    trainer = make_trainer(
        problem.loss,
        problem.params,
        problem.x,
        problem.y,
        u.adam,
        learning_rate=0.1,
        ema=0.9,
        validate={"mse": problem.loss},
        validate_ema=True,
        shard_optimizer=shards,
    )
    reports = list(trainer.epochs(X, Y, 4, epochs, valid=(X, Y), checkpoints=CheckpointFolder(folder), resume=resume))
    averages = [average.get_value() for average in trainer.get_ema()]
    return [
        *(np.asarray(r.validation["mse"]) for r in reports[-1:]),
        *(p.get_value() for p in problem.params),
        *averages,
    ]


def test_trainers_resume_sharded_or_unsharded(n_ranks, tmp_path):
    expected = train_adam(tmp_path / "plain", 3, False)
    for first, second in ((True, True), (True, False), (False, True)):
        folder = tmp_path / f"{first} {second}"
        train_adam(folder, 1, first)
        assert_equal(train_adam(folder, 3, second, "latest"), expected)


@pytest.mark.skipif(XLA, reason="a fused step is one launch; test_gpu_training interrupts it")
@pytest.mark.parametrize("shard", [False, True])
def test_interrupt_between_the_launches_of_a_step_is_all_or_nothing(n_ranks, monkeypatch, shard):
    if n_ranks == 1:
        pytest.skip("a rank without peers")
    x, w = tensor.dmatrix("x"), shared(np.ones(4), "w")
    loss = (x.dot(w) ** 2).mean()
    train = make_train_function(loss, [w], x, [], u.momentum, learning_rate=0.01, shard_optimizer=shard)
    rows = rng.normal(size=(9, 4))
    n_launches, run = 3 if shard else 2, RankCall.run
    for moment in [(launch, is_before) for launch in range(n_launches) for is_before in (True, False)]:
        train(rows, [])
        before, (velocity,) = w.get_value(), train.get_optimizer_state()
        launches = []

        def interrupt_at_moment(call, *args, moment=moment, launches=launches, **kwargs):
            launches.append(call)
            if moment == (len(launches) - 1, True):
                signal.raise_signal(signal.SIGINT)
            result = run(call, *args, **kwargs)
            if moment == (len(launches) - 1, False):
                signal.raise_signal(signal.SIGINT)
            return result

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(RankCall, "run", interrupt_at_moment)
            train(rows, [])
        if moment[0] > 0:  # the gradient is reduced, so that the step is taken
            velocity = 0.9 * velocity - 0.01 * 2 * rows.T.dot(rows.dot(before)) / len(rows)
            before = before + velocity
        np.testing.assert_allclose(synk.gather(w, nd_up=1), [before] * n_ranks, rtol=1e-12)
        np.testing.assert_allclose(train.get_optimizer_state()[0], velocity, rtol=1e-12)
