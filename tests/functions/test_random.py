"""Random numbers: each rank draws from its own stream, and the master from the stream of the serial script."""

import pickle

import numpy as np
import pytest
from library import NAME, XLA, package, shared
from library import tensor as T
from system import run_code

import synkhronos as synk
from synkhronos.graph_libraries import get_library

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

#: Number of draws of a rank in a call.
K = 5
#: Marks tests that compare with NumPy's generators.
numpys_numbers = pytest.mark.skipif(XLA, reason="XLA draws other numbers than NumPy, from the same seeds")


def compile_serial(*args, **kwargs):
    """Return a serial function that draws as the ranks do."""
    return package.function(*args, **kwargs, mode="JAX" if XLA else None)


def stream(kind, seed=3):
    """Return a random variable of K draws, and its updates."""
    if kind == "RandomStream":
        return T.random.utils.RandomStream(seed).normal(size=(K,)), []
    if kind == "MRG":
        from theano.sandbox.rng_mrg import MRG_RandomStreams

        return MRG_RandomStreams(seed).normal(size=(K + K % 2,))[:K], []
    if kind == "RandomStreams":
        return T.shared_randomstreams.RandomStreams(seed).normal(size=(K,)), []
    rng = shared(np.random.Generator(getattr(np.random, kind)(seed)), "rng")
    next_rng, draws = rng.normal(size=(K,))
    return draws, [(rng, next_rng)]


#: The generators of this environment's library.
KINDS = ["RandomStream", "PCG64", "Philox", "MT19937"] if NAME == "pytensor" else ["MRG", "RandomStreams"]
if XLA:
    KINDS = KINDS[:2]  # PyTensor's JAX mode takes no others


def draw_on_ranks(kind, calls=2, seed=3, n=3):
    """Return each rank's draws: an array of shape (calls, ranks, draws)."""
    draws, updates = stream(kind, seed)
    f = synk.function([], (draws, "gather"), updates=updates)
    return np.array([f() for _ in range(calls)]).reshape(calls, n, K)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "MRG"])
def test_new_value_of_a_generator_is_drawn_from(fork, kind):
    fork(1)
    draws, updates = stream(kind)
    f = synk.function([], draws, updates=updates)
    generator, values = get_generator(draws), []
    for state in [generator.get_value()] * 2:
        generator.set_value(state)
        values.append(np.array(f()))
        f()
    np.testing.assert_array_equal(*values)


@pytest.mark.parametrize("master", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_random_streams_of_the_master_equal_serial(fork, kind, master):
    fork(3, master_rank=master)
    draws, updates = stream(kind)
    serial = compile_serial([], draws, updates=updates)
    np.testing.assert_array_equal(draw_on_ranks(kind)[:, master], [serial(), serial()])


@pytest.mark.parametrize("kind", KINDS)
def test_random_streams_repeat_no_number(fork, kind):
    fork(3)
    values = draw_on_ranks(kind, calls=20)
    # MRG31k3p's numbers have 31 bits, so one may repeat by chance.
    assert len(np.unique(values)) >= values.size - 1


@pytest.mark.parametrize("kind", KINDS)
def test_random_streams_repeat_from_a_seed(fork, kind):
    fork(3)
    first = draw_on_ranks(kind)
    synk.close()
    fork(3)
    np.testing.assert_array_equal(draw_on_ranks(kind), first)
    np.testing.assert_array_equal(draw_on_ranks(kind), first)  # again on the same ranks
    assert not np.any(draw_on_ranks(kind, seed=4) == first)


@pytest.mark.parametrize("kind", KINDS)
def test_random_numbers_have_the_right_distribution(fork, kind):
    fork(3)
    draws = draw_on_ranks(kind, calls=200).swapaxes(0, 1).reshape(3, -1)
    assert np.all(np.abs(draws.mean(axis=1)) < 5 / np.sqrt(draws.shape[1]))
    assert np.all(np.abs(draws.std(axis=1) - 1) < 0.15)
    # Consecutive streams could be correlated.
    assert np.all(np.abs(np.corrcoef(draws)[np.triu_indices(3, 1)]) < 0.2)


@pytest.mark.parametrize("kind", KINDS)
def test_random_streams_advance_with_num_slices(kind, two_ranks_per_test):
    draws, updates = stream(kind)
    x = T.dvector("x")
    f = synk.function([x], (draws + 0 * x.sum(), "gather"), updates=updates)
    values = f(np.ones(8), num_slices=4).reshape(2, 4, K)
    assert len(np.unique(values)) == values.size
    draws, updates = stream(kind)
    serial = compile_serial([], draws, updates=updates)
    np.testing.assert_array_equal(values[0], [serial() for _ in range(4)])
    next_values = f(np.ones(8))
    np.testing.assert_array_equal(next_values[:K], serial())  # the stream continues after the slices


@pytest.mark.parametrize("kind", KINDS)
def test_functions_share_a_random_stream(kind, two_ranks_per_test):
    draws, updates = stream(kind)
    f = synk.function([], (draws, "gather"), updates=updates)
    a = f()
    g = synk.function([], (draws * 1, "gather"), updates=updates)  # made after the stream has been used
    b, c = g(), f()
    values = np.array([a, b, c])
    assert len(np.unique(values)) == values.size
    draws, updates = stream(kind)
    serial = compile_serial([], draws, updates=updates)
    np.testing.assert_array_equal(values[:, :K], [serial() for _ in range(3)])


def draw_mask(kind, x):
    if kind == "MRG":
        from theano.sandbox.rng_mrg import MRG_RandomStreams

        return MRG_RandomStreams(1).binomial(size=x.shape, p=0.5, dtype="float64")
    if kind == "RandomStreams":
        return T.shared_randomstreams.RandomStreams(1).binomial(size=x.shape, p=0.5, dtype="float64")
    return T.random.utils.RandomStream(1).bernoulli(0.5, size=x.shape).astype("float64")


@pytest.mark.parametrize("kind", ["RandomStream"] if NAME == "pytensor" else KINDS)
def test_dropout_masks_differ_between_ranks_calls_and_slices(kind, two_ranks_per_test):
    x = T.dmatrix("x")
    f = synk.function([x], (x * draw_mask(kind, x), "gather"))
    ones = np.ones((8, 40))
    masks = [*np.split(f(ones), 2), *np.split(f(ones, num_slices=2), 4)]
    assert all(0.25 < m.mean() < 0.75 for m in masks)
    firsts = [m[:2].tobytes() for m in masks]
    assert len(set(firsts)) == len(firsts)


# -- streams over the lives of ranks ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_random_numbers_do_not_repeat_after_uneven_draws(fork, kind):
    # With two rows the third rank, the master, has none and draws nothing; its stream does not affect the others'.
    x = T.dvector("x")
    values = []
    fork(3, master_rank=2)
    draws, updates = stream(kind)
    f = synk.function([x], (draws + 0 * x.sum(), "gather"), updates=updates)
    for size in (3, 2):
        values += [f(np.ones(2)) for _ in range(3)]
        synk.close()
        fork(size, master_rank=size - 1)
    values += [f(np.ones(2)) for _ in range(2)]
    values = np.concatenate(values)
    assert len(np.unique(values)) >= values.size - 1
    # With two ranks and a row on the master, its draws equal those of the serial script.
    draws, updates = stream(kind)
    serial = compile_serial([], draws, updates=updates)
    np.testing.assert_array_equal([serial(), serial()], values[-4 * K :].reshape(2, 2, K)[:, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_random_streams_repeat_over_several_forks(fork, kind):
    def run():
        draws, updates = stream(kind)
        f = None
        values = []
        for size in (2, 3):
            fork(size)
            if f is None:
                f = synk.function([], (draws, "gather"), updates=updates)
            values += [f(), f()]
            synk.close()
        return np.concatenate(values)

    np.testing.assert_array_equal(run(), run())


# -- seeded, saved and gathered --------------------------------------------------------------------------------


def get_generator(draws):
    """Return the shared variable from which numbers are drawn."""
    (generator,) = [s for s in get_library(draws).find_shareds([draws]) if get_library(s).is_generator(s)]
    return generator


def get_initial_generator(kind, seed):
    """Return the initial generator of `stream`'s variable."""
    return get_library(draws := stream(kind, seed)[0]).copy_generator(get_generator(draws))


@pytest.mark.parametrize("kind", KINDS)
def test_random_state_is_saved_and_restored(fork, kind):
    fork(3)
    draws, updates = stream(kind)
    f = synk.function([], (draws, "gather"), updates=updates)
    generator = get_generator(draws)
    f()
    saved = pickle.loads(pickle.dumps(synk.gather(generator)))
    assert len(saved) == 3
    expected = [f(), f()]
    for r in range(3):
        synk.set_value(r, generator, saved[r])
    np.testing.assert_array_equal([f(), f()], expected)
    # First on one rank, then on new ranks.
    saved_state = synk.get_value(1, generator)
    after = f()
    synk.set_value(1, generator, saved_state)
    np.testing.assert_array_equal(f()[K : 2 * K], after[K : 2 * K])
    synk.close()
    fork(3)
    for r in range(3):
        synk.set_value(r, generator, saved[r])
    np.testing.assert_array_equal([f(), f()], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_broadcast_sets_generators_of_all_ranks(fork, kind):
    fork(3, master_rank=1)
    first = draw_on_ranks(kind, seed=8)
    draws, updates = stream(kind, seed=3)
    f = synk.function([], (draws, "gather"), updates=updates)
    generator = get_generator(draws)
    w = shared(np.zeros(2), "w")
    synk.function([], (w, "gather"))()

    def again():
        return np.array([f() for _ in range(2)]).reshape(2, 3, K)

    f()
    # The numbers equal those of functions made with that seed.
    synk.broadcast(generator, get_initial_generator(kind, 8))
    np.testing.assert_array_equal(again(), first)
    synk.broadcast([w, generator], [[1.0, 2.0], get_initial_generator(kind, 8)])
    np.testing.assert_array_equal(again(), first)
    np.testing.assert_array_equal(synk.gather([generator, w])[1], [[1, 2]] * 3)
    # A value that the user has set in the master's variable is used.
    generator.set_value(get_initial_generator(kind, 8))
    synk.broadcast(generator)
    np.testing.assert_array_equal(again(), first)
    # New ranks draw other numbers.
    synk.close()
    fork(3, master_rank=1)
    assert not np.isin(again()[:, [0, 2]], first).any()


@pytest.mark.parametrize("kind", KINDS)
def test_collectives_refuse_generators(kind, two_ranks_per_test):
    draws, updates = stream(kind)
    generator = get_generator(draws)
    generator.name = "rng"
    f = synk.function([], (draws, "gather"), updates=updates)
    synk.gather(generator)
    for act in (
        lambda: synk.reduce(generator, "max"),
        lambda: synk.all_reduce(generator, "max"),
        lambda: synk.all_gather(generator),
        lambda: synk.scatter(generator, np.ones((2, 6), "int32")),
        lambda: synk.get_shapes(generator),
    ):
        with pytest.raises(TypeError, match="^shared_vars: 'rng' is a random generator, which only broadcast.* take$"):
            act()
    for act in (
        lambda: synk.broadcast(generator, 7.5),
        lambda: synk.set_value(1, generator, "seed"),
    ):
        with pytest.raises((TypeError, ValueError), match="^values: 'rng'"):
            act()
    np.testing.assert_array_equal(f(), draw_on_ranks(kind, calls=1, n=2)[0].reshape(-1))


if NAME == "pytensor":

    def test_distribute_refuses_generators_without_jumps(fork):
        fork(2)
        draws, updates = stream("SFC64")
        f = synk.function([], (draws, "gather"), updates=updates)
        for start in (synk.distribute, f):
            with pytest.raises(
                TypeError, match="SFC64 can't differ between ranks: it has no method jumped; use .*PCG64"
            ):
                start()
        np.testing.assert_array_equal(synk.function([], (T.ones(1), "gather"))(), [1, 1])

    @numpys_numbers
    def test_random_on_one_rank_needs_no_generator_jumps(fork):
        fork(1)
        draws, updates = stream("SFC64")
        serial_draws, serial_updates = stream("SFC64")
        result = synk.function([], (draws, "gather"), updates=updates)()
        np.testing.assert_array_equal(result, compile_serial([], serial_draws, updates=serial_updates)())

    @numpys_numbers
    @pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "Philox", "MT19937"])
    def test_numpy_generators_are_jumped_by_rank(fork, kind):
        fork(3)
        values = draw_on_ranks(kind, calls=1)[0]
        for r in range(3):
            generator = np.random.Generator(getattr(np.random, kind)(3).jumped(r))
            np.testing.assert_array_equal(values[r], generator.normal(size=K))

else:

    class TestMRG:
        """Jumps of MRG31k3p equal Theano's jumps and steps."""

        @pytest.fixture
        def library(self):
            from synkhronos.graph_libraries import theano_mrg

            return theano_mrg

        @pytest.fixture
        def theano_mrg(self):
            from theano.sandbox import rng_mrg

            return rng_mrg

        STATE = np.array([[12345] * 6, [1, 2, 3, 4, 5, 6], [2147483646, 0, 7, 2147462578, 0, 9]], "int32")

        @pytest.mark.parametrize("exponent", [72, 134])
        def test_mrg_matrix_powers_equal_theanos(self, library, theano_mrg, exponent):
            for number, (matrix, modulus) in enumerate(library._RECURRENCES, 1):
                power = library._compute_matrix_power(matrix, 2**exponent, modulus)
                np.testing.assert_array_equal(power.astype("int64"), getattr(theano_mrg, f"A{number}p{exponent}"))

        @pytest.mark.parametrize("exponent, function", [(72, "ff_2p72"), (134, "ff_2p134")])
        def test_mrg_jump_equals_theanos(self, library, theano_mrg, monkeypatch, exponent, function):
            monkeypatch.setattr(library, "_JUMP_STEPS", 2**exponent)
            expected = [getattr(theano_mrg, function)(row) for row in self.STATE]
            np.testing.assert_array_equal(library.jump_mrg(self.STATE, 1), expected)

        @pytest.mark.parametrize("steps", [0, 1, 2, 100])
        def test_mrg_jump_equals_single_steps(self, library, theano_mrg, monkeypatch, steps):
            monkeypatch.setattr(library, "_JUMP_STEPS", 1)
            stepped = self.STATE.copy()
            for row in stepped:
                for _ in range(steps):
                    theano_mrg.mrg_next_value(row.copy(), row, np.float64(1), np.int32(0), np.int32(0))
            jumped = library.jump_mrg(self.STATE, steps)
            np.testing.assert_array_equal(jumped, stepped)
            assert jumped.dtype == self.STATE.dtype

        def test_mrg_jumps_add_up(self, library):
            state = library.jump_mrg(self.STATE, 1)
            np.testing.assert_array_equal(
                library.jump_mrg(library.jump_mrg(state, 1), 1), library.jump_mrg(self.STATE, 3)
            )
            assert not np.any(np.all(state == self.STATE, axis=1))

        def test_mrg_jumps_of_many_ranks_fit_the_period(self, library):
            # The period is about 2**185, and a stream of a random variable has 2**134 numbers.
            assert 1024 * library._JUMP_STEPS < 2**184 and library._JUMP_STEPS > 2**134 * 2**30


@pytest.mark.skipif(NAME != "pytensor" or XLA, reason="Theano has no JAX mode")
def test_random_streams_import_no_jax():
    """The README's first command works without JAX."""
    program = (
        "import sys; sys.modules['jax'] = None\n"
        "import numpy as np, pytensor, synkhronos as synk\n"
        "rng = pytensor.shared(np.random.default_rng(1))\n"
        "synk.fork(2, use_gpu=False)\n"
        "following, draws = rng.normal(size=(3,))\n"
        "f = synk.function([], (draws, 'gather'), updates=[(rng, following)])\n"
        "print(len(f()))\n"
        "synk.close()\n"
    )
    assert run_code(program) == "6\n"
