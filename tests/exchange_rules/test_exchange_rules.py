"""Exchange rules equal their formulas in NumPy, and keep their invariants."""

from types import SimpleNamespace

import numpy as np
import oracle
import pytest
import rule_programs as programs
from hypothesis import given
from hypothesis import strategies as st
from library import DEVICE, GPU_DEVICE, NAME, XLA, fork_ranks, limit_examples, shared

import synkhronos as synk
from synkhronos import exchange_rules
from synkhronos.exchange_rules import elastic as elastic_rule
from synkhronos.exchange_rules.rule import round_to_bfloat16
from synkhronos.exchange_rules.state import FlatVariables
from synkhronos.training.loops.batch_loop import PeriodicExchange

# As in conftest.py, 3 ranks cover all cases of 2; 4 are a power of two, by which weights are halved exactly.
SIZES = [1, 3] if DEVICE == "jax" else [1, 3, 4]
D, STEPS, ETA = 7, 24, 0.1
#: Values of the parameter `on_device`: whether variables are JAX arrays.
ON_DEVICE = [False, True] if XLA else [False]
CLOSE = {"rtol": 1e-13, "atol": 1e-13}


@pytest.fixture(scope="module", params=SIZES)
def n_ranks(request, no_ranks):
    """Fork ranks of each size for all tests of the module; yield the size."""
    fork_ranks(request.param)
    yield request.param
    synk.close()


def make_problem():
    """Return the curvatures and optima of quadratic losses, for each step and rank."""
    rng = np.random.default_rng(0)
    return rng.uniform(0.5, 2, (4, 5, D)), rng.normal(size=(4, 5, D))


X0 = np.random.default_rng(1).normal(size=D)


def make_variables(x=X0, dtype="float64"):
    x = np.asarray(x, dtype)
    return [shared(x[:3].copy(), "a"), shared(x[3:].reshape(2, -1).copy(), "b")]


def train(rule, optimizer="sgd", steps=STEPS, eta=ETA, on_device=XLA):
    """Train; return the traces of all ranks, the report, the rule's state on each rank, and the numbers of exchanges."""
    n = synk.ranks.get_session().size
    memory = exchange_rules.allocate_shared_arrays(rule, n, D, np.dtype("float64"))
    results = synk.run(
        programs.train,
        rule,
        make_variables(),
        make_variables(0 * X0),
        memory,
        make_problem(),
        optimizer,
        eta,
        steps,
        on_device,
    )
    reports = [np.asarray(result[1]) for result in results]
    for other in reports[1:]:
        np.testing.assert_array_equal(reports[0], other)
    return (
        np.array([result[0] for result in results]),
        reports[0],
        [result[2] for result in results],
        [result[3] for result in results],
    )


def make_oracle_arguments(n, optimizer="sgd"):
    return n, make_problem(), X0, optimizer, ETA, STEPS


class Steps(exchange_rules.LocalSGD):
    """Collects the steps after which ranks exchange."""

    def exchange(self, context, state):
        state.own.setdefault("steps", []).append(state.step)


@pytest.mark.parametrize("max_steps_per_launch", [1, 64])
@pytest.mark.parametrize(
    ("period", "expected"),
    [
        (lambda step: max(1, step), [1, 2, 4, 8, 16, 32]),
        (lambda step: 10 if step < 5 else 8, [10, 18, 26, 34]),
        (lambda step: 0, range(1, 41)),
    ],
    ids=["rising", "falling", "zero"],
)
def test_callable_period_is_called_with_the_step_of_the_last_exchange(period, expected, max_steps_per_launch):
    state, context = SimpleNamespace(step=0, steps_since_exchange=0, own={}), SimpleNamespace(wait_seconds=0.0)
    exchange = PeriodicExchange(context, Steps(period), state, {"exchange": 0.0, "wait": 0.0})
    while state.step < 40:
        if exchange.advance(min(exchange.restart_countdown(), max_steps_per_launch, 40 - state.step)):
            exchange.run()
    assert state.own["steps"] == list(expected)


# -- trainings equal formulas in NumPy -------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "scaled"])
def test_local_sgd_equals_its_formula(n_ranks, period, optimizer):
    expected = oracle.averaging(*make_oracle_arguments(n_ranks, optimizer), oracle.make_schedule(period))
    trace, report, _, _ = train(exchange_rules.LocalSGD(period), optimizer)
    np.testing.assert_allclose(trace, expected, **CLOSE)
    np.testing.assert_allclose(report, expected[:, -1].mean(0), **CLOSE)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_local_sgd_of_one_step_is_bsp_of_parameters(n_ranks, optimizer):
    trace, report, _, _ = train(exchange_rules.LocalSGD(1), optimizer)
    expected, expected_report, _, _ = train(exchange_rules.BSP("params"), optimizer)
    np.testing.assert_allclose(trace, expected, **CLOSE)
    np.testing.assert_allclose(report, expected_report, **CLOSE)


def test_bsp_of_parameters_equals_its_formula(n_ranks):
    for optimizer in ("sgd", "momentum"):
        trace = train(exchange_rules.BSP("params"), optimizer)[0]
        np.testing.assert_allclose(trace, [oracle.bsp(*make_oracle_arguments(n_ranks, optimizer))] * n_ranks, **CLOSE)
    if n_ranks > 1:
        assert (
            np.abs(
                train(exchange_rules.BSP("params"), "scaled")[0][0]
                - oracle.bsp(*make_oracle_arguments(n_ranks, "scaled"))
            ).max()
            > 1e-2
        )


def test_postlocal_is_bsp_up_to_its_start(n_ranks):
    rule = exchange_rules.PostLocal(period=4, start=10)
    trace = train(rule)[0]
    np.testing.assert_allclose(trace[:, :11], [oracle.bsp(*make_oracle_arguments(n_ranks))[:11]] * n_ranks, **CLOSE)
    np.testing.assert_allclose(
        trace, oracle.averaging(*make_oracle_arguments(n_ranks), lambda s: s <= 10 or (s - 10) % 4 == 0), **CLOSE
    )


@pytest.mark.parametrize("period", [1, 4])
@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_easgd_synchronous_equals_its_formula(n_ranks, period, beta):
    expected, centre = oracle.elastic(*make_oracle_arguments(n_ranks), oracle.make_schedule(period), beta)
    trace, report, states, _ = train(exchange_rules.EASGD(beta, period, asynchronous=False))
    np.testing.assert_allclose(trace, expected, **CLOSE)
    np.testing.assert_allclose(report, centre, **CLOSE)


@pytest.mark.parametrize("period", [1, 3])
def test_downpour_synchronous_equals_its_formula(n_ranks, period):
    expected = oracle.downpour(*make_oracle_arguments(n_ranks), oracle.make_schedule(period))
    trace = train(exchange_rules.Downpour(period, period, asynchronous=False), eta=ETA)[0]
    np.testing.assert_allclose(trace, expected, **CLOSE)


def test_slowmo_equals_its_formula(n_ranks):
    expected = oracle.slow_momentum(*make_oracle_arguments(n_ranks), oracle.make_schedule(4), lr=0.8, momentum=0.6)
    trace = train(exchange_rules.SlowMo(4, lr=0.8, momentum=0.6))[0]
    np.testing.assert_allclose(trace, expected, **CLOSE)


def test_diloco_equals_its_formula(n_ranks):
    expected = oracle.outer_nesterov(*make_oracle_arguments(n_ranks), oracle.make_schedule(4), lr=0.7, momentum=0.9)
    trace = train(exchange_rules.DiLoCo(4))[0]
    np.testing.assert_allclose(trace, expected, **CLOSE)


def test_diloco_and_slowmo_have_other_rules_as_special_cases(n_ranks):
    local = train(exchange_rules.LocalSGD(4))[0]
    np.testing.assert_allclose(train(exchange_rules.DiLoCo(4, lr=1, momentum=0))[0], local, **CLOSE)
    np.testing.assert_allclose(train(exchange_rules.SlowMo(4, lr=1, momentum=0))[0], local, **CLOSE)
    heavy = train(exchange_rules.DiLoCo(4, lr=0.8, momentum=0.6, nesterov=False))[0]
    np.testing.assert_allclose(train(exchange_rules.SlowMo(4, lr=0.8, momentum=0.6))[0], heavy, **CLOSE)
    serial = oracle.serial_nesterov(n_ranks, make_problem(), X0, 0.7 * ETA, STEPS, 0.9)
    np.testing.assert_allclose(train(exchange_rules.DiLoCo(1))[0], [serial] * n_ranks, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(
        train(exchange_rules.DiLoCo(1, 1, 0))[0], [oracle.bsp(*make_oracle_arguments(n_ranks))] * n_ranks, **CLOSE
    )


def test_own_exchange_rule_is_accepted(n_ranks):
    expected = oracle.train(
        *make_oracle_arguments(n_ranks),
        lambda xs: [0.5 * (x + np.mean(xs, axis=0)) for x in xs],
        oracle.make_schedule(5),
    )
    np.testing.assert_allclose(train(programs.Halfway())[0], expected, **CLOSE)


@pytest.mark.parametrize("state", ["average", "reset"])
def test_optimizer_state_is_averaged_or_reset_at_an_exchange(n_ranks, state):
    x, v = [X0.copy() for _ in range(n_ranks)], [0 * X0 for _ in range(n_ranks)]
    for step in range(STEPS):
        for r in range(n_ranks):
            x[r], v[r] = programs.take_local_step(
                "momentum", x[r], v[r], programs.compute_gradient(make_problem(), r, step, x[r]), ETA
            )
        if step % 3 == 2:
            x = [np.mean(x, axis=0)] * n_ranks
            v = [np.mean(v, axis=0) if state == "average" else 0 * X0] * n_ranks
    np.testing.assert_allclose(train(exchange_rules.LocalSGD(3, state), "momentum")[0][:, -1], x, **CLOSE)


# -- exchanges of asynchronous rules ----------------------------------------------------------------------------------------------


def exchange_elastic(n, alpha, vectors, centre):
    rule = exchange_rules.EASGD(alpha=alpha)
    memory = exchange_rules.allocate_shared_arrays(rule, n, D, np.dtype("float64"))
    results = synk.run(programs.exchange_in_turn, rule, make_variables(), memory, vectors, centre)
    return np.array([x for x, _ in results]), results[0][1]


def test_easgd_exchange_keeps_the_sum(n_ranks):
    vectors, centre = np.random.default_rng(2).normal(size=(n_ranks, D)), np.ones(D)
    xs, new = exchange_elastic(n_ranks, 0.3, vectors, centre)
    np.testing.assert_allclose(xs.sum(0) + new, vectors.sum(0) + centre, **CLOSE)
    assert np.abs(new - centre).min() > 1e-3


def test_easgd_alpha_of_one_swaps_and_half_averages(n_ranks):
    vectors, centre = np.random.default_rng(3).integers(-64, 64, (n_ranks, D)) * 8.0, np.full(D, 16.0)
    xs, new = exchange_elastic(n_ranks, 1.0, vectors, centre)
    np.testing.assert_array_equal(xs, [centre, *vectors[:-1]])  # each rank takes the vector of the rank before it
    np.testing.assert_array_equal(new, vectors[-1])
    xs, new = exchange_elastic(n_ranks, 0.5, vectors, centre)
    np.testing.assert_array_equal(xs[-1], new)
    np.testing.assert_array_equal(xs[0], (vectors[0] + centre) / 2)


@pytest.mark.parametrize(("push", "fetch"), [(2, 2), (4, 6)])
def test_downpour_exchanges_again_after_an_interrupt(push, fetch):
    rule = exchange_rules.Downpour(push, fetch)
    state = SimpleNamespace(step=push, since=2)  # the steps were counted, and nothing was exchanged
    state.step += rule.count_steps_left(state)
    assert state.step % 2 == 0  # only these steps push or fetch


ELASTIC = [
    exchange_rules.EASGD(period=3),
    exchange_rules.EAMSGD(period=3, momentum=0.9),
    exchange_rules.EAMSGD(period=3, momentum=0),
]


@pytest.mark.parametrize("on_device", ON_DEVICE)
@pytest.mark.parametrize("rule", ELASTIC, ids=repr)
def test_easgd_exchanges_equal_a_replay(n_ranks, rule, on_device):
    """Results have the same bits as NumPy's, with the exchanges in the order in which they happened."""
    optimizer = "momentum" if isinstance(rule, exchange_rules.EAMSGD) else "sgd"
    trace, report, _, numbers = train(rule, optimizer, on_device=on_device)
    momentum, alpha = getattr(rule, "momentum", 0), 0.9 / n_ranks
    centre = X0.copy()
    x, v, steps_of_rank = [X0.copy() for _ in range(n_ranks)], [0 * X0 for _ in range(n_ranks)], [0] * n_ranks
    order = sorted((number, step, r) for r, exchanges in enumerate(numbers) for number, step in exchanges)
    assert [number for number, _, _ in order] == list(range(n_ranks * (STEPS // 3)))
    for _, step, r in order:
        while steps_of_rank[r] <= step:
            g = programs.compute_gradient(make_problem(), r, steps_of_rank[r], x[r])
            x[r], v[r] = programs.take_local_step(optimizer, x[r], v[r], g, ETA)
            steps_of_rank[r] += 1
            if steps_of_rank[r] <= step:
                np.testing.assert_array_equal(trace[r][steps_of_rank[r]], x[r])
        d = (x[r] - momentum * v[r]) if momentum else x[r].copy()
        d -= centre
        d *= alpha
        x[r], centre = x[r] - d, centre + d
        np.testing.assert_array_equal(trace[r][steps_of_rank[r]], x[r])
    np.testing.assert_array_equal(report, centre)


@pytest.mark.parametrize("on_device", ON_DEVICE)
def test_downpour_exchanges_equal_a_replay(n_ranks, on_device):
    trace, report, _, numbers = train(exchange_rules.ASGD(3), eta=ETA / n_ranks, on_device=on_device)
    centre, wrote = X0.copy(), -1
    x, base, steps_of_rank = [X0.copy() for _ in range(n_ranks)], [X0.copy() for _ in range(n_ranks)], [0] * n_ranks
    for _, step, r in sorted((number, step, r) for r, exchanges in enumerate(numbers) for number, step in exchanges):
        while steps_of_rank[r] <= step:
            x[r], _ = programs.take_local_step(
                "sgd", x[r], 0, programs.compute_gradient(make_problem(), r, steps_of_rank[r], x[r]), ETA / n_ranks
            )
            steps_of_rank[r] += 1
        centre = x[r].copy() if wrote in (-1, r) else centre + (x[r] - base[r])
        x[r], base[r], wrote = centre.copy(), centre.copy(), r
        np.testing.assert_array_equal(trace[r][steps_of_rank[r]], x[r])
    np.testing.assert_array_equal(report, centre)


def test_base_rule_keeps_ranks_independent(n_ranks):
    trace = train(exchange_rules.ExchangeRule())[0]
    np.testing.assert_array_equal(
        trace, oracle.train(*make_oracle_arguments(n_ranks), lambda xs: xs, oracle.make_schedule(1))
    )


def test_downpour_loses_no_push(n_ranks):
    check_pushes(n_ranks, 100_000 // n_ranks if n_ranks == 4 and NAME == "pytensor" and not XLA else 2_000)


def check_pushes(n, pushes):
    rule = exchange_rules.Downpour()
    memory = exchange_rules.allocate_shared_arrays(rule, n, D, np.dtype("float64"))
    for report in synk.run(programs.add_and_exchange, rule, make_variables(0 * X0), memory, pushes):
        assert report.tolist() == [float(n * pushes)] * D


@pytest.mark.parametrize("on_device", ON_DEVICE)
@pytest.mark.parametrize(("push", "fetch"), [(2, 3), (3, 1), (1, 4)])
def test_downpour_keeps_unpushed_gradients(n_ranks, push, fetch, on_device):
    rule = exchange_rules.Downpour(push, fetch)
    memory = exchange_rules.allocate_shared_arrays(rule, n_ranks, D, np.dtype("float64"))
    for report in synk.run(programs.add_and_exchange, rule, make_variables(0 * X0), memory, 13, on_device):
        np.testing.assert_allclose(report, 13.0 * n_ranks, rtol=1e-12)


# -- gossip, swaps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_device", ON_DEVICE)
def test_gosgd_keeps_weights_and_weighted_mean(n_ranks, on_device):
    if n_ranks == 1:
        pytest.skip("needs two ranks")
    vectors = np.random.default_rng(4).normal(size=(n_ranks, D))
    rng = np.random.default_rng(5)
    sends = [tuple(rng.permutation(n_ranks)[:2].tolist()) for _ in range(9)]
    rule = exchange_rules.GoSGD(1.0)
    memory = exchange_rules.allocate_shared_arrays(rule, n_ranks, D, np.dtype("float64"))
    results = synk.run(programs.send_gossip, rule, make_variables(), memory, vectors, sends, on_device)
    for i in range(len(sends)):
        records = [results[r][0][i] for r in range(n_ranks)]
        total = sum(w + weight_in_flight for w, _, weight_in_flight, _ in records)
        assert total == 1 if n_ranks in (2, 4) else abs(total - 1) < 1e-14
        mean = sum(w * x + weight_in_flight * mail for w, x, weight_in_flight, mail in records)
        np.testing.assert_allclose(mean, vectors.mean(0), **CLOSE)
    np.testing.assert_allclose(results[0][1], vectors.mean(0), **CLOSE)
    assert sum(weight for _, _, weight in results) == pytest.approx(1, abs=1e-14)


def test_gosgd_keeps_weights_above_zero(n_ranks):
    if n_ranks == 1:
        pytest.skip("needs two ranks")
    vectors = np.random.default_rng(6).normal(size=(n_ranks, D))
    rule = exchange_rules.GoSGD(1.0)
    memory = exchange_rules.allocate_shared_arrays(rule, n_ranks, D, np.dtype("float64"))
    results = synk.run(programs.gossip_without_reception, rule, make_variables(), memory, vectors, 1200)
    np.testing.assert_allclose(results[0][0], vectors.mean(0), **CLOSE)
    assert all(weight > 0 for _, weight in results)
    assert sum(weight for _, weight in results) == pytest.approx(1, abs=1e-14)


@pytest.mark.parametrize("on_device", ON_DEVICE)
def test_gosgd_loses_nothing_in_training(n_ranks, on_device):
    trace, report, states, _ = train(exchange_rules.GoSGD(0.5, seed=3), on_device=on_device)
    assert sum(float(state["weight"]) for state in states) == pytest.approx(1, abs=1e-14)
    if n_ranks == 1:
        np.testing.assert_allclose(report, trace[0, -1], **CLOSE)


@pytest.mark.parametrize("replace", [False, True])
def test_swap_exchanges_parameters(n_ranks, replace):
    n_steps, all_sources = 20, set()
    trace, _, _, exchanges = train(exchange_rules.Swap(1, replace, seed=1), steps=n_steps)
    x = [X0.copy() for _ in range(n_ranks)]
    for step in range(n_steps):
        sources = [exchanges[r][step][0] for r in range(n_ranks)]  # the ranks whose parameters ranks have got
        all_sources.add(tuple(sources))
        swapped = [r for r in range(n_ranks) if sources[r] != r]
        if replace:  # one rank of each pair
            assert len(swapped) == n_ranks // 2 and not set(swapped) & {sources[r] for r in swapped}
            assert len({sources[r] for r in swapped}) == n_ranks // 2
        else:
            assert len(swapped) == n_ranks // 2 * 2 and all(sources[sources[r]] == r for r in range(n_ranks))
        x = [
            programs.take_local_step("sgd", x[r], 0, programs.compute_gradient(make_problem(), r, step, x[r]), ETA)[0]
            for r in range(n_ranks)
        ]
        x = [x[source] for source in sources]
        np.testing.assert_allclose(trace[:, step + 1], x, **CLOSE)
    assert len(all_sources) > 1 or n_ranks == 1 or (n_ranks == 2 and not replace)  # pairs are chosen at random


# -- precision -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "bits"), [("float32", 24), ("float16", 11), ("bfloat16", 8)])
def test_average_error_is_within_the_precision(n_ranks, precision, bits):
    vectors = np.random.default_rng(6).uniform(1, 2, (n_ranks, 50_000)).astype("float32")
    for mean in synk.run(programs.average_vectors, make_variables(), vectors, precision):
        assert np.abs(mean / vectors.mean(0, dtype="float64") - 1).max() <= 2.5 * 2.0**-bits
        assert mean.dtype == np.float32


def test_average_in_float16_does_not_overflow(n_ranks):
    vectors = np.full((n_ranks, 10), 40_000, "float32")
    for mean in synk.run(programs.average_vectors, make_variables(), vectors, "float16"):
        assert mean.tolist() == [np.float32(np.float16(40_000))] * 10


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "make",
    [exchange_rules.LocalSGD, exchange_rules.SlowMo, exchange_rules.DiLoCo, programs.MeanRule],
    ids=lambda m: m.__name__,
)
def test_rules_with_precision_16_stay_close(n_ranks, make, precision):
    trace, report, _, _ = train(make(3, precision=precision))
    exact = train(make(3))[0]
    for r in range(1, n_ranks):
        np.testing.assert_array_equal(trace[0, 3::3], trace[r, 3::3])
    assert np.abs(trace - exact).max() < (0.01 if precision == "float16" else 0.05)


@limit_examples(200)
@given(st.floats(-(2.0**127), 2.0**127, width=32))
def test_bfloat16_rounds_to_nearest(value):
    rounded = float(round_to_bfloat16(np.array([value], np.float32))[0])
    ulp = 2.0 ** max(np.floor(np.log2(abs(value))) - 7, -133) if value else 0
    assert abs(rounded - value) <= ulp / 2


# -- vectors, options ----------------------------------------------------------------------------------------


def test_flatten_variables_can_be_inverted(n_ranks):
    for before, after, kind in synk.run(programs.double_vector, make_variables(), XLA):
        np.testing.assert_array_equal(before, X0)
        np.testing.assert_array_equal(after[0], 2 * X0[:3])
        np.testing.assert_array_equal(after[1], 2 * X0[3:].reshape(2, -1))
        assert kind.startswith("jaxlib" if XLA else "numpy")


def test_easgd_alpha_has_a_stability_bound():
    """Round-robin EASGD of a quadratic is stable up to α = (4 - 2η)/(4 - η), and no further: 1412.6651, section 3.2."""

    def radius(alpha, eta, p=3):
        moves = np.eye(p + 1)
        for r in range(p):
            step = np.eye(p + 1)
            step[r, r], step[r, p] = 1 - eta - alpha, alpha
            step[p, r], step[p, p] = alpha, 1 - alpha
            moves = step @ moves
        return np.abs(np.linalg.eigvals(moves)).max()

    for eta in (0.1, 0.5, 1.0, 1.5):
        bound = (4 - 2 * eta) / (4 - eta)
        assert radius(bound, eta) == pytest.approx(1, abs=1e-6)
        assert radius(bound + 0.01, eta) > 1 > radius(bound - 0.01, eta)


def test_easgd_in_float32_does_not_drift():
    rng = np.random.default_rng(0)
    xs, centre = rng.normal(size=(4, 1000)).astype("float32"), np.zeros(1000, "float32")
    total = xs.sum(0, dtype="float64") + centre
    for i in range(2000):
        elastic_rule.move_together(xs[i % 4], centre, 0.225)
    assert np.abs(xs.sum(0, dtype="float64") + centre - total).max() < 5e-5


WRONG = [
    (lambda: exchange_rules.EASGD(beta=0), "beta: expected a number above 0, up to 1, got 0"),
    (lambda: exchange_rules.EASGD(alpha=1.1), "alpha: expected a number above 0, up to 1, got 1.1"),
    (lambda: exchange_rules.EASGD(alpha="x"), "alpha: expected a number, got 'x'"),
    (lambda: exchange_rules.LocalSGD(0), "period: expected at least 1, got 0"),
    (lambda: exchange_rules.LocalSGD(1.5), "period: expected a number of steps, got 1.5"),
    (
        lambda: exchange_rules.LocalSGD(state="mean"),
        r"state: expected one of \('keep', 'average', 'reset'\), got 'mean'",
    ),
    (lambda: exchange_rules.LocalSGD(precision="int8"), "precision: expected one of"),
    (lambda: exchange_rules.BSP("mean"), r"average: expected one of \('gradient', 'params'\), got 'mean'"),
    (
        lambda: exchange_rules.BSP(precision="float16"),
        "precision: expected None or 'bfloat16' for gradients, got 'float16'",
    ),
    (lambda: exchange_rules.BSP(exclude=callable), "exclude: expected average='params'"),
    (lambda: exchange_rules.GoSGD(0), "probability: expected a number above 0, up to 1, got 0"),
    (lambda: exchange_rules.EAMSGD(momentum=1), "momentum: expected a number from 0, below 1, got 1"),
    (lambda: exchange_rules.Downpour(1, 2, asynchronous=False), "push, fetch: expected equal numbers"),
    (lambda: exchange_rules.LocalSGD(exclude="bn"), "exclude: expected a function"),
    (lambda: exchange_rules.PostLocal(start=0), "start: expected at least 1, got 0"),
    (lambda: exchange_rules.SlowMo(lr=0), "lr: expected a positive number, got 0"),
    (lambda: exchange_rules.EASGD(asynchronous="no"), "asynchronous: expected True or False, got 'no'"),
    (lambda: exchange_rules.Downpour(asynchronous="no"), "asynchronous: expected True or False, got 'no'"),
    (lambda: exchange_rules.DiLoCo(nesterov="no"), "nesterov: expected True or False, got 'no'"),
    (lambda: exchange_rules.Swap(replace="no"), "replace: expected True or False, got 'no'"),
    (lambda: exchange_rules.Swap(seed=1.5), "seed: expected an integer, got 1.5"),
    (lambda: exchange_rules.GoSGD(seed=-1), "seed: expected no negative number, got -1"),
]


@pytest.mark.parametrize(("make", "message"), WRONG, ids=[message for _, message in WRONG])
def test_rules_refuse_wrong_options(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_rule_repr_makes_an_equal_rule():
    rules_with_options = [
        exchange_rules.ASGD(3), exchange_rules.BSP("params"), exchange_rules.DiLoCo(momentum=0.9999999), exchange_rules.Downpour(2, 4), exchange_rules.EAMSGD(),
        exchange_rules.EASGD(alpha=0.5), exchange_rules.GoSGD(), exchange_rules.LocalSGD(5), exchange_rules.PostLocal(), exchange_rules.SlowMo(), exchange_rules.Swap(),
        programs.Halfway(),
    ]  # fmt: skip
    for rule in rules_with_options:
        again = eval(repr(rule), {**vars(exchange_rules), "Halfway": programs.Halfway})
        assert again.get_options() == rule.get_options() and repr(again) == repr(rule)
    assert repr(rules_with_options[0]) == "ASGD(period=3)"


@pytest.mark.skipif(not XLA, reason="variables that can hold a device's arrays")
def test_unflatten_moves_variables_to_the_device(n_ranks):
    # Theano-MPI's classes create vels2 from NumPy arrays; on a GPU each step would write them through host memory.
    vector, values = FlatVariables(shareds := make_variables()), np.arange(float(D))
    vector.set(GPU_DEVICE.from_numpy(values))
    assert all(GPU_DEVICE.owns(variable.container.storage[0]) for variable in shareds)
    np.testing.assert_array_equal(vector.to_numpy(), values)
    vector.set(values[::-1].copy())  # values from the host do not move the variables
    assert all(GPU_DEVICE.owns(variable.container.storage[0]) for variable in shareds)
    np.testing.assert_array_equal(vector.to_numpy(), values[::-1])
