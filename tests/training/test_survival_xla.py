"""In JAX mode training continues after the death of a worker, with new processes in place of forks."""

import itertools
import os
import signal

import numpy as np
import pytest
from library import HOSTS, XLA, fork_ranks
from trainer_model import Model, X, Y

import synkhronos as synk
from synkhronos import ranks
from synkhronos.loading import Loader
from synkhronos.training.trainer.death_recovery import RecoveryPolicy

pytestmark = [
    pytest.mark.skipif(not XLA or bool(HOSTS), reason="new processes in JAX mode, on one machine"),
    pytest.mark.new_ranks,
]


def kill_worker():
    (pid,) = ranks.get_session().worker_pids.values()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def train(name, kills_after_first_report, has_loader=False):
    """Train on two new ranks, and return values and reports.  The worker may be killed after the first report."""
    fork_ranks(2)
    try:
        model, reports, numbers = Model(name), [], np.arange(len(X))
        rows = (Loader([X, Y, numbers], processes=1), None) if has_loader else (X, [Y, numbers])
        valid = X, [Y, numbers]
        for report in model.trainer.epochs(*rows, 5, 2, every=3, valid=valid, on_death="continue"):
            reports.append(report)
            if kills_after_first_report and len(reports) == 1:
                kill_worker()
        return np.asarray(model.values()), np.asarray(model.count_uses()), reports
    finally:
        synk.close()


@pytest.mark.parametrize(("name", "has_loader"), [("BSP", True), ("LocalSGD", False)])
def test_on_death_continue_with_xla(name, has_loader):
    values, used, reports = train(name, kills_after_first_report=True, has_loader=has_loader)
    expected, _, others = train(name, kills_after_first_report=False)
    assert set(used.tolist()) == {2.0}  # each row once in each epoch
    np.testing.assert_allclose(values, expected, rtol=1e-12)
    np.testing.assert_allclose([report.loss for report in reports], [report.loss for report in others], rtol=1e-12)
    deaths = [death for report in reports for death in report.deaths]
    assert [death["rank"] for death in deaths] == [1] and "SIGKILL" in deaths[0]["cause"]


def test_losses_are_read_before_their_worker_can_die(monkeypatch):
    expected, _, others = train("BSP", kills_after_first_report=False)
    original, n_calls = RecoveryPolicy.run_update, itertools.count()

    def run_update(self, operation, steps=0):
        result = original(self, operation, steps)
        if next(n_calls) == 1:
            kill_worker()
        return result

    monkeypatch.setattr(RecoveryPolicy, "run_update", run_update)
    values, used, reports = train("BSP", kills_after_first_report=False)
    assert set(used.tolist()) == {2.0} and sum(len(report.deaths) for report in reports) == 1
    np.testing.assert_allclose(values, expected, rtol=1e-12)
    np.testing.assert_allclose([report.loss for report in reports], [report.loss for report in others], rtol=1e-12)
