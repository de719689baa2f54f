"""Training functions on several ranks equal those of one process."""

import functools

import numpy as np
import pytest
from library import package
from library import tensor as T

import synkhronos as synk
from synkhronos.training import make_train_function, make_train_function_serial, updates

N_ROWS = 13
rng = np.random.default_rng(3)
X, Y = rng.normal(size=(N_ROWS, 3)), rng.normal(size=(N_ROWS, 2))
W, B = rng.normal(size=(3, 2)), rng.normal(size=2)

RULES = {
    "sgd": {"learning_rate": 0.3},
    "momentum": {"learning_rate": 0.1},
    "nesterov_momentum": {"learning_rate": 0.1, "momentum": 0.8},
    "adagrad": {"learning_rate": 0.1},
    "rmsprop": {"learning_rate": 0.05},
    "adadelta": {"learning_rate": 2.0, "epsilon": 1e-3},
    "adam": {"learning_rate": 0.1, "beta2": 0.9},
    "adamax": {"learning_rate": 0.1},
    "amsgrad": {"learning_rate": 0.1, "beta2": 0.8},
}

# Values of `batch`; most split unevenly among 2 and 3 ranks, some leave ranks without rows.
BATCHES = {
    "all rows": None,
    "an even number of rows": 12,
    "an uneven number of rows": 11,
    "one row": 1,
    "two rows": 2,
    "a slice": slice(3, 10),
    "a slice with steps, backwards": slice(None, None, -2),
    "indexes": [5, 0, 12, 5, 7],
    "an array of indexes": np.array([11, 2, -1, 4, 4, 6, 8]),
    "a mask": np.arange(N_ROWS) % 3 > 0,
    "a mask of one row": np.arange(N_ROWS) == 4,
}


class Model:
    """A layer with a penalty on its weights."""

    def __init__(self, dtype="float64"):
        self.x, self.y = T.matrix("x", dtype=dtype), T.matrix("y", dtype=dtype)
        self.w, self.b = package.shared(W.astype(dtype), name="w"), package.shared(B.astype(dtype), name="b")
        self.params = [self.w, self.b]
        self.predicted = T.tanh(T.dot(self.x, self.w) + self.b)
        # Constants of the dtype give a loss of the dtype, whatever floatX is.
        self.penalty = np.asarray(0.1, dtype) * (self.w**2).sum()
        self.loss = ((self.predicted - self.y) ** 2).mean() + self.penalty

    def train_by(self, make, rule="sgd", **kwargs):
        kwargs = kwargs or RULES[rule]
        return make(self.loss, self.params, self.x, self.y, getattr(updates, rule), **kwargs)

    def reset(self):
        self.w.set_value(W)
        self.b.set_value(B)

    def values(self):
        return np.concatenate([p.get_value().ravel() for p in self.params])

    def values_of_all_ranks(self):
        """Return the values of all ranks, one row per rank."""
        gathered = [np.asarray(synk.gather(p)) for p in self.params]
        return np.concatenate([g.reshape(len(g), -1) for g in gathered], axis=1)


def make_pair(rule="sgd", **kwargs):
    """Return a model with a training function on all ranks, and one with a serial training function."""
    together, alone = Model(), Model()
    return (
        together,
        together.train_by(make_train_function, rule, **kwargs),
        alone,
        alone.train_by(make_train_function_serial, rule, **kwargs),
    )


def assert_same(together, alone, n_ranks):
    values = together.values_of_all_ranks()
    assert len(values) == n_ranks
    np.testing.assert_allclose(values, [alone.values()] * n_ranks, rtol=1e-9, atol=1e-12)


# -- the serial version, against hand-written code -------------------------------------------------------


@functools.cache
def make_serial_and_plain():
    """Return a serial training function and an equivalent handwritten one, each with its model; compiled once."""
    model, plain = Model(), Model()
    grads = package.grad(plain.loss, plain.params)
    rate = T.constant(np.asarray(0.3), dtype="float64")
    steps = [(p, p - rate * g) for p, g in zip(plain.params, grads, strict=True)]
    step = package.function([plain.x, plain.y], plain.loss, updates=steps)
    return model, model.train_by(make_train_function_serial), plain, step


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_make_train_function_serial_equals_a_plain_function(batch):
    model, train, plain, step = make_serial_and_plain()
    model.reset()
    plain.reset()
    rows = batch if batch is not None and not isinstance(batch, int) else slice(batch)
    for _ in range(3):
        loss = train(X, Y, batch=batch)
        np.testing.assert_allclose(loss, step(X[rows], Y[rows]), rtol=1e-12)
        np.testing.assert_allclose(model.values(), plain.values(), rtol=1e-12)
    assert np.shape(loss) == ()


# -- all ranks, against the serial twin ------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_make_train_function_equals_serial_for_each_rule(n_ranks, rule):
    together, train, alone, train_alone = make_pair(rule)
    x_data, y_data = synk.data(X), synk.data(Y)
    for batch, num_slices in [(None, 1), (11, 1), ([5, 0, 12, 5], 1), (1, 1), (slice(2, 12), 3), (None, 3)]:
        loss = train(x_data, y_data, batch=batch, num_slices=num_slices)
        np.testing.assert_allclose(loss, train_alone(X, Y, batch=batch), rtol=1e-9)
        assert_same(together, alone, n_ranks)


@pytest.fixture(scope="module")
def sgd_pair(n_ranks):
    """Return `make_pair` with SGD, compiled once for each number of ranks."""
    return make_pair("sgd")


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_train_equals_serial_for_any_batch_and_num_slices(n_ranks, sgd_pair, batch):
    together, train, alone, train_alone = sgd_pair
    alone.reset()
    x_data, y_data = synk.data(X), synk.data(Y)
    train(x_data, y_data)
    synk.broadcast(together.params, [W, B])
    # The previous step has left a gradient, which a rank without rows must not contribute.
    for num_slices in [1, 3, 20]:
        loss = train(x_data, y_data, batch=batch, num_slices=num_slices)
        np.testing.assert_allclose(loss, train_alone(X, Y, batch=batch), rtol=1e-9)
        assert_same(together, alone, n_ranks)


SEVERAL = {
    "equally many rows": [[0, 5, 11, 3, 4, 12], np.arange(6, 12), slice(0, 6), 6],
    "numbers of rows that differ": [[0, 5], slice(3, 10), None, np.arange(N_ROWS) == 4],
    "an uneven number": [slice(0, 5), [9, 7, 5, 3, 1]],
    "one step": [slice(1, 7)],
    "none": [],
}


@pytest.mark.parametrize("num_slices", [1, 3])
@pytest.mark.parametrize("batches", SEVERAL.values(), ids=SEVERAL)
def test_train_steps_equal_single_steps(n_ranks, sgd_pair, batches, num_slices):
    together, train, alone, train_alone = sgd_pair
    alone.reset()
    synk.distribute()
    synk.broadcast(together.params, [W, B])
    expected = [train_alone(X, Y, batch=batch) for batch in batches]
    for data in ((X, Y), (synk.data(X), synk.data(Y))):
        synk.broadcast(together.params, [W, B])
        losses = train.steps(*data, batches=batches, num_slices=num_slices)
        assert isinstance(losses, list)
        np.testing.assert_allclose(np.array(losses, float), np.array(expected, float), rtol=1e-9)
        assert_same(together, alone, n_ranks)


@pytest.mark.parametrize("even", [True, False])
def test_train_steps_select_sliceable_rows(n_ranks, even):
    together, alone = SliceableModel(), Model()
    train, train_alone = together.train_by(make_train_function), alone.train_by(make_train_function_serial)
    synk.distribute()
    shards = np.array_split(np.arange(N_ROWS), n_ranks)
    for shared, values in zip(together.sliceables, (X, Y), strict=True):
        synk.scatter(shared, values)
    # Ranks may have different numbers of rows in a step; if these are the same in all steps, one launch takes all.
    choices = [[[i % 4, 1, 2][: 3 - r % 2] for r in range(n_ranks)] for i in range(5)]
    if not even:
        choices[2] = [[0]] * n_ranks
        choices[4] = slice(0, 2)
    losses = train.steps(batches_s=choices)
    for choice, loss in zip(choices, losses, strict=True):
        choice_by_rank = [choice] * n_ranks if isinstance(choice, slice) else choice
        rows = np.concatenate([shard[rows_of_rank] for shard, rows_of_rank in zip(shards, choice_by_rank, strict=True)])
        np.testing.assert_allclose(loss, train_alone(X, Y, batch=rows), rtol=1e-9)
    assert_same(together, alone, n_ranks)


class SliceableModel(Model):
    """A model whose data are in sliceable shared variables, each rank's rows on that rank."""

    def __init__(self):
        super().__init__()
        self.sliceables = [
            package.shared(np.zeros((1, a.shape[1])), name) for name, a in (("x_rows", X), ("y_rows", Y))
        ]

    def train_by(self, make, rule="sgd", **kwargs):
        return super().train_by(make, rule, sliceable_shareds=self.sliceables, **(kwargs or RULES[rule]))


@pytest.mark.parametrize("num_slices", [1, 3])
def test_train_with_sliceable_shareds_equals_serial(n_ranks, num_slices):
    together, alone = SliceableModel(), Model()
    train, train_alone = together.train_by(make_train_function), alone.train_by(make_train_function_serial)
    synk.distribute()
    for shared, values in zip(together.sliceables, (X, Y), strict=True):
        synk.scatter(shared, values)
    shards = np.array_split(np.arange(N_ROWS), n_ranks)
    choices_of_ranks = [list(range(len(rows)))[::-2] for rows in shards]
    choices = [
        None,
        choices_of_ranks,
        slice(0, 2),
        [slice(r % 2, None) for r in range(n_ranks)],
        [0],
        [rows if r else [] for r, rows in enumerate(choices_of_ranks)] if n_ranks > 1 else [2, 2],
        # Rows that only one rank has.
        [slice(0, 1) if r == 0 else slice(100, None) for r in range(n_ranks)],
    ]
    for choice in choices:
        choice_by_rank = [slice(None) if choice is None else choice] * n_ranks
        if isinstance(choice, list) and (isinstance(choice[0], slice) or np.ndim(choice[0])):
            choice_by_rank = choice
        rows = np.concatenate(
            [shard[rows_of_rank].astype(int) for shard, rows_of_rank in zip(shards, choice_by_rank, strict=True)]
        )
        loss = train(batch_s=choice, num_slices=num_slices)
        np.testing.assert_allclose(loss, train_alone(X, Y, batch=rows), rtol=1e-9)
        assert_same(together, alone, n_ranks)


def test_train_uses_the_shortest_sliceable_shared(n_ranks):
    together, alone = SliceableModel(), Model()
    train, train_alone = together.train_by(make_train_function), alone.train_by(make_train_function_serial)
    synk.distribute()
    for shared, values, rows in zip(together.sliceables, (X, Y), (4, 2), strict=True):
        synk.scatter(shared, values[: 4 * n_ranks])
        # The last rank has labels for two of its four rows.
        synk.set_value(n_ranks - 1, shared, values[4 * n_ranks - 4 :][:rows])
    train(batch_s=slice(0, 2))
    train_alone(X, Y, batch=[4 * r + i for r in range(n_ranks) for i in (0, 1)])
    if n_ranks == 1:
        with pytest.raises(ValueError, match="^batch_s: expected at least one row"):
            train(batch_s=slice(2, 4))
        return
    # The last rank has no such rows; its previous gradient must not count.
    loss = train(batch_s=slice(2, 4))
    rows = [4 * r + i for r in range(n_ranks - 1) for i in (2, 3)]
    np.testing.assert_allclose(loss, train_alone(X, Y, batch=rows), rtol=1e-9)
    assert_same(together, alone, n_ranks)


@pytest.mark.parametrize("num_slices", [1, 3])
def test_train_running_averages_equal_one_process(n_ranks, num_slices):
    together, alone = Model(), Model()
    averages, rank_averages, counts, trains = [], [], [], []
    for model, make in ((together, make_train_function), (alone, make_train_function_serial)):
        average, count = package.shared(np.zeros(X.shape[1]), "average"), package.shared(np.int64(0), "count")
        rank_average = package.shared(np.zeros(X.shape[1]), "rank_average")
        new, new_rank_average = (
            0.5 * average_before + 0.5 * model.x.mean(axis=0) for average_before in (average, rank_average)
        )
        extra = [(average, new), (count, count + 1), (rank_average, new_rank_average, None)]
        averages.append(average)
        rank_averages.append(rank_average)
        counts.append(count)
        trains.append(model.train_by(make, extra_updates=extra, **RULES["sgd"]))
    expected, expected_alone = np.zeros((n_ranks, X.shape[1])), np.zeros(X.shape[1])
    for i in range(3):
        loss = trains[0](X, Y, num_slices=num_slices)
        np.testing.assert_allclose(loss, trains[1](X, Y), rtol=1e-9)
        assert_same(together, alone, n_ranks)
        shard_means = np.array([rows.mean(axis=0) for rows in np.array_split(X, n_ranks)])
        expected, expected_alone = 0.5 * (expected + shard_means), 0.5 * (expected_alone + X.mean(axis=0))
        np.testing.assert_allclose(synk.gather(averages[0]), [expected_alone] * n_ranks, rtol=1e-9)
        np.testing.assert_allclose(synk.gather(rank_averages[0]), expected, rtol=1e-9)
        for average in (averages[1], rank_averages[1]):
            np.testing.assert_allclose(average.get_value(), expected_alone, rtol=1e-9)
        assert synk.gather(counts[0]).tolist() == [i + 1] * n_ranks and counts[1].get_value() == i + 1


def test_train_accepts_minibatch_data(n_ranks):
    together, train, alone, train_alone = make_pair()
    x_data, y_data = synk.data(X[5:9], minibatch=True), synk.data(Y[5:9], minibatch=True)
    for rows in [slice(5, 9), slice(5, 6), slice(8, 4, -1), [8, 5, 6], None]:
        if isinstance(rows, list):  # rows are in the list's order
            train(*[synk.data(whole[rows], minibatch=True) for whole in (X, Y)], batch=rows)
        else:
            train(x_data, y_data, batch=rows)
        if rows is None:
            train_alone(X[5:9], Y[5:9])
        else:
            train_alone(X, Y, batch=rows if isinstance(rows, slice) else np.array(rows))
        assert_same(together, alone, n_ranks)


def test_unweighted_mean_of_uneven_shares_differs(n_ranks):
    if n_ranks == 1:
        pytest.skip("one rank has all rows")
    # Validates the tests above: unweighted averages of uneven splits differ.
    model = Model()
    grad_updates, param_updates, grad_shared = updates.sgd(model.loss, model.params, 0.3)
    gradient = synk.function([model.x, model.y], model.loss, updates=grad_updates)
    update = synk.function([], updates=param_updates)
    gradient(X, Y)
    synk.all_reduce(grad_shared)
    update()
    alone = Model()
    alone.train_by(make_train_function_serial)(X, Y)
    assert np.abs(model.values() - alone.values()).max() > 1e-4


def test_manual_training_step_with_weight_is_exact(n_ranks):
    together, alone = Model(), Model()
    weight = together.x.shape[0]
    rule = updates.amsgrad(together.loss, together.params, learning_rate=0.1, weight=weight)
    grad_updates, param_updates, grad_shared = rule
    gradient = synk.function([together.x, together.y], (together.loss, "mean"), updates=grad_updates)
    update = synk.function([], updates=param_updates)
    train_alone = alone.train_by(make_train_function_serial, "amsgrad", learning_rate=0.1)
    for op in ["avg", "sum"]:
        loss = gradient(X, Y)
        synk.all_reduce(grad_shared, op=op)
        update()
        np.testing.assert_allclose(loss, train_alone(X, Y), rtol=1e-9)
        assert_same(together, alone, n_ranks)


# -- arguments -------------------------------------------------------------------------------------------


def adagrad_with_momentum(loss, params, **kwargs):
    return updates.apply_nesterov_momentum(updates.adagrad(loss, params, **kwargs), params, momentum=0.5)


@pytest.mark.parametrize("arguments", ["lists", "no targets", "a composed update rule"])
def test_train_accepts_lists_no_targets_and_composed_rules(n_ranks, arguments):
    trained = []
    for make in [make_train_function, make_train_function_serial]:
        model, x2 = Model(), T.matrix("x2", dtype="float64")
        loss, x, y, rule, data = {
            "lists": (
                ((model.predicted + T.dot(x2, model.w) - model.y) ** 2).mean(),
                [model.x, x2], [model.y], updates.sgd, ([X, X[::-1]], [Y]),
            ),
            "no targets": ((model.predicted**2).mean(), model.x, [], updates.sgd, (X,)),
            "a composed update rule": (model.loss, model.x, model.y, adagrad_with_momentum, (X, Y)),
        }[arguments]  # fmt: skip
        train = make(loss, model.params, x, y, rule, learning_rate=0.1)
        trained.append([*(train(*data, batch=rows) for rows in [None, [1, 2, 5, 7], 1]), *model.values()])
    np.testing.assert_allclose(trained[0], trained[1], rtol=1e-9)


def test_train_accepts_a_changing_learning_rate(n_ranks):
    model = Model()
    rate = package.shared(np.asarray(0.3), name="rate")
    train = model.train_by(make_train_function, learning_rate=rate)
    train(X, Y)
    before = model.values()
    synk.broadcast(rate, np.asarray(0.0))
    train(X, Y)
    np.testing.assert_array_equal(model.values_of_all_ranks(), [before] * n_ranks)


def test_train_keeps_float32(n_ranks):
    model = Model("float32")
    train = model.train_by(make_train_function, "adam")
    x_data, y_data = synk.data(X.astype("float32")), synk.data(Y.astype("float32"))
    losses = [train(x_data, y_data) for _ in range(30)]
    assert losses[-1] < losses[0] / 1.5
    assert losses[-1].dtype == train.grad_shared.dtype == "float32"
    values = model.values_of_all_ranks()
    np.testing.assert_array_equal(values, [values[0]] * n_ranks)


# -- the optimizer's state ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.slow
def test_train_state_resumes_on_other_ranks(rule):
    alone = Model()
    train_alone = alone.train_by(make_train_function_serial, rule)
    expected = [float(train_alone(X, Y)) for _ in range(6)]
    saved, losses = None, []
    for n in (2, 3):
        synk.close()
        synk.fork(n, use_gpu=False)
        model = Model()
        train = model.train_by(make_train_function, rule)
        trained = [*model.params, *train.optimizer_state]
        if saved is not None:
            synk.broadcast(trained, saved)
        losses += [float(train(X, Y)) for _ in range(3)]
        saved = [np.array(variable.get_value()) for variable in trained]
    synk.close()
    for value, shared in zip(train.get_optimizer_state(), train.optimizer_state, strict=True):  # without ranks, too
        np.testing.assert_array_equal(value, shared.get_value())
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    # Parameters and state are all that the rule updates; the serial function has the same variables in the same order.
    assert {id(v) for v in trained} == {id(v) for v in train._graph.rule_updates.param_updates}
    for value, expected_value in zip(saved, [*alone.params, *train_alone.optimizer_state], strict=True):
        np.testing.assert_allclose(value, expected_value.get_value(), rtol=1e-9)
