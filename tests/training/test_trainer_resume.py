"""A trainer resumes from a checkpoint, with both graph libraries."""

import pytest
from trainer_model import SYNCHRONOUS, Model

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
