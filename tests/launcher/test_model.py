"""The launcher's base class `Model`."""

from types import SimpleNamespace

import numpy as np
import pytest
from launch_models import masks
from launch_runs import read_json_lines, run
from library import shared, tensor
from loading_sources import DamagedPictures
from paths import SUPPORT

from synkhronos.launcher.model_class.model_recorder import ModelRecorder

pytestmark = pytest.mark.starts_programs


@pytest.mark.parametrize("rule", ["BSP", "GOSGD"])
def test_model_base_class_trains(tmp_path, rule):
    run(
        "train",
        "--set=model='launch_models/regression_models.py:LinearRegression'",
        "--devices=cpu,cpu",
        f"--set=rule={rule}",
        "--folder",
        tmp_path,
        "--set=rule_options.probability=0.5" if rule == "GOSGD" else "--set=seed=3",
        cwd=SUPPORT,
    )
    reports = read_json_lines(tmp_path, "reports")
    assert [report["steps"] for report in reports] == [12] * 8  # 120 rows, ten a step, six steps on each of two ranks
    assert reports[-1]["validation"]["error"] < 0.3 and reports[-1]["learning_rate"] == 0.05
    (w,) = np.load(tmp_path / "params.npz").values()
    np.testing.assert_allclose(w, [1, 2, 3], atol=0.1)
    rng = np.random.default_rng(0).normal(size=(165, 3))[120:]
    loss = float(np.mean((rng @ w - rng @ [1.0, 2.0, 3.0]) ** 2))
    np.testing.assert_allclose(reports[-1]["validation"]["cost"], loss, rtol=1e-6)  # each of 45 rows once


@pytest.mark.parametrize("rule", ["BSP", "EASGD", "DiLoCo"])
@pytest.mark.slow
def test_model_metrics_are_weighted_by_items(tmp_path, rule):
    model = [
        "--set=model='launch_models/regression_models.py:MaskedRegression'",
        "--devices=cpu,cpu",
        f"--set=rule={rule}",
    ]
    more = ["--set=rule_options.period=1", "--set=rule_options.momentum=0.9"] if rule == "DiLoCo" else []
    run("train", *model, *more, "--set=checkpoint=1", "--set=seed=3", "--folder", tmp_path, cwd=SUPPORT)
    (x, y, mask), (_, y_valid, mask_valid) = (
        [part[rows] for part in masks.make_masked_rows()] for rows in (slice(40), slice(40, None))
    )
    for report in read_json_lines(tmp_path, "reports"):
        np.testing.assert_allclose(report["loss"], (mask * y**2).sum() / mask.sum(), rtol=1e-6)
        for name, errors in (("cost", y_valid**2), ("error", abs(y_valid))):
            expected = (mask_valid * errors).sum() / mask_valid.sum()
            np.testing.assert_allclose(report["validation"][name], expected, rtol=1e-6)
    _, average = np.load(tmp_path / "params.npz").values()
    expected = np.zeros(3)
    for epoch in range(2):
        order = np.random.default_rng((3, epoch)).permutation(40)
        for first in range(0, 40, 4):  # two rows a rank
            expected = 0.9 * expected + 0.1 * x[order[first : first + 4]].mean(axis=0)
    np.testing.assert_allclose(average, expected, rtol=0.5 if rule == "EASGD" else 1e-9)


def test_bsp_params_averages_by_weight(tmp_path):
    model = [
        "--set=model='launch_models/regression_models.py:SgdMaskedRegression'",
        "--devices=cpu,cpu",
        "--set=rule=BSP",
        "--set=seed=3",
    ]
    run("train", *model, "--set=epochs=2", "--folder", tmp_path, cwd=SUPPORT)
    x, y, mask = masks.make_masked_rows()
    w = np.zeros(3)
    for epoch in range(2):
        order = np.random.default_rng((3, epoch)).permutation(40)
        for first in range(0, 40, 4):  # two rows a rank
            rows = order[first : first + 4]
            if mask[rows].any():
                gradient = 2 * (mask[rows] * x[rows] * (x[rows] * w - y[rows])).sum(axis=0) / mask[rows].sum()
                w = w - 0.1 * gradient
    np.testing.assert_allclose(np.load(tmp_path / "params.npz")["arr_0"], w, rtol=1e-9)


def test_model_warns_of_a_mean_without_weight(tmp_path):
    model = ["--set=model='launch_models/regression_models.py:UnweightedMaskedRegression'", "--devices=cpu"]
    run("train", *model, "--set=epochs=1", "--folder", tmp_path, cwd=SUPPORT, new=True)  # pytest records warnings
    assert "loss: the denominator of a mean depends on the values of mask" in (tmp_path / "rank-0.log").read_text()


#: Training and validation data of 30 rows.
DATA = (np.zeros((30, 3)), np.zeros(30)), ()


def _make(*, data=DATA, batch_size=5, **attributes):
    """Make an instance of a model whose `build` sets attributes."""
    from synkhronos.launcher import Model

    members = {"batch_size": batch_size, "load": lambda self: data, "build": lambda self: vars(self).update(attributes)}
    return type("Line", (Model,), members)({"rank": 0, "size": 2, "seed": 0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": ((np.zeros(3), np.zeros(4)), ())}, r"load\(\): training arrays have \[3, 4\] rows"),
        ({"data": [np.zeros((9, 2)), np.zeros(9)]}, r"load\(\): training data: expected a list of arrays, or a Loader"),
        ({"data": None}, r"load\(\): expected training and validation arrays, got None"),
        ({"batch_size": 16}, "batch_size: expected an integer from 1 to 15, as 2 ranks share 30 rows, got 16"),
        ({"params": []}, r"build\(\): expected it to set the list inputs, got None"),
    ],
)
def test_model_refuses_wrong_data_and_attributes(arguments, message):
    from synkhronos.launcher.model_class.model_interface import ModelInterfaceError

    with pytest.raises(ModelInterfaceError, match=rf"^Line\.{message}"):
        _make(**arguments)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"loss": None}, r"\.build\(\): loss: expected a symbolic scalar, such as errors.mean\(\), got None"),
        ({"loss": "errors"}, r"\.build\(\): loss: expected a symbolic scalar.* got .* of "),
        ({"inputs": "x"}, r"\.build\(\): inputs lacks 'y', which the loss depends on"),
        ({"inputs": "xn"}, r"\.build\(\): inputs: expected variables, got 3"),
        ({"params": [3]}, r": missing or invalid:\n  attribute params\[0\]: expected a shared variable, got 3"),
        ({"updates": lambda *_: None}, r"updates\(\): expected the result of an update rule, got None"),
    ],
)
def test_model_refuses_a_wrong_graph(attributes, message):
    from synkhronos.launcher.model_class.model_interface import ModelInterfaceError

    x, y, w = tensor.dmatrix("x"), tensor.dvector("y"), shared(np.zeros(3), name="w")
    errors = (tensor.dot(x, w) - y) ** 2
    variables = {"x": x, "y": y, "n": 3, "errors": errors, "mean": errors.mean(), None: None}
    plain = {"inputs": "xy", "params": [w], "loss": "mean", **attributes}
    plain |= {"inputs": [variables[name] for name in plain["inputs"]], "loss": variables[plain["loss"]]}
    with pytest.raises(ModelInterfaceError, match=message):
        _make(**plain).compile_iter_fns()


def test_model_refuses_batches_that_do_not_fit_its_inputs():
    from synkhronos.launcher.model_class.model_interface import ModelInterfaceError

    matrix = SimpleNamespace(name="x", type=SimpleNamespace(dtype="float64", ndim=2))
    for inputs, message in (
        ([matrix], "Line: expected an array for each of inputs, 1, from load.* got 2"),
        ([matrix, matrix], r"Line, data of 'x': expected 2 dimensions, got shape \(5,\)"),
    ):
        with pytest.raises(ModelInterfaceError, match=message):
            _make(inputs=inputs, params=[]).next_batch(ModelRecorder(0))


def test_model_lacks_methods_of_its_subclasses():
    from synkhronos.launcher import Model

    with pytest.raises(TypeError, match=r"Model lacks the method load\(\)"):
        Model({"rank": 0, "size": 2, "seed": 0})


def test_recorder_times_each_epoch_alone():
    recorder = ModelRecorder(0)
    for epoch in range(2):
        recorder.begin_epoch(epoch)
        recorder.meter.seconds["exchange"] += 3.0
        recorder.meter.seconds["own"] = 1.0
        recorder.count_iteration()
        recorder.write_line()
        totals = recorder.meter.get_totals(0.1)
        assert totals.seconds == {"compute": 0, "exchange": 3, "wait": 0, "load": 0, "own": 1}
        assert (totals.rows, totals.steps, recorder.meter.total_steps) == (1, 1, epoch + 1)


def test_model_names_a_nan_row():
    from synkhronos.launcher.rank_process.model_report_loop import ModelReportLoop

    rows = np.zeros((5, 2))
    rows[3, 1] = np.inf
    recorder = ModelRecorder(0)
    recorder.train_error(1, np.nan)
    recorder.count_iteration()
    recorder.write_line()
    run = SimpleNamespace(
        context=SimpleNamespace(size=1), recorder=recorder, totals=[recorder.meter.get_totals(0.1)],
        state=SimpleNamespace(n_rows_seen=10), _training_ended_at=recorder.epoch_start_time + 1, n_reports=1,
        model=_make(data=([np.arange(5), rows], []), batch_size=1, inputs=[], params=[]),
    )  # fmt: skip
    with pytest.raises(
        FloatingPointError, match=r"the cost is nan in epoch 2: row 3 of load\(\)'s training array 1 has inf"
    ):
        ModelReportLoop.make_report(run)
    run.model = SimpleNamespace(data="a class of somebody's")
    with pytest.raises(FloatingPointError, match="the cost is nan in epoch 2: nothing of it was saved"):
        ModelReportLoop.make_report(run)


def test_model_trains_when_a_loader_skips_batches():
    from synkhronos.launcher import Model
    from synkhronos.loading import Loader

    class Read(Model):
        batch_size = 2

        def build(self):
            self.inputs = [SimpleNamespace(type=SimpleNamespace(dtype="int64", ndim=ndim)) for ndim in (4, 1)]
            self.params = []
            self.val_fn = lambda pictures, numbers: [numbers.mean()]

        def load(self):
            train, valid = DamagedPictures(8, bad=(2, 3)), DamagedPictures(5, bad=(4,))
            return [Loader(source, shuffle=False, on_error="skip") for source in (train, valid)]

    model, recorder = Read({"rank": 0, "size": 1, "seed": 0}), ModelRecorder(0)
    try:
        assert (model.data.n_batch_train, model.data.n_batch_val) == (4, 3)
        numbers = [model.next_batch(recorder)[1].tolist() for _ in range(4)]
        assert numbers == [[0, 1], [4, 5], [6, 7], [0, 1]]
        model.reset_iter("val")
        for i in range(3):
            model.val_iter(i, recorder)
        assert recorder.take_validation_sums() == (4, {"cost": 2 * 0.5 + 2 * 2.5})
    finally:
        model.cleanup()
