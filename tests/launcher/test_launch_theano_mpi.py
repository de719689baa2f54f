"""The launcher calls a model class's methods as Theano-MPI's workers do."""

import ast
import json
import pickle
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from launch_models.data.regression import BATCHES, MOMENTUM, RATE, ROWS, make_rows
from launch_runs import ENVIRONMENT, read_json_lines, run
from library import shared
from paths import SUPPORT

from synkhronos.launcher.model_class.model_interface import ModelInterfaceError, parse_val_iter_result
from synkhronos.launcher.model_class.model_recorder import ModelRecorder
from synkhronos.launcher.model_class.sanity_check import SanityCheck


def train(folder, name, *arguments, status=0, ranks=2, **settings):
    """Run ``synkhronos train`` with a model of launch_models/theano_mpi.py."""
    sets = [f"--set={key.replace('__', '.')}={value}" for key, value in settings.items()]
    where = [
        f"--set=model='launch_models/theano_mpi.py:{name}'",
        "--folder",
        folder,
        "--devices=cpu",
        f"--ranks={ranks}",
    ]
    return run("train", *where, *sets, *arguments, status=status, cwd=SUPPORT)


def load_params(folder):
    with np.load(folder / "params.npz") as file:
        return np.append(file["arr_0"], file["arr_1"])


def compute_gradient(w, part):
    x, y = part
    x = np.column_stack([x, np.ones(len(x))])
    return 2 * x.T @ (x @ w - y) / len(x)


def iterate_batches(size, epochs):
    """Yield epoch and, for each rank, its batch."""
    x, y = make_rows()
    for epoch in range(epochs):
        for first in range(0, len(x) // ROWS, size):
            yield (
                epoch,
                [(x[i * ROWS : (i + 1) * ROWS], y[i * ROWS : (i + 1) * ROWS]) for i in range(first, first + size)],
            )


def compute_rate(epoch, size):
    """Return the learning rate, with warm-up."""
    return RATE * size ** (min(epoch, 5) / 5)


def train_delayed(size, epochs, late=1, warmup=True):
    """Train in one process by ``size`` times larger batches; each update is applied ``late`` iterations late."""
    w, velocity, pending = np.zeros(4), np.zeros(4), []
    for epoch, parts in iterate_batches(size, epochs):
        lr = compute_rate(epoch, size if warmup else 1)
        if late and pending:
            w = w - lr * pending.pop()
        whole = tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        velocity = MOMENTUM * velocity + compute_gradient(w, whole)
        pending.append(velocity)
        if not late:
            w = w - lr * pending.pop()
    return w


def test_cdd_equals_one_process_delayed_by_a_step(tmp_path):
    done = train(tmp_path / "two", "Regression", epochs=7)
    assert "after each step vels2 is set to the sum of vels over all ranks (cdd)" in done.stdout
    np.testing.assert_allclose(load_params(tmp_path / "two"), train_delayed(2, 7), rtol=1e-5)
    assert (
        np.abs(train_delayed(2, 7) - train_delayed(2, 7, late=0)).max() > 1e-4
    )  # a wrong order would change the result
    reports = read_json_lines(tmp_path / "two", "reports")
    rates = [report["learning_rate"] for report in reports]
    np.testing.assert_allclose(rates, [compute_rate(epoch, 2) for epoch in range(7)], rtol=1e-6)
    assert rates[6] == pytest.approx(2 * RATE)
    assert [report["steps"] for report in reports] == [2 * BATCHES] * 7
    train(tmp_path / "plain", "Regression", epochs=3, warmup="false")
    np.testing.assert_allclose(load_params(tmp_path / "plain"), train_delayed(2, 3, warmup=False), rtol=1e-5)


@pytest.mark.slow
def test_cdd_equals_its_formula_on_three_ranks_and_one(tmp_path):
    train(tmp_path / "three", "Regression", ranks=3, rule_options__average="gradient")
    np.testing.assert_allclose(load_params(tmp_path / "three"), train_delayed(3, 2), rtol=1e-5)
    train(tmp_path / "one", "Regression", ranks=1)
    np.testing.assert_allclose(load_params(tmp_path / "one"), train_delayed(1, 2, late=0), rtol=1e-5)


def test_cdd_in_16_bits_stays_close(tmp_path):
    train(tmp_path, "Regression", rule_options__precision="float16")
    exact = train_delayed(2, 2)
    np.testing.assert_allclose(load_params(tmp_path), exact, rtol=5e-3)
    assert np.abs(load_params(tmp_path) / exact - 1).max() > 2e-5


def test_warmup_is_skipped_if_the_class_scales_its_learning_rate(tmp_path):
    train(tmp_path, "Regression", scale_lr="true")
    assert [report["learning_rate"] for report in read_json_lines(tmp_path, "reports")] == pytest.approx([2 * RATE] * 2)


def test_avg_averages_parameters_after_each_step(tmp_path):
    # A class that compiles by its size is told a size of 1, so that it compiles a whole step.
    done = train(tmp_path, "Regression", rule_options__average="params")
    assert "after each step parameters are averaged over all ranks (avg)" in done.stdout
    ws, velocities = [np.zeros(4)] * 2, [np.zeros(4)] * 2
    for epoch, parts in iterate_batches(2, 2):
        velocities = [
            MOMENTUM * v + compute_gradient(w, part) for v, w, part in zip(velocities, ws, parts, strict=True)
        ]
        ws = [np.mean([w - compute_rate(epoch, 2) * v for w, v in zip(ws, velocities, strict=True)], 0)] * 2
    np.testing.assert_allclose(load_params(tmp_path), ws[0], rtol=1e-5)


def test_avg_excludes_batch_norm_gamma_and_beta(tmp_path):
    train(tmp_path, "NormalizedRegression", rule_options__average="params")
    matches = [re.search(r"beta (\S+) w (.*)", (tmp_path / f"rank-{r}.log").read_text()) for r in range(2)]
    ws, velocities = [np.zeros(4)] * 2, [np.zeros(4)] * 2
    for epoch, parts in iterate_batches(2, 2):
        velocities = [
            MOMENTUM * v + compute_gradient(w, part) for v, w, part in zip(velocities, ws, parts, strict=True)
        ]
        ws = [w - compute_rate(epoch, 2) * v for w, v in zip(ws, velocities, strict=True)]
        mean = np.mean(ws, 0)
        ws = [np.append(mean[:3], w[3]) for w in ws]
    for r in range(2):
        np.testing.assert_allclose(float(matches[r][1]), ws[r][3], rtol=1e-5)
        np.testing.assert_allclose(ast.literal_eval(matches[r][2]), ws[r][:3], rtol=1e-5)
    assert ws[0][3] != ws[1][3]
    np.testing.assert_allclose(load_params(tmp_path), ws[0], rtol=1e-5)  # params.npz has rank 0's parameters


@pytest.mark.parametrize("rule", ["BSP", "EASGD"])
@pytest.mark.slow
def test_class_methods_are_called_in_order(tmp_path, rule):
    options = {} if rule == "BSP" else {"rule": rule, "rule_options__period": 2}
    done = train(tmp_path / "run", "RecordingRegression", epochs=2, config__trace=f"'{tmp_path}'", **options)
    calls = [json.loads((tmp_path / f"calls-{r}.json").read_text()) for r in range(2)]
    for rank, rank_calls in enumerate(calls):
        expected = [
            ["config", ["mname", "rank", "seed", "size", "verbose"]],
            ["compile_iter_fns", *(("cdd", 2) if rule == "BSP" else ("avg", 1))],
        ]
        for epoch in range(2):
            lr = np.float32(compute_rate(epoch, 2) if rule == "BSP" else RATE)
            for batch in range(BATCHES):  # each for n_subb = 2 steps; the count restarts in each epoch
                expected += [["train_iter", epoch, batch, pytest.approx(float(lr))]] * 2
            expected += [["reset_iter", "train"], *[["val_iter", 2 * BATCHES]] * 2 * BATCHES, ["reset_iter", "val"]]
            if rank == 0:
                expected += [["save", epoch]]
            expected += [["adjust_hyperp", epoch], ["print_info", rank == 0, True, [2 * BATCHES]]]
        assert rank_calls == expected
    assert [report["steps"] for report in read_json_lines(tmp_path / "run", "reports")] == [4 * BATCHES] * 2
    assert sorted(path.name for path in (tmp_path / "run" / "snapshots").iterdir()) == ["0_mine.npz", "1_mine.npz"]
    if "draws nothing" not in done.stdout:
        pictures = {path.name for path in (tmp_path / "run" / "plots").iterdir()}
        names = ("scores", "a_sample")
        assert pictures == {f"{name}-rank-{r}-{n}.png" for name in names for r in range(2) for n in (1, 2)}


@pytest.mark.slow
def test_asynchronous_rules_exchange_after_whole_batches(tmp_path):
    (tmp_path / "counted.py").write_text(
        "from launch_models.theano_mpi import RecordingRegression\n"
        "from synkhronos.exchange_rules import EASGD\n"
        "def exchange(self, context, state, exchange=EASGD.exchange):\n"
        "    print('exchange', len([c for c in calls() if c[0] == 'train_iter']))\n"
        "    return exchange(self, context, state)\n"
        "EASGD.exchange = exchange\n"
        "made = []\n"
        "def calls():\n"
        "    return made[0].calls\n"
        "class Counted(RecordingRegression):\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n"
        "        made.append(self)\n"
    )
    sets = ["--set=rule=EASGD", "--set=rule_options.period=2", "--set=epochs=2", f"--set=config.trace='{tmp_path}'"]
    run("train", "--set=model='counted.py:Counted'", "--devices=cpu,cpu", "--folder=run", *sets, cwd=tmp_path)
    # Six batches of two steps in two epochs; an exchange follows every second batch.
    assert re.findall(r"exchange (\d+)", (tmp_path / "run" / "rank-1.log").read_text()) == ["4", "8", "12"]


def test_val_iter_can_return_the_next_batch_or_stop(tmp_path):
    done = train(tmp_path, "StoppingRegression", "--set=checkpoint=0")
    assert "val_iter() has returned 'stop': the run ends after epoch 2" in done.stdout
    assert [report["epoch"] for report in read_json_lines(tmp_path, "reports")] == [1, 2]
    calls = [re.findall(r"val_iter (\d) (\d)", (tmp_path / f"rank-{r}.log").read_text()) for r in range(2)]
    assert calls == [[("0", "1"), ("0", "2"), ("1", "1"), ("1", "2")], [("0", "1"), ("0", "2"), ("1", "1")]]
    assert (tmp_path / "params.npz").exists()


@pytest.mark.parametrize("answer", [2, 3, "halt", True, 0.5, (1, 2)])
def test_val_iter_refuses_other_return_values(answer):
    with pytest.raises(ModelInterfaceError, match=r"None, 'stop', or the number of the next batch, above 3, got "):
        parse_val_iter_result(answer, 3, 4)


@pytest.mark.slow
def test_cdd_resumes_from_a_checkpoint(tmp_path):
    pytest.importorskip("safetensors")
    train(tmp_path / "whole", "Regression", epochs=3)
    train(tmp_path / "parts", "Regression", epochs=1, checkpoint=1)
    train(tmp_path / "parts", "Regression", "--resume", epochs=3)
    np.testing.assert_array_equal(load_params(tmp_path / "whole"), load_params(tmp_path / "parts"))


def test_cdd_pending_gradients_survive_another_number_of_ranks():
    from synkhronos.launcher.rank_process.gradient_sum_rule import GradientSumRule

    zeros = np.zeros(2)
    ranks = [{"params": zeros, "optimizer": zeros, "excluded": zeros, "own": {"pending": np.array([2.0, 4.0])}}] * 2
    resized = GradientSumRule(SimpleNamespace(vels=[], vels2=[])).resize_states(ranks, 3)
    assert len(resized) == 3 and all(state["own"]["pending"].tolist() == [3.0, 6.0] for state in resized)


# -- runs that train nothing ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("UntrainedRegression", {"rule": "EASGD"}, "no parameter has changed in 3 steps: this run trains nothing"),
        ("EqualRowsRegression", {}, "ranks 0 and 1 have taken equal steps of equal costs, as from the same rows"),
        ("EqualRowsTwoFunctionRegression", {}, "ranks 0 and 1 have taken equal steps"),
    ],
)
@pytest.mark.slow
def test_launch_refuses_a_run_that_trains_nothing(tmp_path, name, settings, words):
    done = train(tmp_path, name, status=1, **settings)
    assert f"IneffectiveTrainingError: {words}" in done.stderr
    assert not (tmp_path / "params.npz").exists()


def test_training_with_an_infinite_parameter_is_no_training_of_nothing():
    params = [shared(np.array([-np.inf, np.inf]), "bounds"), shared(np.zeros(3), "w")]
    check = SanityCheck(params, params)
    for _ in range(50):
        params[1].set_value(params[1].get_value() + 1)
        check.record_step(lambda: 1.0)
    check.check_params_change(0.1, has_epoch_ended=False)


@pytest.mark.slow
def test_cdd_needs_vels2(tmp_path):
    done = train(tmp_path / "one", "RegressionWithoutVels2", status=1)
    assert re.search(
        r"RegressionWithoutVels2: missing or invalid:\n  attributes vels and vels2: expected lists of shared variables",
        done.stderr,
    )
    done = train(tmp_path / "none", "OneFunctionRegression", status=1, rule_options__average="gradient")
    assert "OneFunctionRegression: missing or invalid:\n  attributes vels and vels2: " in done.stderr


def test_check_runs_a_theano_mpi_class(tmp_path):
    code = f"""
from synkhronos.launcher.check_model import check_class
for name in ("Regression", "OneFunctionRegression", "RecordingRegression", "UntrainedRegression", "EqualRowsRegression", "EqualRowsTwoFunctionRegression", "RegressionWithoutVels2"):
    print("-- class", name)
    print("-- status", check_class(f"launch_models/theano_mpi.py:{{name}}", {{"config": {{"trace": {str(tmp_path)!r}}}}}))
print("-- class EASGD")
print("-- status", check_class("launch_models/theano_mpi.py:Regression", {{"rule": "EASGD"}}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=SUPPORT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reports = dict(part.split("\n", 1) for part in done.stdout.split("-- class ")[1:])
    for name in ("Regression", "OneFunctionRegression", "EASGD"):
        assert reports[name].endswith(": no problem found, on one rank and on two\n-- status 0\n"), reports[name]
    assert "UntrainedRegression: train_iter() changes none of params\n-- status 1" in reports["UntrainedRegression"]
    message = "with size 2 ranks 0 and 1 have taken equal steps of equal costs, as from the same rows"
    assert (
        f"EqualRowsRegression: {message}" in reports["EqualRowsRegression"]
        and f"EqualRowsTwoFunctionRegression: {message}" in reports["EqualRowsTwoFunctionRegression"]
    )
    assert (
        "RegressionWithoutVels2: missing or invalid:\n  attributes vels and vels2" in reports["RegressionWithoutVels2"]
    )
    assert reports["RecordingRegression"].endswith("-- status 0\n"), reports["RecordingRegression"]
    calls = [call[0] for call in json.loads((tmp_path / "calls-0.json").read_text())]
    assert calls.count("train_iter") == 3  # as rank 0 of two: the last but one to be cleaned up


PRECISE_MODEL = """
import jax
from launch_models.theano_mpi import Regression

class PreciseRegression(Regression):
    def train_iter(self, *arguments):
        assert not jax.config.jax_enable_x64, "train_iter() in float64"
        super().train_iter(*arguments)

    def val_iter(self, *arguments):
        assert not jax.config.jax_enable_x64, "val_iter() in float64"
        return super().val_iter(*arguments)
"""


def test_check_computes_in_the_precision_of_the_model(tmp_path):
    pytest.importorskip("jax")
    (tmp_path / "precise.py").write_text(PRECISE_MODEL)
    environment = {**ENVIRONMENT, "PYTENSOR_FLAGS": "mode=JAX,floatX=float32"}
    command = [sys.executable, "-m", "synkhronos", "check", str(tmp_path / "precise.py:PreciseRegression")]
    done = subprocess.run(command, cwd=SUPPORT, env=environment, capture_output=True, text=True)
    assert done.stdout.endswith("PreciseRegression: no problem found, on one rank and on two\n"), (
        done.stdout + done.stderr
    )


# -- the recorder --------------------------------------------------------------------------------------------


def test_recorder_draws_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    recorder = ModelRecorder(3, folder=tmp_path)
    recorder.plot_init(name="scores", fig_specs={"left": 0.1}, save=True)
    recorder.plot("scores", lines=[[1.0, np.float32(2)], []])
    recorder.plot("scores", image=np.zeros((2, 2, 3)))
    pictures = sorted((tmp_path / "plots").iterdir())
    assert [path.name for path in pictures] == ["scores-rank-3-1.png", "scores-rank-3-2.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    for arguments, words in (
        ({"name": "other", "image": np.eye(2)}, r"expected a name given to plot_init\(\), got 'other'"),
        ({"name": "scores"}, "expected either lines or an image"),
        ({"name": "scores", "lines": [[1]], "image": np.eye(2)}, "expected either lines or an image"),
    ):
        with pytest.raises(ValueError, match=words):
            recorder.plot(**arguments)
    nowhere = ModelRecorder(0)  # a record of a rank on another host
    nowhere.plot_init("scores")
    nowhere.plot("scores", lines=[[1, 2]])


def test_recorder_returns_the_latest_validation():
    recorder = ModelRecorder(0)
    assert recorder.get_latest_val_info() is None
    recorder.set_validation_means(6, {"cost": 0.5, "error": 0.25})
    assert recorder.get_latest_val_info() == [6, 0.5, 0.25, None]


def test_recorder_clears_costs():
    recorder = ModelRecorder(0)
    recorder.train_error(1, 0.5)
    assert recorder.get_last_weight() == 1
    recorder.clear_train_info()
    assert recorder.get_last_weight() == 0


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("start_epoch", ()),
        ("gather_val_info", ()),
        ("show", ()),
        ("end_epoch", (6, 0)),
        ("print_val_info", (6,)),
        ("save", (6, 0.1)),
        ("cut", (3,)),
        ("load", (6,)),
    ],
)
def test_recorder_methods_that_the_run_replaces_do_nothing(method, arguments, tmp_path, capsys):
    recorder = ModelRecorder(0, folder=tmp_path)
    recorder.start()
    recorder.set_validation_means(6, {"cost": 0.5})
    recorder.train_error(1, 0.5, 0.25, 3)
    recorder.val_error(1, 0.25)
    before = pickle.dumps(recorder)
    assert getattr(recorder, method)(*arguments) is None
    assert pickle.dumps(recorder) == before
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())
