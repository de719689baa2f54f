"""The batch normalization layer, against NumPy."""

from collections import OrderedDict

import numpy as np
import pytest

import synkhronos as synk
from lasagne_tools.batch_norm import BatchNormLayer, get_running_averages
from lasagne_tools.library import T, lasagne, theano

pytestmark = pytest.mark.usefixtures("float64")

rng = np.random.default_rng(5)
EPSILON = 1e-3
# Rows, channels, positions; channels that differ in mean and spread.
ARRAYS = {
    "matrix": rng.normal([[1.0, -20.0, 5.0]], [[1.0, 0.1, 30.0]], (7, 3)),
    "images": rng.normal(
        np.reshape([1.0, -20.0, 5.0], (3, 1, 1)), np.reshape([1.0, 0.1, 30.0], (3, 1, 1)), (4, 3, 5, 2)
    ),
}
BETA, GAMMA = np.array([0.5, -1.0, 2.0]), np.array([2.0, 0.3, 1.0])


def make_variable(array):
    return T.TensorType("float64", [False] * array.ndim)("x")


def make_layer(array, **kwargs):
    return BatchNormLayer((None, *array.shape[1:]), **{"epsilon": EPSILON, "beta": BETA, "gamma": GAMMA, **kwargs})


def reshape_per_channel(vector, array):
    return np.reshape(vector, (-1, *[1] * (array.ndim - 2)))


def compute_statistics(array):
    axes = (0, *range(2, array.ndim))
    return array.mean(axis=axes), array.var(axis=axes)


def normalize_array(array, mean, variance, beta=BETA, gamma=GAMMA):
    mean, variance, beta, gamma = (reshape_per_channel(v, array) for v in (mean, variance, beta, gamma))
    return gamma * (array - mean) / np.sqrt(variance + EPSILON) + beta


@pytest.fixture(params=ARRAYS.values(), ids=ARRAYS)
def array(request):
    """Return each of the arrays."""
    return request.param


def test_batch_norm_equals_numpy(array):
    x = make_variable(array)
    f = theano.function([x], make_layer(array).get_output_for(x))
    np.testing.assert_allclose(f(array), normalize_array(array, *compute_statistics(array)), rtol=1e-9, atol=1e-9)


def test_batch_norm_without_scale_and_shift_standardizes(array):
    x = make_variable(array)
    layer = make_layer(array, beta=None, gamma=None)
    assert layer.beta is layer.gamma is None
    mean, variance = compute_statistics(theano.function([x], layer.get_output_for(x))(array))
    before = compute_statistics(array)[1]
    np.testing.assert_allclose(mean, 0, atol=1e-9)
    np.testing.assert_allclose(variance, before / (before + EPSILON), rtol=1e-9)


@pytest.mark.parametrize("epsilon", [0, 1e-5, float("nan")])
def test_batch_norm_refuses_epsilon_below_theanos_limit(epsilon):
    with pytest.raises(ValueError, match="epsilon: expected a number above 1e-5"):
        BatchNormLayer((None, 3), epsilon=epsilon)


@pytest.mark.parametrize("shape", [(6, 1), (6, 1, 2, 3)])
def test_batch_norm_of_one_channel_trains(shape):
    array = rng.normal(3, 2, size=shape)
    x, layer = make_variable(array), BatchNormLayer((None, *shape[1:]), epsilon=EPSILON)
    bare = BatchNormLayer((None, *shape[1:]), epsilon=EPSILON, beta=None, gamma=None)
    outputs = [layer.get_output_for(x), bare.get_output_for(x)]
    gradients = theano.grad((outputs[0] ** 3 + outputs[1] ** 3).sum(), [layer.beta, layer.gamma])
    *values, dbeta, dgamma = theano.function([x], [*outputs, *gradients])(array)
    expected = normalize_array(array, *compute_statistics(array), beta=np.zeros(1), gamma=np.ones(1))
    for value in values:
        np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(dbeta, [3 * (expected**2).sum()], rtol=1e-6)
    np.testing.assert_allclose(dgamma, [3 * (expected**3).sum()], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0])
def test_running_averages_move_towards_the_statistics(array, alpha):
    x, layer = make_variable(array), make_layer(array, alpha=alpha)
    updates = OrderedDict()
    f = theano.function([x], layer.get_output_for(x, average_updates=updates), updates=updates)
    mean, variance = np.zeros(3), np.ones(3)
    for batch in (array, 2 * array, array[:2]):
        f(batch)
        batch_mean, batch_variance = compute_statistics(batch)
        mean, variance = mean + alpha * (batch_mean - mean), variance + alpha * (batch_variance - variance)
        np.testing.assert_allclose(layer.mean.get_value(), mean, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(layer.variance.get_value(), variance, rtol=1e-9, atol=1e-12)


def test_batch_norm_averages_change_only_on_request(array):
    x, layer = make_variable(array), make_layer(array)
    updates = OrderedDict()
    tested = layer.get_output_for(x, deterministic=True, average_updates=updates)
    assert not updates
    theano.function([x], [layer.get_output_for(x), tested])(array)
    np.testing.assert_array_equal(layer.mean.get_value(), np.zeros(3))
    np.testing.assert_array_equal(layer.variance.get_value(), np.ones(3))


def test_deterministic_mode_uses_the_running_averages_row_by_row(array):
    x, layer = make_variable(array), make_layer(array)
    mean, variance = np.array([3.0, -1.0, 0.0]), np.array([4.0, 0.5, 1.0])
    layer.mean.set_value(mean)
    layer.variance.set_value(variance)
    f = theano.function([x], layer.get_output_for(x, deterministic=True))
    np.testing.assert_allclose(f(array), normalize_array(array, mean, variance), rtol=1e-9)
    np.testing.assert_allclose(f(array[1:2]), f(array)[1:2], rtol=1e-12)


def test_batch_norm_of_a_constant_channel_is_the_shift():
    x, constant = T.matrix("x", dtype="float64"), np.full((6, 3), 7.0)
    f = theano.function([x], make_layer(constant).get_output_for(x))
    np.testing.assert_allclose(f(constant), np.tile(BETA, (6, 1)), atol=1e-12)


def test_batch_norm_applies_nonlinearity_last(array):
    x = make_variable(array)
    layer = make_layer(array, nonlinearity=lasagne.nonlinearities.rectify)
    f = theano.function([x], layer.get_output_for(x))
    np.testing.assert_allclose(
        f(array), np.maximum(normalize_array(array, *compute_statistics(array)), 0), rtol=1e-9, atol=1e-9
    )


def test_running_averages_are_neither_trainable_nor_regularizable():
    below = lasagne.layers.InputLayer((None, 3))
    network = BatchNormLayer(BatchNormLayer(below, name="first"), name="second")
    trained = lasagne.layers.get_all_params(network, trainable=True)
    assert [p.name for p in trained] == ["first.beta", "first.gamma", "second.beta", "second.gamma"]
    names = [p.name for p in get_running_averages(network)]
    assert names == ["first.mean", "first.variance", "second.mean", "second.variance"]
    assert lasagne.layers.get_all_params(network, regularizable=True) == []
    assert network.output_shape == (None, 3)


@pytest.mark.parametrize("shape", [(5,), (None, None, 4, 4)])
def test_batch_norm_refuses_unknown_channels(shape):
    with pytest.raises(ValueError, match="known number of channels"):
        BatchNormLayer(shape)


@pytest.mark.parametrize("alpha", [-0.1, 1.5])
def test_batch_norm_refuses_alpha_outside_0_to_1(alpha):
    with pytest.raises(ValueError, match=f"alpha: expected a number from 0 to 1, got {alpha}"):
        BatchNormLayer((None, 3), alpha=alpha)


def test_running_averages_are_local_until_averaged(two_ranks_per_test):
    array = ARRAYS["matrix"][:6]
    x, layer = T.matrix("x", dtype="float64"), make_layer(array, alpha=0.25)
    updates = OrderedDict()
    f = synk.function([x], (layer.get_output_for(x, average_updates=updates), "gather"), updates=updates)
    halves = array[:3], array[3:]
    normalized_halves = [normalize_array(half, *compute_statistics(half)) for half in halves]
    np.testing.assert_allclose(f(array), np.concatenate(normalized_halves), rtol=1e-9, atol=1e-9)

    averages = get_running_averages(layer)
    expected = [[0.25 * compute_statistics(half)[0], 0.75 + 0.25 * compute_statistics(half)[1]] for half in halves]
    for rank in range(2):
        np.testing.assert_allclose(synk.get_value(rank, averages), expected[rank], rtol=1e-9)
    synk.all_reduce(averages)
    for rank in range(2):
        np.testing.assert_allclose(synk.get_value(rank, averages), np.mean(expected, axis=0), rtol=1e-9)


def test_sync_normalizes_by_the_rows_of_all_ranks_as_one_process_does(array, fork):
    x, updates, values = make_variable(array), OrderedDict(), []
    layer, alone = make_layer(array, sync=True, alpha=0.25), make_layer(array, alpha=0.25)
    target = np.cos(np.arange(array[0].size)).reshape(array[0].shape)
    for batch_norm in (layer, alone):
        out = batch_norm.get_output_for(x, average_updates=updates if batch_norm is layer else None)
        loss = T.sqr(out - target).mean()
        values.append([out, *T.grad(loss, [batch_norm.gamma, batch_norm.beta])])
    fork(3)
    f = synk.function([x], list(zip(values[0], ("gather", "mean", "mean"), strict=True)), updates=updates)
    for actual, expected in zip(f(array), theano.function([x], values[1])(array), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-8, atol=1e-10)
    mean, variance = compute_statistics(array)
    for rank in range(3):  # equal on all ranks, without an all-reduce
        rank_averages = synk.get_value(rank, get_running_averages(layer))
        np.testing.assert_allclose(rank_averages, [0.25 * mean, 0.75 + 0.25 * variance], rtol=1e-9)
