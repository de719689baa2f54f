"""Rules composed of rules and transformations equal optax's numbers and formulas, on any number of ranks."""

import functools
import inspect
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from library import package
from library import tensor as T
from paths import SUPPORT
from reference_updates import Problem, X, Y

import synkhronos as synk
from synkhronos.graph_libraries import get_library
from synkhronos.training import make_train_function, make_train_function_serial
from synkhronos.training.train_function.training_graph import summarize_update_rule
from synkhronos.training.updates import (
    adam,
    adamw,
    add_decayed_weights,
    chain,
    clip,
    clip_by_global_norm,
    lamb,
    lion,
    momentum,
    muon,
    norm_constraint,
    partition,
    scale,
    sgd,
    total_norm_constraint,
)

TABLE = json.loads((SUPPORT / "tables" / "optax_rules.json").read_text())


def is_matrix(p):
    return p.ndim > 1


#: Rules of the library, by the name of optax's rule in the table.
RULES = {
    "adamw": functools.partial(adamw, learning_rate=0.1, weight_decay=0.05),
    "adamw, other options": functools.partial(
        adamw, learning_rate=0.3, beta1=0.6, beta2=0.8, epsilon=0.05, weight_decay=0.1, mask=is_matrix
    ),
    "lion": functools.partial(lion, learning_rate=0.05, weight_decay=0.1),
    "lion, other options": functools.partial(
        lion, learning_rate=0.02, beta1=0.5, beta2=0.8, weight_decay=0.1, mask=is_matrix
    ),
    "lamb": functools.partial(lamb, learning_rate=0.1),
    "lamb, other options": functools.partial(
        lamb, learning_rate=0.1, beta1=0.6, beta2=0.8, epsilon=0.05, weight_decay=0.1, mask=is_matrix
    ),
    "muon": functools.partial(muon, learning_rate=0.1, momentum=0.9, weight_decay=0.1),
    "clip_by_global_norm": chain(clip_by_global_norm(0.2), functools.partial(adamw, learning_rate=0.1)),
    "clip_by_global_norm, seldom": chain(clip_by_global_norm(0.7), functools.partial(sgd, learning_rate=0.3)),
    "clip": chain(clip(0.1), functools.partial(momentum, learning_rate=0.3)),
    "add_decayed_weights": chain(add_decayed_weights(0.2, mask=is_matrix), functools.partial(sgd, learning_rate=0.3)),
    "all": chain(
        clip(0.3), clip_by_global_norm(0.4), add_decayed_weights(0.1), functools.partial(lion, learning_rate=0.03)
    ),
    "partition": partition(
        (is_matrix, functools.partial(adamw, learning_rate=0.2)), functools.partial(sgd, learning_rate=0.05)
    ),
}


def make_train(make, problem, rule):
    return make(problem.loss, problem.params, problem.x, problem.y, rule)


def test_transformation_table_is_complete():
    assert set(TABLE) - {"optax"} == set(RULES)


@pytest.mark.parametrize("name", RULES)
def test_transformations_equal_optax(name):
    problem = Problem()
    train = make_train(make_train_function_serial, problem, RULES[name])
    for expected in TABLE[name]:
        train(X, Y)
        np.testing.assert_allclose(problem.values(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", RULES)
def test_transformations_keep_float32(name):
    problem = Problem("float32")
    rule = RULES[name](problem.loss, problem.params, weight=problem.x.shape[0])
    assert {variable.dtype for variable in rule.param_updates} == {"float32"}
    assert {new.dtype for new in rule.param_updates.values()} == {"float32"}
    train = make_train(make_train_function_serial, problem, RULES[name])
    for expected in TABLE[name][:3]:
        train(X.astype("float32"), Y.astype("float32"))
        np.testing.assert_allclose(problem.values(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["adamw, other options", "lamb", "muon", "all", "partition"])
def test_transformations_on_ranks_equal_one_process(n_ranks, name):
    together, alone = Problem(), Problem()
    train = make_train(make_train_function, together, RULES[name])
    train_alone = make_train(make_train_function_serial, alone, RULES[name])
    for batch, num_slices in [(None, 1), (3, 1), (None, 2), ([4, 0], 1), (1, 1)]:
        loss = train(X, Y, batch=batch, num_slices=num_slices)
        np.testing.assert_allclose(loss, train_alone(X, Y, batch=batch), rtol=1e-9)
        for p, q in zip(together.params, alone.params, strict=True):
            for value in np.asarray(synk.gather(p)).reshape(n_ranks, *np.shape(q.get_value())):
                np.testing.assert_allclose(value, q.get_value(), rtol=1e-8, atol=1e-12)


# -- transformations -------------------------------------------------------------------------------------


def compute_step(rule, grads, starts=None, **kwargs):
    """Return the step of a rule for parameters with these gradients."""
    starts = [np.zeros(np.shape(g)) for g in grads] if starts is None else starts
    params = [package.shared(np.array(start, "float64"), f"p{i}") for i, start in enumerate(starts)]
    result = rule([T.constant(np.asarray(g, "float64")) for g in grads], params, **kwargs)
    package.function([], updates=result.grad_updates, mode="FAST_COMPILE")()
    package.function([], updates=result.param_updates, mode="FAST_COMPILE")()
    return [p.get_value() - start for p, start in zip(params, starts, strict=True)]


@functools.cache
def compile_clip_functions():
    """Compile functions from gradients and limits to steps, once for all examples."""
    limit = package.shared(1.0)
    functions = []
    for transform in (clip_by_global_norm, clip):
        grads = [T.dvector(), T.dmatrix()]
        params = [package.shared(np.zeros(3)), package.shared(np.zeros((2, 1)))]
        rule = chain(transform(limit), sgd)(grads, params, learning_rate=1.0, weight=3)
        write = package.function(grads, updates=rule.grad_updates, mode="FAST_COMPILE")
        steps = [p - rule.param_updates[p] for p in params]
        functions.append((write, package.function([], steps, mode="FAST_COMPILE")))
    return limit, functions


numbers = st.floats(-100, 100)


@given(
    first=st.lists(numbers, min_size=3, max_size=3),
    second=st.lists(numbers, min_size=2, max_size=2),
    limit=st.floats(0.01, 100),
)
@settings(max_examples=50, deadline=None)
def test_clip_by_norm_formula(first, second, limit):
    grads = [np.array(first), np.array(second)[:, None]]
    norm = np.sqrt(sum((g**2).sum() for g in grads))
    shared_limit, functions = compile_clip_functions()
    shared_limit.set_value(limit)
    for (write, read), expected in zip(
        functions, (lambda g: g * min(1, limit / norm) if norm else g, lambda g: np.clip(g, -limit, limit)), strict=True
    ):
        write(*grads)
        for g, step in zip(grads, read(), strict=True):
            np.testing.assert_allclose(step, expected(g), rtol=1e-12, atol=1e-300)


def test_chain_applies_transformations_in_order():
    grads, starts = [[3.0, 4.0]], [np.array([10.0, 20.0])]
    for rule, expected in {
        chain(scale(0.5), clip(1.8), sgd): [1.5, 1.8],
        chain(clip(1.8), scale(0.5), sgd): [0.9, 0.9],
        chain(sgd, clip(1.8)): [1.8, 1.8],
        chain(sgd, add_decayed_weights(0.1)): [4.0, 6.0],
        chain(clip(2), sgd, scale(lambda p: 2 if p.name == "p0" else 1)): [4.0, 4.0],
    }.items():
        np.testing.assert_allclose(
            compute_step(rule, grads, starts, learning_rate=1.0)[0], -np.array(expected), rtol=1e-12
        )


def test_chain_of_user_transformation_and_rule():
    def signs(grads, params, **options):
        return [g / abs(g) for g in grads]

    def half(loss_or_grads, params, weight=None):
        return sgd(loss_or_grads, params, 0.5, weight=weight)

    np.testing.assert_allclose(compute_step(chain(signs, half), [[3.0, -4.0]])[0], [-0.5, 0.5])
    assert chain(signs, half).__name__ == "chain(signs, half)"
    with pytest.raises(ValueError, match=r"chain: short returned 0 variables, expected one for each of 1 params"):

        def short(grads, params):
            return []

        compute_step(chain(short, half), [[3.0]])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("rule", [adamw, lion, lamb, muon, chain(clip(2.0), sgd), partition(sgd)])
def test_transformations_of_a_scalar_parameter(shape, rule):
    for weight in (None, 2):
        (step,) = compute_step(rule, [np.full(shape, 4.0)], learning_rate=0.25, weight=weight)
        assert step.shape == shape
        assert (step < 0).all()


def test_clip_of_float16_computes_in_float32():
    w = package.shared(np.zeros(4, "float16"))
    grads = [T.constant(np.full(4, 300, "float16"))]  # whose squares overflow
    rule = chain(clip_by_global_norm(1.0), sgd)(grads, [w], learning_rate=1.0)
    package.function([], updates=rule.grad_updates)()
    package.function([], updates=rule.param_updates)()
    np.testing.assert_array_equal(w.get_value(), np.full(4, -0.5, "float16"))


# -- Lasagne's constraints -------------------------------------------------------------------------------


def evaluate_variables(*variables):
    return package.function([], list(variables), mode="FAST_COMPILE")()


def test_clipping_by_norm_sums_the_flat_gradient_once():
    params = [package.shared(np.ones(shape), name) for name, shape in [("v", (2, 3)), ("w", 4), ("b", ())]]
    loss = sum((p**2).sum() for p in params)
    for weight in (None, 2.0):
        values = chain(clip_by_global_norm(1.0), sgd)(loss, params, 0.1, weight=weight).param_updates.values()
        sums = {node for node in get_library(*params).sort_nodes(list(values)) if type(node.op).__name__ == "Sum"}
        assert [node.inputs[0].ndim for node in sums] == [1]


def test_total_norm_constraint_equals_lasagne():
    a, b = T.constant(np.array([3.0])), T.constant(np.array([[4.0]]))
    scaled, norm = total_norm_constraint([a, b], 2.5, return_norm=True)
    first, second, total_norm = evaluate_variables(*scaled, norm)
    np.testing.assert_allclose([first[0], second[0, 0], total_norm], [3 * 2.5 / (5 + 1e-7), 4 * 2.5 / (5 + 1e-7), 5])
    np.testing.assert_allclose(evaluate_variables(*total_norm_constraint([a, b], 50))[0], [3.0 * 5 / (5 + 1e-7)])


@pytest.mark.parametrize(
    ("shape", "norm_axes", "axes"), [((4, 3), None, (0,)), ((2, 3, 4, 5), None, (1, 2, 3)), ((6,), [0], (0,))]
)
def test_norm_constraint_equals_lasagne(shape, norm_axes, axes):
    value = np.random.default_rng(0).normal(size=shape) * 3
    (constrained,) = evaluate_variables(norm_constraint(T.constant(value), 2.0, norm_axes))
    norms = np.sqrt((value**2).sum(axis=axes, keepdims=True))
    np.testing.assert_allclose(constrained, value * np.clip(norms, 0, 2.0) / (1e-7 + norms), rtol=1e-12)


# -- identities and errors -------------------------------------------------------------------------------


def test_checkpoint_names_chain_transformations():
    rule = chain(clip_by_global_norm(1), functools.partial(adam, beta1=0.8))
    name, options = summarize_update_rule(rule, {"learning_rate": 0.1})
    assert name == "chain(clip_by_global_norm(1.0), adam(beta1=0.8))"
    assert (options["beta1"], options["beta2"], options["learning_rate"]) == (0.8, 0.999, 0.1)
    assert "weight" in inspect.signature(rule).parameters
    assert partition((is_matrix, adamw), sgd).__name__ == "partition(adamw, sgd)"


def a_dict(loss, params, learning_rate, weight=None):
    return {p: p - learning_rate for p in params}


def make_shared():
    return package.shared(np.ones(2), name="w")


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        *[
            (ValueError, f"{name}: expected a positive number, got", functools.partial(function, value))
            for name, function in (("max_norm", clip_by_global_norm), ("max_delta", clip))
            for value in (0, -1.0, float("nan"), float("inf"))
        ],
        (
            TypeError,
            "max_norm: expected a positive number or a symbolic scalar, got '1'",
            lambda: clip_by_global_norm("1"),
        ),
        (
            TypeError,
            "max_norm: expected a positive number or a symbolic scalar, got True",
            lambda: clip_by_global_norm(True),
        ),
        (
            ValueError,
            "max_norm: expected a number or a symbolic scalar, got w of type",
            lambda: compute_step(chain(clip_by_global_norm(make_shared()), sgd), [1.0], learning_rate=1),
        ),
        (ValueError, "max_norm: expected a positive number, got 0", lambda: total_norm_constraint([make_shared()], 0)),
        (ValueError, "norm_axes: needed for a variable of 1 dim", lambda: norm_constraint(make_shared(), 1)),
        *[
            (
                error,
                f"weight_decay: expected a number of at least 0 or a symbolic scalar, got {value}",
                functools.partial(add_decayed_weights, value),
            )
            for error, value in ((ValueError, -1), (ValueError, float("nan")), (TypeError, None))
        ],
        (TypeError, "mask: expected a predicate of a parameter, got True", lambda: add_decayed_weights(0.1, mask=True)),
        (
            TypeError,
            "mask: expected a predicate of a parameter, got 'all'",
            lambda: adamw(make_shared().sum(), [make_shared()], mask="all"),
        ),
        *[
            (
                error,
                f"factor: expected a finite number, a symbolic scalar or a function of a parameter, got {value!r}",
                functools.partial(scale, value),
            )
            for error, value in ((ValueError, float("inf")), (TypeError, "half"))
        ],
        (TypeError, "chain: expected transformations and an update rule, got 1.0", lambda: chain(1.0, sgd)),
        (
            ValueError,
            "chain: expected one update rule, with an argument weight, got 0 in 1 parts",
            lambda: chain(clip(1)),
        ),
        (
            ValueError,
            "chain: expected one update rule, with an argument weight, got 2 in 2 parts",
            lambda: chain(sgd, adam),
        ),
        (
            TypeError,
            "partition: expected pairs of a predicate and an update rule, got .*'adam'",
            lambda: partition((is_matrix, "adam"), sgd),
        ),
        (
            TypeError,
            "partition: expected pairs of a predicate and an update rule, got <function sgd",
            lambda: partition(sgd, adam),
        ),
        (TypeError, "update_rule: expected a_dict to return", lambda: compute_step_of_w(chain(clip(1), a_dict))),
        (TypeError, "update_rule: expected a_dict to return", lambda: compute_step_of_w(partition(a_dict))),
        (ValueError, "params: w is in no group", lambda: compute_step_of_w(partition((is_matrix, sgd)))),
        (
            ValueError,
            "momentum: expected from 0 up to but not including 1, got 1.0",
            lambda: compute_step(muon, [np.ones((2, 2))], momentum=1.0),
        ),
    ],
)
def test_transformations_refuse_wrong_arguments(error, message, call):
    with pytest.raises(error, match=message):
        call()


def compute_step_of_w(rule):
    w = make_shared()
    return rule(w.sum(), [w], learning_rate=0.1)
