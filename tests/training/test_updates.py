"""Update rules equal those of plain NumPy, for any split of the rows."""

import functools
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from library import NAME, package
from library import tensor as T
from reference_updates import REFERENCE_RUNS, START, X, Y, compute_gradient
from reference_updates import Problem as ReferenceProblem

from synkhronos.training import updates

RULES = [
    "sgd",
    "momentum",
    "nesterov_momentum",
    "adagrad",
    "rmsprop",
    "adadelta",
    "adam",
    "adamax",
    "amsgrad",
]


def make_shape_keyword(*lengths):
    """Return the keyword of `shared` for a type with these lengths, 1 or None."""
    if NAME == "pytensor":
        return {"shape": lengths}
    return {"broadcastable": tuple(length == 1 for length in lengths)}


def compile_function(inputs, outputs=None, **kwargs):
    # Without C code, as only values are tested.
    return package.function(inputs, outputs, mode="FAST_COMPILE", **kwargs)


class Problem(ReferenceProblem):
    """The reference's problem, trained by an update rule in one process."""

    def compile(self, rule):
        grad_updates, param_updates, self.grad_shared = rule
        self.gradient = compile_function([self.x, self.y], self.loss, updates=grad_updates)
        self.update = compile_function([], updates=param_updates)

    def step(self):
        self.gradient(X.astype(self.x.dtype), Y.astype(self.y.dtype))
        self.update()


def make_updates(problem, name, options, **more):
    """Return the updates of a rule of the reference."""
    options = {**options, **more}
    first, _, modifier = name.partition("_with_")
    if not modifier:
        return getattr(updates, first)(problem.loss, problem.params, **options)
    momentum = options.pop("momentum")
    rule = getattr(updates, first)(problem.loss, problem.params, **options)
    return getattr(updates, f"apply_{modifier}")(rule, problem.params, momentum=momentum)


def find_column(rule):
    """Return the options of a rule with which the reference takes larger steps, and the parameters after each step."""
    return [(options, params) for name, options, params in REFERENCE_RUNS if name == rule][-1]


@pytest.mark.parametrize(
    ("rule", "options", "params"), REFERENCE_RUNS, ids=[f"{name}-{options}" for name, options, _ in REFERENCE_RUNS]
)
def test_updates_equal_reference_numbers(rule, options, params):
    problem = Problem()
    problem.compile(make_updates(problem, rule, options))
    for expected in params:
        problem.step()
        np.testing.assert_allclose(problem.values(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_updates_in_float32_equal_reference_numbers(rule):
    options, params = find_column(rule)
    problem = Problem("float32")
    problem.compile(make_updates(problem, rule, options))
    for expected in params:
        problem.step()
        np.testing.assert_allclose(problem.values(), expected, rtol=2e-5, atol=2e-6)
    assert {p.dtype for p in problem.params} == {"float32"}


def test_adam_is_exact_in_float32_from_the_first_step():
    # 1 - 0.999**t in float32 has an error of 5e-5 at t = 1.
    problem = Problem("float32")
    problem.compile(updates.adam(problem.loss, problem.params, learning_rate=1.0, epsilon=0))
    problem.step()
    moved = problem.values() - START
    np.testing.assert_allclose(np.abs(moved), 1, rtol=2e-6)


def test_every_update_rule_is_named_in_a_test():
    assert {name.partition("_with_")[0] for name, *_ in REFERENCE_RUNS} == set(RULES)
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [name for name in updates.__all__ if not re.search(rf"\b{name}\b", tests)] == []


@pytest.mark.parametrize(
    ("rule", "signature"),
    [
        ("sgd", "(loss_or_grads, params, learning_rate)"),
        ("momentum", "(loss_or_grads, params, learning_rate, momentum=0.9)"),
        ("nesterov_momentum", "(loss_or_grads, params, learning_rate, momentum=0.9)"),
        ("adagrad", "(loss_or_grads, params, learning_rate=1.0, epsilon=1e-06)"),
        ("rmsprop", "(loss_or_grads, params, learning_rate=1.0, rho=0.9, epsilon=1e-06)"),
        ("adadelta", "(loss_or_grads, params, learning_rate=1.0, rho=0.95, epsilon=1e-06)"),
        ("adam", "(loss_or_grads, params, learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-08)"),
        ("adamax", "(loss_or_grads, params, learning_rate=0.002, beta1=0.9, beta2=0.999, epsilon=1e-08)"),
        ("amsgrad", "(loss_or_grads, params, learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-08)"),
        ("apply_momentum", "(updates, params=None, momentum=0.9)"),
        ("apply_nesterov_momentum", "(updates, params=None, momentum=0.9)"),
    ],
)
def test_update_signatures_equal_lasagne(rule, signature):
    actual = inspect.signature(getattr(updates, rule))
    bare = [p.replace(annotation=p.empty) for p in actual.parameters.values() if p.name != "weight"]
    assert str(actual.replace(parameters=bare, return_annotation=actual.empty)) == signature


# -- the flat vector -------------------------------------------------------------------------------------


def test_grad_shared_holds_the_raw_gradients():
    problem = Problem()
    problem.compile(updates.sgd(problem.loss, problem.params, learning_rate=0.5))
    problem.gradient(X, Y)
    np.testing.assert_allclose(problem.grad_shared.get_value(), compute_gradient(START), rtol=1e-9)


@functools.cache
def split_problem():
    """Return a problem whose training step is compiled once for all examples."""
    problem = Problem()
    problem.compile(updates.sgd(problem.loss, problem.params, 0.5, weight=problem.x.shape[0]))
    return problem


@given(
    splits=st.lists(st.integers(1, 5), max_size=4).map(sorted),
    op=st.sampled_from([np.mean, np.sum]),
)
@settings(max_examples=30, deadline=None)
def test_updates_with_weight_do_not_depend_on_the_split(splits, op):
    problem = split_problem()
    problem.w.set_value(START[:6].reshape(3, 2))
    problem.b.set_value(START[6:])
    written = []
    for rows in np.split(np.arange(5), splits):
        if len(rows):
            problem.gradient(X[rows], Y[rows])
            written.append(problem.grad_shared.get_value())
        else:
            # A rank without rows; the caller sets its vector to zero.
            written.append(np.zeros_like(problem.grad_shared.get_value()))
    problem.grad_shared.set_value(op(written, axis=0))
    problem.update()
    np.testing.assert_allclose(problem.values(), START - 0.5 * compute_gradient(START), rtol=1e-9)


def test_updates_with_a_constant_weight():
    rule, options, params = REFERENCE_RUNS[-1]
    problem = Problem()
    problem.compile(make_updates(problem, rule, options, weight=3))
    for expected in params:
        problem.step()
        np.testing.assert_allclose(problem.values(), expected, rtol=1e-9)


def test_updates_accept_gradients_instead_of_loss():
    options, params = find_column("adam")
    problem = Problem()
    problem.compile(updates.adam(package.grad(problem.loss, problem.params), problem.params, **options))
    problem.step()
    np.testing.assert_allclose(problem.values(), params[0], rtol=1e-9)


def test_updates_keep_parameter_dtypes():
    options, params = find_column("amsgrad")
    problem = Problem("float64", w_dtype="float32")
    problem.compile(make_updates(problem, "amsgrad", options, weight=problem.x.shape[0]))
    assert problem.grad_shared.dtype == "float64"
    for expected in params:
        problem.step()
        np.testing.assert_allclose(problem.values(), expected, rtol=2e-5, atol=2e-6)
    assert (problem.w.get_value().dtype, problem.b.get_value().dtype) == ("float32", "float64")


def test_grad_shared_is_at_least_float32():
    w = package.shared(np.ones(3, "float16"))
    assert updates.sgd((w**2).sum(), [w], 0.1).grad_shared.dtype == "float32"


@pytest.mark.parametrize("floatx", ["float32", "float64"])
@pytest.mark.parametrize("rule", RULES)
def test_updates_keep_float32(rule, floatx, monkeypatch):
    monkeypatch.setattr(package.config, "floatX", floatx)
    w = package.shared(np.ones(3, "float32"))
    learning_rate = package.shared(np.asarray(0.1, "float64"))
    _, param_updates, _ = getattr(updates, rule)((w**2).sum(), [w], learning_rate=learning_rate)
    assert all(shared.dtype == "float32" == new.dtype for shared, new in param_updates.items())


@pytest.mark.parametrize("rule", RULES)
def test_updates_keep_broadcast_patterns(rule):
    row = package.shared(np.ones((1, 3)), name="row", **make_shape_keyword(1, None))
    column = package.shared(np.ones((2, 1)), name="column", **make_shape_keyword(None, 1))
    unmarked = package.shared(np.ones((1, 3)), name="unmarked")
    scalar = package.shared(np.asarray(1.0), name="scalar")
    params = [row, column, unmarked, scalar]
    loss = ((row + column) ** 2).sum() + (unmarked**2).sum() + scalar**2
    grad_updates, param_updates, _ = getattr(updates, rule)(loss, params, learning_rate=0.1, weight=2)
    for shared, new in param_updates.items():
        assert new.broadcastable == shared.broadcastable
    compile_function([], updates=grad_updates)()
    compile_function([], updates=param_updates)()
    assert [p.get_value().shape for p in params] == [(1, 3), (2, 1), (1, 3), ()]
    assert all((p.get_value() < 1).all() for p in params)


def test_updates_of_an_empty_parameter():
    w, empty = package.shared(np.ones(2)), package.shared(np.ones((0, 3)))
    grad_updates, param_updates, _ = updates.sgd((w**2).sum() + empty.sum(), [empty, w], 0.25)
    compile_function([], updates=grad_updates)()
    compile_function([], updates=param_updates)()
    np.testing.assert_array_equal(w.get_value(), [0.5, 0.5])
    assert empty.get_value().shape == (0, 3)


# -- hyperparameters -------------------------------------------------------------------------------------


def test_updates_with_shared_hyperparameters():
    options, params = find_column("adam")
    shareds = {name: package.shared(np.asarray(value)) for name, value in options.items()}
    problem = Problem()
    problem.compile(updates.adam(problem.loss, problem.params, **shareds))
    for expected in params[:5]:
        problem.step()
        np.testing.assert_allclose(problem.values(), expected, rtol=1e-9)
    before = problem.values()
    shareds["learning_rate"].set_value(0.0)
    problem.step()
    np.testing.assert_array_equal(problem.values(), before)


def test_updates_with_learning_rate_as_input():
    w, rate = package.shared(np.ones(2)), T.scalar("rate", dtype="float64")
    grad_updates, param_updates, _ = updates.sgd((w**2).sum(), [w], rate)
    compile_function([], updates=grad_updates)()
    compile_function([rate], updates=param_updates)(0.25)
    np.testing.assert_array_equal(w.get_value(), [0.5, 0.5])


@pytest.mark.parametrize("beta", [0, 0.5])
def test_adam_first_step_is_the_learning_rate(beta):
    w = package.shared(np.ones(2))
    rule = updates.adam((w**2).sum(), [w], learning_rate=0.25, beta1=beta, beta2=beta)
    compile_function([], updates=rule.grad_updates)()
    compile_function([], updates=rule.param_updates)()
    np.testing.assert_allclose(w.get_value(), 0.75, rtol=1e-7)


# -- momenta ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apply", [updates.apply_momentum, updates.apply_nesterov_momentum])
def test_apply_momentum_accepts_triple_or_param_updates(apply):
    problem = Problem()
    rule = updates.sgd(problem.loss, problem.params, 0.5)
    before = dict(rule.param_updates)
    from_triple, from_dict = apply(rule), apply(rule.param_updates)
    assert from_triple.grad_shared is rule.grad_shared
    assert from_triple.grad_updates == rule.grad_updates
    assert isinstance(from_triple, updates.RuleUpdates)
    assert type(from_dict) is type(rule.param_updates)
    # Two parameters and a velocity of each; the arguments are unchanged.
    assert len(from_triple.param_updates) == len(from_dict) == 4
    assert dict(rule.param_updates) == before


def test_apply_momentum_of_named_parameters():
    problem = Problem()
    rule = updates.adagrad(problem.loss, problem.params)
    changed = updates.apply_momentum(rule, [problem.w]).param_updates
    assert changed[problem.b] is rule.param_updates[problem.b]
    assert changed[problem.w] is not rule.param_updates[problem.w]
    assert len(changed) == len(rule.param_updates) + 1


# -- wrong arguments -------------------------------------------------------------------------------------


def make_shared(dtype="float64"):
    return package.shared(np.ones(2, dtype))


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "params: expected a list of shared .*, got <", lambda w: updates.sgd(w.sum(), w, 0.1)),
        (TypeError, "params: expected a list of shared .* got 3 of", lambda w: updates.sgd(w.sum(), [w, 3], 0.1)),
        (TypeError, "params: .*at index 1", lambda w: updates.sgd(w.sum(), [w, T.vector()], 0.1)),
        (TypeError, "params: .*int64.*at index 0", lambda w: updates.sgd(w.sum(), [make_shared("int64")], 0.1)),
        (ValueError, "params: expected a list of shared .* got none", lambda w: updates.sgd(w.sum(), [], 0.1)),
        (ValueError, "params: .*again at index 1", lambda w: updates.sgd(w.sum(), [w, w], 0.1)),
        (TypeError, "loss_or_grads: expected a symbolic .* got 2.0 of", lambda w: updates.sgd(2.0, [w], 0.1)),
        (ValueError, "loss_or_grads: expected a symbolic scalar", lambda w: updates.sgd(w * 2, [w], 0.1)),
        (ValueError, "loss_or_grads: .*1 params, got 2", lambda w: updates.sgd([w, w], [w], 0.1)),
        (TypeError, "loss_or_grads: expected one gradient .* got 1.5 of", lambda w: updates.sgd([1.5], [w], 0.1)),
        (ValueError, "loss_or_grads: .*1 dimensions", lambda w: updates.sgd([w.sum()], [w], 0.1)),
        (TypeError, "learning_rate: expected a number .* got 'fast'", lambda w: updates.sgd(w.sum(), [w], "fast")),
        (TypeError, "learning_rate: expected a number .* got True of type", lambda w: updates.sgd(w.sum(), [w], True)),
        (ValueError, "learning_rate: expected a number or .*, got <", lambda w: updates.sgd(w.sum(), [w], w)),
        (TypeError, "epsilon: expected a number .* got None", lambda w: updates.adagrad(w.sum(), [w], epsilon=None)),
        (TypeError, "rho: expected a number .* got .0.9. of type", lambda w: updates.rmsprop(w.sum(), [w], rho=[0.9])),
        (TypeError, "beta2: expected a number .* got '0.9' of type", lambda w: updates.adam(w.sum(), [w], beta2="0.9")),
        (ValueError, "beta1.*got 1.0", lambda w: updates.adamax(w.sum(), [w], beta1=1.0)),
        (TypeError, "weight: expected a number .* got 'all'", lambda w: updates.sgd(w.sum(), [w], 0.1, weight="all")),
        (ValueError, "weight: expected a number or .*, got <", lambda w: updates.sgd(w.sum(), [w], 0.1, weight=w)),
        (TypeError, "momentum: expected a .* got None", lambda w: updates.momentum(w.sum(), [w], 0.1, momentum=None)),
        (TypeError, "updates: expected the result of a rule.* got <", lambda w: updates.apply_momentum(w)),
        (ValueError, "params: .*have an update", lambda w: updates.apply_momentum({w: w + 1}, [make_shared()])),
    ],
)
def test_updates_refuse_wrong_arguments(error, message, call):
    with pytest.raises(error, match=message):
        call(make_shared())
