"""A trainer resumes from a checkpoint, with both graph libraries."""

import hashlib
import json

import pytest
import safetensors.numpy
from trainer_model import SYNCHRONOUS, Model, X, Y

import synkhronos as synk
from synkhronos.training import CheckpointFolder, schedules


#: Number of steps between two reports; None: an epoch.
@pytest.mark.parametrize(("name", "every"), [*((name, 3) for name in SYNCHRONOUS), ("LocalSGD", None)])
def test_resume_is_bitwise_equal(fork, tmp_path, name, every):
    n_reports_before = 1 if every is None else 3
    fork(2)
    rate = schedules.warmup(schedules.steps(0.05, {1: 0.5}), 0.5)
    whole = Model(name, rate=rate, noise=True)
    expected = [
        report.loss for report in whole.epochs(5, 2, every=every, checkpoints=CheckpointFolder(tmp_path / "whole"))
    ]
    part = Model(name, rate=rate, noise=True)
    losses = []
    for report in part.epochs(5, 2, every=every, checkpoints=CheckpointFolder(tmp_path / "part")):
        losses.append(report.loss)
        if len(losses) == n_reports_before:
            break
    synk.close()
    fork(2)
    resumed = Model(name, rate=rate, noise=True)
    losses += [
        report.loss
        for report in resumed.epochs(
            5, 2, every=every, checkpoints=CheckpointFolder(tmp_path / "part"), resume="latest"
        )
    ]
    assert losses == expected
    assert resumed.values().tolist() == whole.values().tolist()


def rewrite_in_format_2(path):
    """Give the entries of a trainer's checkpoint the names of format 2."""
    header = json.loads((path / "meta.json").read_text())
    meta = header["meta"]
    stop, schedule = meta["stop"], meta["schedule"]
    meta["stop"] = {"measure": stop["label"], "best": stop["cost"], "since": stop["n_reports_since_best"]}
    schedule["made"], schedule["since"] = schedule.pop("identity"), schedule.pop("n_bad_reports")
    arrays = safetensors.numpy.load_file(path / "state.safetensors")
    arrays = {name.replace("steps_since_exchange", "since"): array for name, array in arrays.items()}
    (path / "meta.json").write_text(json.dumps({**header, "format": 2}))
    safetensors.numpy.save_file(arrays, path / "state.safetensors")
    names = ("state.safetensors", "meta.json")
    digests = [f"{hashlib.sha256((path / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (path / "SHA256SUMS").write_text("".join(digests))


def test_trainer_resumes_from_checkpoint_of_format_2(fork, tmp_path):
    fork(2)

    def train(n_epochs, **options):
        model = Model("LocalSGD", rate=schedules.plateau(0.5, factor=0.5, patience=1), noise=True)
        list(model.epochs(5, n_epochs, valid=(X, Y), **options))
        return model

    checkpoints = CheckpointFolder(tmp_path)
    train(2, checkpoints=checkpoints)
    rewrite_in_format_2(checkpoints.list_paths()[-1])
    resumed, whole = train(4, checkpoints=checkpoints, resume="latest"), train(4)
    assert resumed.values().tolist() == whole.values().tolist()
