"""Random numbers by Theano's names."""

import numpy as np
import pytest

pytest.importorskip("pytensor")

import pytensor
import pytensor.tensor as pt
import theano  # JAX mode of `synkhronos.compat`

from synkhronos.compat.random_streams import RandomStreams
from synkhronos.graph_libraries import get_library

N = 20_000
MODES = ["FAST_COMPILE", "JAX"]


def draw_values(variable, *values, mode="FAST_COMPILE"):
    return np.asarray(theano.function([], variable, mode=mode)(*values))


@pytest.mark.parametrize(
    "name, arguments, mean, std",
    [
        ("uniform", {"low": -1.0, "high": 3.0}, 1.0, 4 / 12**0.5),
        ("normal", {"avg": 2.0, "std": 0.5}, 2.0, 0.5),
        ("normal", {"avg": 1.0, "std": 2.0, "truncate": True}, 1.0, 2 * 0.8796),
        ("truncated_normal", {"avg": 1.0, "std": 2.0}, 1.0, 2 * 0.8796),
        ("binomial", {"p": 0.3}, 0.3, 0.21**0.5),
        ("binomial", {"n": 10, "p": 0.3}, 3.0, 2.1**0.5),
        ("random_integers", {"low": 1, "high": 6}, 3.5, (35 / 12) ** 0.5),
        ("poisson", {"lam": 3.0}, 3.0, 3.0**0.5),
        ("choice", {"a": 4}, 1.5, 1.25**0.5),
    ],
)
def test_draws_have_their_moments(name, arguments, mean, std):
    values = draw_values(getattr(RandomStreams(1), name)(size=(N,), **arguments))
    assert values.shape == (N,)
    assert abs(values.mean() - mean) < 5 * std / N**0.5
    assert abs(values.std() - std) < 0.05 * std


def test_dtypes_of_draws_are_theanos():
    streams = RandomStreams(1)
    assert streams.uniform((2,)).dtype == pytensor.config.floatX
    assert streams.normal((2,), dtype="float32").dtype == "float32"
    assert streams.binomial((2,), dtype="float32").dtype == "float32" and streams.binomial((2,)).dtype == "int64"


def test_both_stream_names_are_one_class():
    from theano.sandbox.rng_mrg import MRG_RandomStreams
    from theano.tensor.shared_randomstreams import RandomStreams as Shared

    assert MRG_RandomStreams is Shared is RandomStreams


@pytest.fixture(params=MODES)
def two_draws(request):
    """Yield streams, and a function of two draws from them."""
    streams = RandomStreams(3)
    return streams, theano.function([], [streams.uniform((4,)), streams.uniform((4,))], mode=request.param)


def test_draws_differ_between_variables_and_calls(two_draws):
    _, f = two_draws
    draws = [*f(), *f()]
    assert len({tuple(values) for values in draws}) == 4


def test_seed_restarts_the_draws(two_draws):
    streams, f = two_draws
    draws = f()
    streams.seed(3)
    np.testing.assert_array_equal(f(), draws)


@pytest.mark.parametrize("mode", MODES)
def test_streams_of_one_seed_draw_equal_numbers(mode):
    first, same = (draw_values(RandomStreams(3).uniform((4,)), mode=mode) for _ in range(2))
    np.testing.assert_array_equal(first, same)


@pytest.mark.parametrize("mode", MODES)
def test_functions_with_one_draw_share_its_stream(mode):
    streams = RandomStreams(3)
    draw = streams.uniform((4,))
    train, test = theano.function([], draw, mode=mode), theano.function([], draw * 1.0, mode=mode)
    draws = [train(), test(), train(), test.copy()()]
    assert len({tuple(values) for values in draws}) == 4
    streams.seed(3)
    np.testing.assert_array_equal([test(), train(), test(), train()], draws)


def test_updates_has_an_entry_for_each_draw(two_draws):
    streams, _ = two_draws
    assert len(streams.updates()) == 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["uniform", "binomial", "truncated_normal", "poisson"])
def test_state_of_a_variables_generator_repeats_its_draw(name, mode):
    variable = getattr(RandomStreams(3), name)((20,))
    f = theano.function([], variable, mode=mode)
    f()
    state = variable.rng.get_value()
    first = f()
    assert not np.array_equal(first, f())
    variable.rng.set_value(state)
    np.testing.assert_array_equal(f(), first)
    assert variable.update[0] is variable.rng


def test_permutations_multinomials_and_shuffles_are_drawn():
    streams = RandomStreams(1)
    assert sorted(draw_values(streams.permutation(n=5))) == list(range(5))
    permutations = draw_values(streams.permutation((2, 3), n=5))
    assert permutations.shape == (2, 3, 5) and (np.sort(permutations) == np.arange(5)).all()
    counts = draw_values(streams.multinomial(n=1, pvals=np.full((3, 4), 0.25)))
    assert counts.shape == (3, 4) and (counts.sum(axis=1) == 1).all()
    shuffled = draw_values(streams.shuffle_row_elements(pt.as_tensor_variable(np.arange(6.0).reshape(2, 3))))
    np.testing.assert_array_equal(np.sort(shuffled, axis=1), np.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("name", ["choice", "multinomial"])
def test_random_streams_refuse_unknown_arguments(name):
    draw_from = getattr(RandomStreams(1), name)
    draw_from(size=(2,), nstreams=3)
    with pytest.raises(TypeError, match="replacement"):
        draw_from(size=(2,), replacement=False)


@pytest.mark.parametrize("mode", ["FAST_COMPILE", "JAX"])
def test_draw_takes_the_shape_of_another_variable(mode):
    x = pt.dmatrix("x")
    mask = RandomStreams(1).binomial(x.shape, p=0.5, dtype=x.dtype)
    dropped = pytensor.function([x], x * mask, mode=mode)(np.ones((50, 40)))
    assert 0.4 < np.asarray(dropped).mean() < 0.6


def test_generators_of_random_streams_can_jump():
    streams = RandomStreams(1)
    variable = streams.uniform((2,))
    library = get_library(variable)
    (generator,) = library.find_shareds([variable])
    assert library.is_generator(generator)
    copies = [library.copy_generator(generator) for _ in range(2)]
    library.check_generator(generator, copies[0], must_jump=True)
    jumped = library.jump_generator(copies[0], 1)
    assert jumped.random() != copies[1].random()
