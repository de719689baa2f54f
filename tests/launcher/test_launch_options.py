"""Options of a `Model`'s step (clipping, slices, averages of parameters, loss scaling) on any number of ranks."""

import ast
from importlib.util import find_spec

import numpy as np
import pytest
from launch_runs import read_json_lines, run, run_cases
from paths import SUPPORT

slow = pytest.mark.slow
#: More slices than three ranks have rows in a step.
ALL_OPTIONS = {"clip_norm": 0.5, "num_slices": 5, "ema": 0.9, "validate_ema": "true"}


def train(folder, name, ranks, *arguments, options=None, module="regression_models", status=0, **settings):
    """Run ``synkhronos train`` with a model of launch_models."""
    sets = [f"--set={key}={value}" for key, value in settings.items()]
    sets += [f"--set=model_options.{key}={value}" for key, value in (options or {}).items()]
    sets.append(f"--set=model='launch_models/{module}.py:{name}'")
    folder_and_ranks = ["--folder", folder, "--devices=cpu", f"--ranks={ranks}"]
    return run("train", *folder_and_ranks, *sets, *arguments, status=status, cwd=SUPPORT)


def make_data():
    x = np.random.default_rng(0).normal(size=(165, 3))
    return x, x @ [1.0, 2.0, 3.0]


def train_in_numpy(epochs, clip_norm=0.5, ema=0.9, momentum=0.9):
    """Return parameters, their moving average, and the running average of x, computed in one process."""
    x, y = make_data()
    w = average = velocity = mean = np.zeros(3)
    for epoch in range(epochs):
        order = np.random.default_rng((0, epoch)).permutation(120)
        for rows in order.reshape(10, 12):
            g = 2 * x[rows].T @ (x[rows] @ w - y[rows]) / 12
            g *= min(1, clip_norm / np.sqrt((g**2).sum()))
            velocity = momentum * velocity - 0.05 * g
            w = w + momentum * velocity - 0.05 * g
            average = ema * average + (1 - ema) * w
            mean = 0.9 * mean + 0.1 * x[rows].mean(axis=0)
    return w, average, mean


def load_params(folder, name="params.npz"):
    with np.load(folder / name) as file:
        return list(file.values())


# 3 ranks resume as one, and split rows unevenly.
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=slow), 3])
def test_model_options_equal_one_process_and_resume(tmp_path, ranks):
    train(tmp_path, "RankIndependentRegression", ranks, options=ALL_OPTIONS, epochs=1, checkpoint=1)
    train(tmp_path, "RankIndependentRegression", ranks % 3 + 1, "--resume", options=ALL_OPTIONS, epochs=3, checkpoint=1)
    w, average, mean = train_in_numpy(3)
    np.testing.assert_allclose(load_params(tmp_path), [average, mean], rtol=1e-9)
    x, y = make_data()
    reports = read_json_lines(tmp_path, "reports")
    errors = [np.mean((x[120:] @ train_in_numpy(epoch)[1] - y[120:]) ** 2) for epoch in (1, 2, 3)]
    np.testing.assert_allclose([report["validation"]["cost"] for report in reports], errors, rtol=1e-9)
    assert np.mean((x[120:] @ w - y[120:]) ** 2) < 0.99 * errors[-1]  # differs from the value for the parameters


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=slow)])
def test_sharded_optimizer_equals_one_process_and_resumes_sharded_or_not(tmp_path, ranks):
    train(tmp_path, "ShardedRegression", ranks, options=ALL_OPTIONS, epochs=1, checkpoint=1)
    train(tmp_path / "whole", "RankIndependentRegression", ranks, options=ALL_OPTIONS, epochs=1)
    np.testing.assert_array_equal(load_params(tmp_path), load_params(tmp_path / "whole"))
    for r in range(ranks):  # velocity and average of three parameters, of which a rank has two
        assert (tmp_path / f"rank-{r}.log").read_text().endswith("shapes [(2,), (2,)]\n")
    train(tmp_path, "RankIndependentRegression", 1, "--resume", options=ALL_OPTIONS, epochs=2, checkpoint=1)
    train(tmp_path, "ShardedRegression", ranks % 3 + 1, "--resume", options=ALL_OPTIONS, epochs=3, checkpoint=1)
    _, average, mean = train_in_numpy(3)
    np.testing.assert_allclose(load_params(tmp_path), [average, mean], rtol=1e-9)


def test_sharded_and_unsharded_optimizers_have_their_variables_in_one_order(tmp_path):
    options = {"clip_norm": 0.5}
    train(tmp_path, "AdamwRegression", 2, options={**options, "shard_optimizer": "true"}, epochs=1, checkpoint=1)
    train(tmp_path, "AdamwRegression", 1, "--resume", options=options, epochs=2, checkpoint=1)
    train(
        tmp_path,
        "AdamwRegression",
        2,
        "--resume",
        options={**options, "shard_optimizer": "true"},
        epochs=3,
        checkpoint=1,
    )
    train(tmp_path / "whole", "AdamwRegression", 2, options=options, epochs=3)
    np.testing.assert_allclose(load_params(tmp_path), load_params(tmp_path / "whole"), rtol=1e-9)


def test_options_of_the_class_apply_to_lasagne_rules(tmp_path):
    train(tmp_path, "LasagneStyleRegression", 2, options={"clip_norm": 0.25}, epochs=2)
    np.testing.assert_allclose(load_params(tmp_path)[0], train_in_numpy(2, clip_norm=0.25, momentum=0)[0], rtol=1e-9)


def test_gradients_are_exchanged_without_options_if_asked_for(tmp_path):
    done = train(tmp_path, "RankIndependentRegression", 2, epochs=2, **{"rule_options.average": "gradient"})
    assert "after each step vels2 is set to the sum of vels" in done.stdout
    w, _, mean = train_in_numpy(2, clip_norm=np.inf)
    np.testing.assert_allclose(load_params(tmp_path), [w, mean], rtol=1e-9)


@pytest.mark.parametrize("ranks", [1, 3])
def test_model_loss_scale_skips_an_overflow_and_resumes(tmp_path, ranks):
    x, y = make_data()
    w = average = np.zeros(3)
    count = 0
    for epoch in range(2):
        for rows in np.random.default_rng((0, epoch)).permutation(120).reshape(10, 12):
            if 0 in rows:
                count = 0
                continue
            w = w - 0.05 * 2 * x[rows].T @ (x[rows] @ w - y[rows]) / 12
            average, count = 0.9 * average + 0.1 * w, count + 1
    train(tmp_path, "OverflowingRegression", ranks, epochs=1, checkpoint=1)
    train(tmp_path, "OverflowingRegression", ranks, "--resume", epochs=2)
    states = [(tmp_path / f"rank-{r}.log").read_text().rsplit("state ", 1)[1].split("\n")[0] for r in range(ranks)]
    assert len(set(states)) == 1, states
    scale, steps, *values = ast.literal_eval(states[0])
    assert (scale, steps) == (2.0**13, count)
    np.testing.assert_allclose(values, [w, average], rtol=1e-4)


@slow
def test_equal_steps_from_other_rows_are_no_error(tmp_path):
    train(tmp_path, "LionRegression", 2, epochs=4)


@slow
def test_epoch_of_skipped_overflows_is_no_error(tmp_path):
    train(tmp_path, "AlwaysOverflowingRegression", 2, epochs=1)
    state = (tmp_path / "rank-0.log").read_text().rsplit("state ", 1)[1].split("\n")[0]
    assert ast.literal_eval(state) == [2.0**5, 0, [0] * 3, [0] * 3]  # after 10 steps


def test_patience_without_validation_is_refused_before_the_first_epoch(tmp_path):
    done = train(tmp_path, "RegressionWithoutValidation", 2, patience=1, status=1)
    assert "keep_best, patience: RegressionWithoutValidation lacks:\n  metric 'cost', got loss" in done.stderr
    assert "epoch 1" not in done.stdout


needs_lasagne = pytest.mark.skipif(find_spec("lasagne") is None, reason="a class with a layer of Lasagne's kind")


@needs_lasagne
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.5}], ids=["parameters", "gradients"])
def test_batch_normalization_over_all_ranks_equals_one_process(tmp_path, options):
    for ranks in (1, 3):
        train(tmp_path / str(ranks), "Normalized", ranks, options=options, module="normalized")
    values, expected = (load_params(tmp_path / str(ranks)) for ranks in (3, 1))
    assert len(values) == 7  # three arrays of weights, shift and scale, two averages
    for value, expected_value in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, expected_value, rtol=1e-8, atol=1e-12)
    reports = [read_json_lines(tmp_path / str(ranks), "reports")[-1]["validation"]["cost"] for ranks in (3, 1)]
    np.testing.assert_allclose(*reports, rtol=1e-8)


@needs_lasagne
def test_batch_normalization_over_all_ranks_needs_equal_steps_of_whole_batches(tmp_path):
    done = train(tmp_path / "rule", "Normalized", 2, module="normalized", rule="EASGD", status=1)
    assert "sync=True: ranks call this function at their own pace" in done.stderr
    done = train(tmp_path / "slices", "Normalized", 2, module="normalized", options={"num_slices": 2}, status=1)
    assert "num_slices: expected 1, got 2: the loss has means over all ranks' rows" in done.stderr


# -- wrong options


#: tests/training/test_training_messages.py has all wrong values.
WRONG_OPTIONS = {
    "a clip of 0": ({"clip_norm": 0}, "clip_norm: expected a positive number, got 0"),
    "an average of a wrong type": ({"ema": True}, "ema: expected a number between 0 and 1, got True"),
    "a flag of a wrong type": ({"validate_ema": 1}, "validate_ema: expected True or False, got 1"),
    "an unknown option": ({"clipnorm": 1}, "clipnorm: unknown option; similar: clip_norm"),
}


@pytest.fixture(scope="module")
def outputs_by_case():
    """Check sessions and classes with wrong options in one process; give the outputs by name."""
    code = f"""
from synkhronos.launcher.check_model import check_class
from synkhronos.launcher.configuration.settings import SettingsError

def report(name, model, requested):
    print("-- case", name)
    try:
        print("-- status", check_class(model, requested))
    except SettingsError as error:
        print("refused:", error)

for name, (options, _) in {WRONG_OPTIONS!r}.items():
    report(name, "launch_models/regression_models.py:RankIndependentRegression", {{"model_options": options}})
    report("class: " + name, "launch_models/regression_models.py:ConfiguredRegression", {{"config": {{"options": options}}}})
report("no ema", "launch_models/regression_models.py:RankIndependentRegression", {{"model_options": {{"validate_ema": True}}}})
report("no Model", "launch_models/mlp.py:MLP", {{"model_options": {{"clip_norm": 1}}}})
for rule, options in (("EASGD", {{}}), ("BSP", {{"average": "params"}}), ("BSP", {{"precision": "float16"}})):
    requested = {{"rule": rule, "rule_options": options}}
    report(f"{{rule}} {{options}}", "launch_models/regression_models.py:LasagneStyleRegression", requested)
report("right", "launch_models/regression_models.py:LasagneStyleRegression", {{"model_options": {{"num_slices": 2, "validate_ema": True}}}})
"""
    return run_cases(code)


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_check_reports_a_wrong_option_of_a_session_or_a_class(outputs_by_case, name):
    message = WRONG_OPTIONS[name][1]
    assert outputs_by_case[name].startswith(f"refused: model_options.{message}")
    output = outputs_by_case[f"class: {name}"]
    assert message in output and output.endswith("-- status 1\n")


@pytest.mark.parametrize(
    ("name", "message"),
    {
        "no ema": "validate_ema: needs ema, the decay of the averages",
        "no Model": "model_options: MLP lacks:\n  the base class synkhronos.launcher.Model",
        "EASGD {}": "clip_norm: needs the exchange rule BSP, got EASGD",
        "BSP {'average': 'params'}": "clip_norm: needs rule_options.average = 'gradient', got 'params'",
        "BSP {'precision': 'float16'}": "clip_norm: BSP has to exchange gradients in their own precision, got BSP",
    }.items(),
)
def test_check_reports_unavailable_options(outputs_by_case, name, message):
    assert message in outputs_by_case[name] and outputs_by_case[name].endswith("-- status 1\n")


def test_check_accepts_a_model_with_options(outputs_by_case):
    assert outputs_by_case["right"].endswith(
        "LasagneStyleRegression: no problem found, on one rank and on two\n-- status 0\n"
    )
