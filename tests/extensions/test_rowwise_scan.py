"""Loops (`pytensor.scan`) that `make_rowwise` splits by rows, and loops that it refuses."""

import re

import numpy as np
import pytest

pytensor = pytest.importorskip("pytensor", reason="it is about PyTensor's graphs")
import pytensor.tensor as pt  # noqa: E402
from pytensor.compile.mode import Mode  # noqa: E402
from pytensor.scan.op import Scan  # noqa: E402
from pytensor.scan.utils import until  # noqa: E402

from synkhronos.extensions.distributed_rows import get_rows  # noqa: E402
from synkhronos.extensions.pymc.row_restrictor import NotRowwiseError, make_rowwise  # noqa: E402
from synkhronos.extensions.pymc.rowwise_rules import RULES  # noqa: E402
from synkhronos.extensions.pymc.rowwise_scan import restrict_scan  # noqa: E402

N, STEPS = 9, 4
RNG = np.random.default_rng(5)
X, Y, TIMES = RNG.normal(size=(N, STEPS)), RNG.normal(size=N), RNG.normal(size=STEPS)
x, y, times = pt.constant(X), pt.constant(Y), pt.constant(TIMES)
shared_x = pytensor.shared(X, "shared_x")
a, w, levels = pt.dscalar("a"), pt.dvector("w"), pt.dvector("levels")
PLAIN = Mode(linker="py", optimizer=None)
VALUES = {a: 0.7, w: RNG.normal(size=STEPS), levels: RNG.normal(size=N)}
GROUP = RNG.integers(0, 2, N)
zero = pt.constant(0.0, dtype="float64")


def loop(step, sequences=(), states=None, constants=(a,), **kwargs):
    """Return the results of `pytensor.scan`, which needs float64 as the dtype of states."""
    return pytensor.scan(
        step,
        sequences=list(sequences),
        outputs_info=states,
        non_sequences=list(constants),
        strict=True,
        return_updates=False,
        **kwargs,
    )


def smooth(x, h, a):
    return a * h + x


def build_two_states():
    h, g = loop(lambda x, h, g, a: [a * h + x * g, pt.tanh(g + h)], [x.T], [y * a, pt.ones_like(y)])
    return h[-1] + g[-1]


def build_states_of_other_shapes():
    h, g, products = loop(
        lambda x, h, g, a: [a * h + x * g.sum(axis=1), pt.tanh(g * h[:, None]), h * x],
        [x.T],
        [y * a, pt.ones((N, 3)) * a, None],
    )
    return h[-1] + g[-1].sum(axis=1) + products.sum(axis=0)


def build_states_with_rows_on_other_axes():
    h, g = loop(lambda x, h, g, a: [a * h + x, pt.tanh(g * x)], [x.T], [y * a, pt.ones((3, N)) * a])
    return h[-1] + g[-1].sum(axis=0)


def build_loop_within_a_loop():
    def compute_row(row, a):
        return loop(smooth, [row], [zero])[-1]

    return loop(compute_row, [x])


def build_forward_algorithm():
    """Return the likelihood of each row's sequence in a Markov model with two hidden states."""

    def step(x, h, a):
        transition = pt.log(pt.stack([[a, 1 - a], [1 - a, a]]))
        return pt.logsumexp(h[:, :, None] + transition, axis=1) + pt.stack([-(x**2), -((x - a) ** 2)], axis=1)

    return pt.logsumexp(loop(step, [x.T], [pt.zeros((N, 2))])[-1], axis=1)


def build_values_of_actions():
    """Return values of two actions that each row has learned, as in models of reinforcement learning."""

    def step(action, reward, values, rate):
        row = pt.arange(N)
        return pt.set_subtensor(values[row, action], values[row, action] + rate * (reward - values[row, action]))

    return loop(step, [pt.cast(x.T > 0, "int64"), x.T], [pt.zeros((N, 2))], [levels])[-1][:, 0] * levels


GOOD = {
    "an autoregression": lambda: loop(smooth, [x.T], [pt.zeros_like(y)])[-1],
    "of what may change": lambda: loop(smooth, [shared_x.T], [pt.zeros_like(shared_x[:, 0])])[-1] * y,
    "initial states from parameters": lambda: loop(smooth, [x.T], [pt.full((N,), a)])[-1],
    "the states of all steps": lambda: loop(smooth, [x.T], [y * a]).T,
    "two states": build_two_states,
    "states of other shapes": build_states_of_other_shapes,
    "states with rows on other axes": build_states_with_rows_on_other_axes,
    "a state without rows": lambda: loop(lambda x, s, h, a: [a * s, s * h + x], [x.T], [a, y])[1][-1],
    "two steps before": lambda: loop(
        lambda x, h1, h2, a: a * h1 + x * h2, [x.T], [{"initial": pt.stack([y, y * a]), "taps": [-1, -2]}]
    )[-1],
    "two steps of a sequence": lambda: loop(
        lambda x1, x0, h, a: a * h + x1 - x0 * 2, [{"input": x.T, "taps": [0, -1]}], [y]
    )[-1],
    "a sequence without rows": lambda: loop(lambda t, w, h, a, y: w * h + t * y, [times, w], [y], [a, y])[-1],
    "columns by an index": lambda: loop(lambda t, h, a, x: a * h + x[:, t], [pt.arange(STEPS)], [y], [a, x])[-1],
    "data in the step": lambda: loop(lambda t, h, a: a * h + t * pt.constant(Y), [times], [y])[-1],
    "a number of steps": lambda: loop(lambda h, a: a * h * (1 - h), states=[y], n_steps=5)[-1],
    "no state": lambda: loop(lambda x, a: a * x + pt.exp(x), [x.T]).sum(axis=0),
    "a mask": lambda: loop(lambda x, m, h, a: pt.where(m, a * h + x, h), [x.T, (x > 0).T], [pt.zeros(N)])[-1],
    "a mean over rows of the data": lambda: loop(lambda x, h, a: a * h + x.mean(), [x.T], [y])[-1],
    "the forward algorithm": build_forward_algorithm,
    "a condition on what is common": lambda: loop(
        lambda x, s, h, a: ([s + a, a * h + x], until(s > 1.2)), [x.T], [zero, y]
    )[1][-1],
    "a step for each row": lambda: loop(lambda row, a: (a * row).sum() / row[0], [x]),
    "one of two outputs": lambda: loop(lambda row, y, a: [(a * row).sum() * y, row * y], [shared_x, y])[0],
    "elements of each row, and parameters": build_values_of_actions,
    "a loop within a loop": build_loop_within_a_loop,
}


@pytest.mark.parametrize("case", GOOD)
def test_loop_over_some_rows_equals_the_whole(case):
    terms = GOOD[case]()
    rowwise, rows = make_rowwise(terms, N, {**RULES, Scan: restrict_scan})
    inputs, options = list(VALUES), {"on_unused_input": "ignore", "mode": PLAIN}
    whole = pytensor.function(inputs, terms, **options)(*VALUES.values())
    values = [get_rows(source) for source in rows.values()]
    assert all(len(value) == N and value.ndim <= 2 and value.size <= X.size for value in values)
    part = pytensor.function([*inputs, *rows], rowwise, **options)
    for chosen in (slice(0, N), slice(2, 6), slice(5, 7)):
        actual = part(*VALUES.values(), *[value[chosen] for value in values])
        np.testing.assert_allclose(actual, whole[chosen], rtol=1e-12)


def find_loops(variable):
    return [node for node in pytensor.graph.traversal.applys_between([], [variable]) if isinstance(node.op, Scan)]


def test_states_are_computed_by_one_loop():
    rowwise, _ = make_rowwise(build_two_states(), N, {**RULES, Scan: restrict_scan})
    assert len(find_loops(rowwise)) == 1


MIXES = "mixes rows, or its number of steps depends on them"
BAD = {
    "a series": (lambda: loop(smooth, [y], [zero]), "mixes rows: a row depends on the rows before"),
    "a mean of a state": (lambda: loop(lambda x, h, a: a * h.mean() + x, [x.T], [y])[-1], MIXES),
    "a cumulative sum": (
        lambda: loop(lambda x, h, a: a * pt.cumsum(h) + x, [x.T], [y])[-1],
        "Cumsum{axis=0} mixes rows",
    ),
    "rows in another order": (lambda: loop(lambda x, h, a: a * h[::-1] + x, [x.T], [y])[-1], "picks rows"),
    "a sum in a common state": (
        lambda: loop(lambda x, s, h, a: [a * s + h.sum(), s * h + x], [x.T], [a, y])[1][-1],
        MIXES,
    ),
    "a condition on rows": (lambda: loop(lambda x, h, a: (a * h + x, until(h.sum() > 1.2)), [x.T], [y])[-1], MIXES),
    "steps by rows": (
        lambda: loop(lambda h, a: a * h, states=[y], n_steps=pt.cast((y * a).sum() ** 2, "int64") + 1)[-1],
        "needs all rows at once",
    ),
    "a matrix of rows and rows": (
        lambda: loop(lambda x, h, a: a * h.T + x, [x.T], [pt.ones((N, N)) * a])[-1][:, 0] * y,
        "has its rows on two axes",
    ),
    "an end after some rows": (
        lambda: loop(lambda y, a: (a * y, until(y > 1.2)), [y]),
        "mixes rows: a row depends on the rows before",
    ),
    "other elements of rows": (
        lambda: loop(lambda x, h, a: pt.inc_subtensor(h[GROUP, GROUP % 2], x), [x.T], [pt.zeros((N, 2))])[-1][:, 0],
        "mixes rows",
    ),
    "rows by an index": (
        lambda: loop(lambda i, a, x: (a * x[i]).sum(), [pt.constant(np.arange(N))], constants=[a, shared_x]),
        "reads shared_x: pass it as a sequence",
    ),
    "random numbers": (
        lambda: pytensor.scan(
            lambda h, rng: (
                h + pt.random.normal(size=(N,), rng=rng),
                {rng: pt.random.normal(rng=rng).owner.outputs[0]},
            ),
            outputs_info=[y],
            non_sequences=[pytensor.shared(np.random.default_rng(0))],
            n_steps=2,
        )[0][-1],
        "draws random numbers",
    ),
    "the gradient of a loop": (
        lambda: pytensor.grad(loop(smooth, [x.T], [y * a])[-1].sum(), a) * y,
        "all rows at once",
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Scan return signature")
@pytest.mark.parametrize("case", BAD)
def test_loops_that_mix_rows_are_refused(case):
    build, message = BAD[case]
    with pytest.raises(NotRowwiseError, match=re.escape(message)):
        make_rowwise(build(), N, {**RULES, Scan: restrict_scan})
