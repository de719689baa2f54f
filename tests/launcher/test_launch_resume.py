"""Checkpoints, signals, early stops and resumption of the launcher's runs."""

import itertools
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from launch_runs import read_json_lines, train
from library import package, shared, tensor

from synkhronos.exchange_rules import BSP
from synkhronos.launcher.model_class.model_interface import ModelInterfaceError
from synkhronos.launcher.model_class.model_recorder import ModelRecorder
from synkhronos.launcher.model_class.model_variables import group_variables
from synkhronos.launcher.rank_process.model_report_loop import ModelReportLoop
from synkhronos.training import CheckpointError, CheckpointFolder
from synkhronos.training.checkpoints import compatibility
from synkhronos.training.train_function.training_graph import build_local_updates
from synkhronos.training.updates import (
    adadelta,
    adagrad,
    adam,
    adamax,
    amsgrad,
    momentum,
    nesterov_momentum,
    rmsprop,
    sgd,
)

pytestmark = pytest.mark.starts_programs


@pytest.mark.parametrize("rule", ["BSP", "EASGD"])
def test_resume_from_a_checkpoint_equals_an_undisturbed_run(tmp_path, rule):
    pytest.importorskip("safetensors")
    options = {"rule": rule, "checkpoint": 1} | (
        {"rule_options__period": 3, "rule_options__asynchronous": "false"} if rule == "EASGD" else {}
    )
    train(tmp_path / "whole", "RandomRateMLP", epochs=4, **options)
    train(tmp_path / "parts", "RandomRateMLP", epochs=2, **options)
    train(tmp_path / "parts", "RandomRateMLP", "--resume", epochs=4, **options)
    whole, parts = (np.load(tmp_path / name / "params.npz") for name in ("whole", "parts"))
    for name in whole:
        np.testing.assert_array_equal(whole[name], parts[name])
    (tmp_path / "parts" / "params.npz").unlink()  # as if killed after its last checkpoint
    train(tmp_path / "parts", "RandomRateMLP", "--resume", epochs=4, **options)
    with np.load(tmp_path / "parts" / "params.npz") as parts:
        for name in whole:
            np.testing.assert_array_equal(whole[name], parts[name])
    assert [report["epoch"] for report in read_json_lines(tmp_path / "parts", "reports")] == [1, 2, 3, 4]
    assert [line["step"] for line in read_json_lines(tmp_path / "parts", "rank-1")] == [9, 18, 27, 36]


@pytest.mark.slow
def test_early_stop_keeps_the_best_epoch(tmp_path):
    pytest.importorskip("safetensors")
    options = {"rule": "EASGD", "rule_options__period": 3, "rule_options__asynchronous": "false"}
    train(tmp_path / "best", "OverfittingMLP", epochs=3, **options)
    best = {"keep_best": "['top5', 'max']", "patience": 2, "keep": 1, "checkpoint": 5, "epochs": 9, **options}
    for resume in ([], ["--resume"]):
        done = train(tmp_path / "run", "OverfittingMLP", *resume, **best)
        assert ("top5 max: no better for 2 epochs; the run ends after epoch 5" in done.stdout) != bool(resume)
        assert [report["epoch"] for report in read_json_lines(tmp_path / "run", "reports")] == [1, 2, 3, 4, 5]
        checkpoint = CheckpointFolder(tmp_path / "run" / "checkpoints", keep_best=("top5", "max"))
        assert [checkpoint.load(path).meta["epochs"] for path in checkpoint.list_paths()] == [3, 5]
        assert checkpoint.load(checkpoint.find_best()).metrics["top5"] == 1.0
        expected, params, last = (
            np.load(tmp_path / name) for name in ("best/params.npz", "run/best.npz", "run/params.npz")
        )
        for name in expected:
            np.testing.assert_array_equal(params[name], expected[name])
            assert not np.array_equal(params[name], last[name])
        (tmp_path / "run" / "best.npz").unlink()  # as if killed before its end
    # Another metric has no best value yet.
    train(tmp_path / "run", "OverfittingMLP", "--resume", **{**best, "keep_best": "error", "epochs": 6})
    assert read_json_lines(tmp_path / "run", "reports")[-1]["epoch"] == 6


def test_metric_missing_in_the_class_is_named():
    for keep_best, metrics, message in [
        (["acc", "max"], {"loss": 1.0, "cost": 2.0}, "A lacks:\n  metric 'acc', got loss, cost$"),
        (None, {"loss": 1.0}, "A lacks:\n  metric 'cost', got loss$"),
        (None, {}, "A lacks:\n  metric 'cost', got nothing$"),
    ]:
        settings = SimpleNamespace(keep_best=keep_best, patience=3, modelclass="A")
        epoch_loop, report = SimpleNamespace(settings=settings), SimpleNamespace(metrics=metrics)
        with pytest.raises(ModelInterfaceError, match=message):
            ModelReportLoop.observe(epoch_loop, report)


def test_more_reports_than_epochs_is_complete():
    epoch_loop = SimpleNamespace(n_reports=3, n_epochs=2, is_stopped_by_model=False)
    assert ModelReportLoop.has_trained_all_epochs(epoch_loop)


def make_model_with_step(update_rule):
    """Return a fake of a launcher's model, whose compiled step has the variables of an update rule."""
    x, w = tensor.dvector("x"), shared(np.zeros(3), "w")
    updates = build_local_updates(update_rule((tensor.dot(x, w) - 1) ** 2, [w], 0.1))
    return SimpleNamespace(params=[w], train_fn=package.function([x], [], updates=list(updates.items())))


class SlotsModel:
    """Model with a function in a slot, which is not in its ``__dict__``."""

    __slots__ = ("__dict__", "params", "train_fn")


def test_functions_in_slots_are_found():
    model = SlotsModel()
    vars(model).update(vars(make_model_with_step(momentum)))
    model.params, model.train_fn = vars(model).pop("params"), vars(model).pop("train_fn")
    assert len(group_variables(model).optimizer_state) == 1


def test_learning_rate_that_a_step_updates_is_no_optimizer_state():
    model = make_model_with_step(sgd)
    model.shared_lr = shared(0.1, "learning_rate")
    model.decay_fn = package.function([], [], updates=[(model.shared_lr, 0.5 * model.shared_lr)])
    groups = group_variables(model)
    assert (groups.optimizer_state, groups.other_variables) == ([], [model.shared_lr])


def test_resumption_refuses_variables_of_another_update_rule():
    """A run does not know the update rule of a class: it compares the rules' variables."""
    rules_of = {rule.__name__: rule for rule in (sgd, momentum, nesterov_momentum, adagrad, rmsprop, adadelta)}
    rules_of |= {rule.__name__: rule for rule in (adam, adamax, amsgrad)}
    names = {
        name: compatibility.describe_training("run", BSP("params"), group_variables(make_model_with_step(rule)), None)
        for name, rule in rules_of.items()
    }
    for before, after in itertools.product(names, repeat=2):
        if before == after:
            compatibility.check_can_resume(
                "rows",
                names[before],
                compatibility.describe_training(
                    "run", BSP("params"), group_variables(make_model_with_step(rules_of[after])), None
                ),
                frozenset(),
            )
        else:
            with pytest.raises(CheckpointError, match="is of another model: its variables of the update rule are"):
                compatibility.check_can_resume("rows", names[before], names[after], frozenset())


@pytest.fixture(scope="module")
def signalled_runs(tmp_path_factory):
    """Give the folder of undisturbed runs, one for each rule."""
    return tmp_path_factory.mktemp("signalled")


@pytest.mark.parametrize(
    ("rule", "mode", "epoch", "count"), [("BSP", "train", 1, 4), ("BSP", "val", 1, 2), ("EASGD", "train", 1, 4)]
)
@pytest.mark.slow
def test_resume_after_a_signal_equals_an_undisturbed_run(tmp_path, signalled_runs, rule, mode, epoch, count):
    pytest.importorskip("safetensors")
    options = {"rule": rule, "checkpoint": 1, "epochs": 3} | (
        {"rule_options__period": 3, "rule_options__asynchronous": "false"} if rule == "EASGD" else {}
    )
    undisturbed = signalled_runs / rule
    if not undisturbed.exists():
        train(undisturbed, "SignalledMLP", **options)
    done = train(tmp_path / "parts", "SignalledMLP", status=143, config__signal_at=[mode, epoch, count], **options)
    record = json.loads((tmp_path / "parts" / "run.json").read_text())
    newest = max((tmp_path / "parts" / "checkpoints").iterdir())
    assert (record["status"], record["signal"], record["checkpoint"]) == (143, "SIGTERM", str(newest))
    assert f"the run was ended by SIGTERM; --resume continues from {newest}" in done.stderr
    assert not (tmp_path / "parts" / "params.npz").exists()
    n_steps = int(newest.name.removeprefix("rows-"))
    assert n_steps == 18 if mode == "val" else 9 < n_steps < 18
    train(tmp_path / "parts", "SignalledMLP", "--resume", **options)
    whole, parts = (np.load(folder / "params.npz") for folder in (undisturbed, tmp_path / "parts"))
    for name in whole:
        np.testing.assert_array_equal(whole[name], parts[name])
    whole, parts = (read_json_lines(folder, "reports") for folder in (undisturbed, tmp_path / "parts"))
    for report, resumed_report in zip(whole, parts, strict=True):
        assert all(
            report[key] == resumed_report[key]
            for key in ("epoch", "seen", "steps", "loss", "validation", "learning_rate")
        )
    assert sum(line["rows"] for line in read_json_lines(tmp_path / "parts", "rank-1")) == 3 * 90


@pytest.mark.slow
def test_signal_ends_an_asynchronous_run(tmp_path):
    pytest.importorskip("safetensors")
    options = {"rule": "EASGD", "checkpoint": 1, "epochs": 2}
    train(
        tmp_path, "SignalledMLP", "--devices=cpu", "--ranks=3", status=143, config__signal_at=["train", 0, 3], **options
    )
    train(tmp_path, "SignalledMLP", "--resume", **options)  # two of the three ranks continue
    assert [report["epoch"] for report in read_json_lines(tmp_path, "reports")] == [1, 2]


def test_resume_skips_the_batches_of_an_epoch_that_were_used():
    from synkhronos.launcher import Model

    class Read(Model):
        batch_size = 2

        def build(self):
            kind = SimpleNamespace(type=SimpleNamespace(dtype="int64", ndim=1))
            self.inputs, self.params = [kind], []

        def load(self):
            return [np.arange(20)], []

    model, recorder = Read({"rank": 1, "size": 2, "seed": 3}), ModelRecorder(0)
    model.epoch = 4
    batches = [model.next_batch(recorder)[0].tolist() for _ in range(5)]
    model.epoch = 5
    model.next_batch(recorder)
    model.epoch = 4
    model.skip_iter(3)
    assert [model.next_batch(recorder)[0].tolist() for _ in range(2)] == batches[3:]


@pytest.mark.slow
def test_resume_repairs_a_truncated_log_line(tmp_path):
    pytest.importorskip("safetensors")
    train(tmp_path, "MLP", epochs=1, checkpoint=1)
    with open(tmp_path / "rank-1.jsonl", "a") as file:
        file.write('{"time": 17')  # as after a full disk or a power loss
    train(tmp_path, "MLP", "--resume", epochs=2, checkpoint=1)
    assert [line["epoch"] for line in read_json_lines(tmp_path, "rank-1")] == [0, 1]


@pytest.mark.slow
def test_resume_accepts_another_number_of_ranks(tmp_path):
    pytest.importorskip("safetensors")
    train(tmp_path, "MLP", epochs=1, rule="EASGD", checkpoint=1)
    train(tmp_path, "MLP", "--resume", "--devices=cpu", "--ranks=3", epochs=2, rule="EASGD")
    reports = [(report["batch"], report["seen"]) for report in read_json_lines(tmp_path, "reports")]
    assert reports == [("2 x 10", 180), ("3 x 10", 360)]
    done = train(tmp_path, "MLP", "--resume", epochs=3, status=1)
    assert re.search(r"CheckpointError: .*rows-0+9 has the state of the rule EASGD, but this run has BSP", done.stderr)
