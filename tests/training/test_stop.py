"""A scheduler's signal during training: a checkpoint is written after the step, and training can resume from it."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from launch_runs import ENVIRONMENT
from library import XLA
from paths import SUPPORT
from trainer_model import ROWS, Model, X, Y

import synkhronos as synk
from synkhronos.training import CheckpointFolder, Recorder
from synkhronos.training.loops import stop_signals
from synkhronos.training.monitoring.recorder import read_records
from synkhronos.training.trainer import trainer_report_loop

pytestmark = [
    pytest.mark.starts_programs,
    pytest.mark.skipif(XLA, reason="the trainer's own bookkeeping, and XLA takes seconds to compile"),
]


class SignalAt:
    """Schedule that raises a signal at the master's first call after a number of epochs."""

    def __init__(self, epochs, number=signal.SIGTERM):
        self.epochs, self.number, self.master = epochs, number, os.getpid()

    def __call__(self, epochs):
        if epochs >= self.epochs and os.getpid() == self.master:
            self.epochs = 1e9
            signal.raise_signal(self.number)
        time.sleep(0.01)  # the other ranks must not take all batches in the meantime
        return 0.05


@pytest.fixture
def check_each_step(monkeypatch):
    """Let synchronous ranks check after each step whether to stop."""
    pytest.importorskip("safetensors")
    monkeypatch.setattr(stop_signals, "CHECK_INTERVAL_SECONDS", 0.0)


def run_until_exit(reports):
    """Return the exit status with which training ends, and the losses before that."""
    losses = []
    with pytest.raises(SystemExit) as caught:
        losses += (report.loss for report in reports)
    return caught.value.code, losses


@pytest.mark.parametrize("name", ["BSP", "DiLoCo", "Swap"])
@pytest.mark.slow
def test_resume_after_a_signal_is_bitwise_equal(fork, tmp_path, check_each_step, name):
    fork(2)
    options = {"every": 3, "valid": (X[:7], Y[:7])}
    whole = Model(name, noise=True)
    expected = [
        report.to_record() for report in whole.epochs(5, 2, **options, checkpoints=CheckpointFolder(tmp_path / "whole"))
    ]
    part = Model(name, rate=SignalAt(4 / 6), noise=True)
    checkpoints = CheckpointFolder(tmp_path / "part")
    status, losses = run_until_exit(part.epochs(5, 2, **options, checkpoints=checkpoints))
    assert status == 128 + signal.SIGTERM and len(losses) == 1
    assert int(checkpoints.list_paths()[-1].name.removeprefix("rows-")) in (
        50,
        60,
    )  # ranks take turns of one or two steps
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    synk.close()
    fork(2)
    resumed = Model(name, noise=True)
    reports = [
        report.to_record() for report in resumed.epochs(5, 2, **options, checkpoints=checkpoints, resume="latest")
    ]
    for report, expected_report in zip(reports, expected[1:], strict=True):
        assert all(report[key] == expected_report[key] for key in ("epoch", "seen", "steps", "loss", "validation"))
    assert resumed.values().tolist() == whole.values().tolist()
    assert resumed.count_uses().tolist() == [2.0] * ROWS


@pytest.mark.parametrize(("name", "after"), [("EASGD", 3), ("EASGD", 2), ("GoSGD", 3)])
def test_resume_of_asynchronous_rules_uses_each_row_once(fork, tmp_path, check_each_step, name, after):
    fork(3)
    checkpoints = CheckpointFolder(tmp_path)
    part = Model(name, rate=SignalAt(0.3))
    status, losses = run_until_exit(part.epochs(2, 1, checkpoints=checkpoints))
    assert status == 128 + signal.SIGTERM and not losses
    row = int(checkpoints.list_paths()[-1].name.removeprefix("rows-"))
    assert 0.3 * ROWS < row <= ROWS and row % 6 == 0  # all rows, if the master's process was slow
    assert part.count_uses().sum() == row and part.count_uses().max() == 1
    stored = np.asarray(synk.gather(part.counts, nd_up=1))
    synk.close()
    fork(after)
    resumed = Model(name)
    (report,) = resumed.epochs(2, 1, checkpoints=checkpoints, resume="latest")
    new = np.asarray(synk.gather(resumed.counts, nd_up=1)) - stored[:after]
    assert (new.sum(0) + stored.sum(0)).tolist() == [1.0] * ROWS
    assert report.rows_seen == ROWS and report.steps == ROWS // 2


@pytest.mark.parametrize("name", ["DiLoCo", "Downpour", "GoSGD"])
def test_resume_after_a_signal_before_the_first_step(fork, tmp_path, monkeypatch, name):
    pytest.importorskip("safetensors")
    begin, values = trainer_report_loop.TrainerReportLoop._begin_epoch, []

    def begin_and_signal(loop):
        begin(loop)
        signal.raise_signal(signal.SIGTERM)

    fork(2)
    model, checkpoints = Model(name, rate=0.01), CheckpointFolder(tmp_path)
    model.w.set_value(np.ones(4))
    with monkeypatch.context() as patch:
        patch.setattr(trainer_report_loop.TrainerReportLoop, "_begin_epoch", begin_and_signal)
        run_until_exit(model.epochs(5, 2, checkpoints=checkpoints))
    assert [path.name for path in checkpoints.list_paths()] == ["rows-000000000000"]
    synk.close()
    fork(1)
    for options in ({}, {"checkpoints": checkpoints, "resume": "latest"}):
        model = Model(name, rate=0.01)
        model.w.set_value(np.full(4, 9.0 if options else 1.0))
        list(model.epochs(5, 2, **options))
        values.append(model.values())
    np.testing.assert_array_equal(*values)


def test_signal_within_validation_defers_the_report(tmp_path, check_each_step, monkeypatch, two_ranks_per_test):
    checkpoints, valid = CheckpointFolder(tmp_path / "part"), (X[:30], Y[:30])
    whole = [report.to_record() for report in Model("LocalSGD").epochs(5, 2, valid=valid)]
    part = Model("LocalSGD")
    validate, calls = part.trainer._model.validation, []

    def signalled(*args, **kwargs):
        calls.append(kwargs["batch"])
        if len(calls) == 5:  # three batches per report
            signal.raise_signal(signal.SIGUSR1)
        return validate(*args, **kwargs)

    monkeypatch.setattr(part.trainer._model, "validation", signalled)
    recorder = Recorder(tmp_path / "records")
    status, losses = run_until_exit(part.epochs(5, 2, valid=valid, checkpoints=checkpoints, recorder=recorder))
    assert status == 128 + signal.SIGUSR1 and losses == [whole[0]["loss"]] and len(calls) == 5
    (report,) = Model("LocalSGD").epochs(5, 2, valid=valid, checkpoints=checkpoints, recorder=recorder, resume="latest")
    assert report.loss == whole[1]["loss"] and report.validation == whole[1]["validation"]
    assert [line["seen"] for line in read_records(tmp_path / "records")["reports"]] == [60, 120]


@pytest.mark.parametrize("name", ["BSP", "LocalSGD"])
def test_signal_within_validation_keeps_random_streams(
    tmp_path, check_each_step, monkeypatch, name, two_ranks_per_test
):
    whole = Model(name, noise=True)
    expected = [report.loss for report in whole.epochs(5, 3, valid=(X, Y))]
    add, calls = trainer_report_loop.MetricTotals.update, []

    def add_and_signal(totals, *args):
        calls.append(add(totals, *args))
        if len(calls) == 8:  # in the second validation
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(trainer_report_loop.MetricTotals, "update", add_and_signal)
    options = {"valid": (X, Y), "checkpoints": CheckpointFolder(tmp_path)}
    _, losses = run_until_exit(Model(name, noise=True).epochs(5, 3, **options))
    resumed = Model(name, noise=True)
    losses += [report.loss for report in resumed.epochs(5, 3, resume="latest", **options)]
    assert losses == expected
    np.testing.assert_array_equal(resumed.values(), whole.values())


def test_signal_after_a_report_leaves_no_stale_checkpoint(fork, tmp_path, check_each_step):
    fork(1)
    checkpoints = CheckpointFolder(tmp_path, every=1, keep_best="mse")
    options = {"valid": (X, Y), "checkpoints": checkpoints}
    list(Model("BSP").epochs(5, 4, **options))
    first, stale, *_ = checkpoints.list_paths()
    before = checkpoints.load(stale).metrics

    def reports_until_signal(resume, **others):
        for report in Model("BSP", rate=0.01).epochs(5, 4, **options | others, resume=resume):
            yield report.loss
            signal.raise_signal(signal.SIGTERM)

    new_checkpoint = CheckpointFolder(tmp_path, every=9)  # the second epoch is not saved
    status, losses = run_until_exit(
        SimpleNamespace(loss=loss) for loss in reports_until_signal(first, checkpoints=new_checkpoint)
    )
    assert status == 128 + signal.SIGTERM and len(losses) == 1
    assert checkpoints.list_paths() == [first, stale]
    after = checkpoints.load(stale).metrics
    assert after["loss"] == losses[0] != before["loss"] and after["mse"] != before["mse"]


def test_signal_handler_of_the_user_is_kept(tmp_path, check_each_step, two_ranks_per_test):
    requests = []
    before = signal.signal(signal.SIGUSR1, lambda *_: requests.append(requested()))
    requested = stop_signals.get_stop_signal
    try:
        model = Model("LocalSGD", rate=SignalAt(0.3, signal.SIGUSR1))
        (report,) = model.epochs(5, 1, checkpoints=CheckpointFolder(tmp_path))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert report.rows_seen == ROWS and requests == [0]


def test_signals_are_not_handled_without_checkpoints(two_ranks_per_test):
    reports = Model("LocalSGD").epochs(5, 2)
    next(reports)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_signal_saves_no_nan_loss(fork, tmp_path, check_each_step):
    fork(1)
    model = Model("BSP", rate=SignalAt(0.3))
    model.w.set_value(np.full(4, np.nan))
    status, _ = run_until_exit(model.epochs(5, 1, checkpoints=CheckpointFolder(tmp_path)))
    assert status == 128 + signal.SIGTERM and not CheckpointFolder(tmp_path).list_paths()


def test_signal_after_the_training_loop_ends_the_process(tmp_path):
    code = f"""
        import signal, sys
        sys.path.insert(0, {str(SUPPORT)!r})
        from synkhronos.training.loops.stop_signals import StopSignalHandler

        def reports():
            with StopSignalHandler(30.0):
                yield 1
                yield 2

        for report in reports():
            signal.raise_signal(signal.SIGTERM)
            print(report, flush=True)
            break
        print("never", flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "1\n"), done.stderr


@pytest.mark.parametrize("every", [1, 3])
def test_signal_check_costs_no_collective_per_step(monkeypatch, every):
    now, collective_times = [0.0], []
    monkeypatch.setattr(stop_signals, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Alone:
        def all_gather(self, value):
            collective_times.append(now[0])
            return [value, (0, 2 * value[1])]

    agreement = stop_signals.StopAgreement(Alone())
    for _ in range(10_000):
        now[0] += 0.001 * every
        assert not agreement.agree_on_stop()
    assert len(collective_times) < 30 * every and max(np.diff(collective_times)) < 1.0


#: Trains until a signal; prints a line for each report, and one before a step that does not end.
SCRIPT = """
import sys, time
import synkhronos as synk
from synkhronos.training import CheckpointFolder
from trainer_model import Model

class Slow:
    def __call__(self, epochs):
        if epochs >= {stuck}:
            sys.stdout.write("stuck\\n")  # one write, unlike print: two ranks' lines do not mix
            sys.stdout.flush()
            time.sleep(1000)
        time.sleep(0.01)
        return 0.01

n = synk.fork(2, use_gpu=False)
model = Model("LocalSGD", rate=Slow())
for report in model.epochs(5, 10**6, checkpoints=CheckpointFolder(sys.argv[1]), grace={grace}):
    print(report.epoch, flush=True)
"""


@pytest.mark.faults
@pytest.mark.parametrize("how", ["all at once", "twice", "too late"])
def test_signal_of_a_scheduler_ends_a_program(tmp_path, how):
    pytest.importorskip("safetensors")
    values = {"stuck": 1e9 if how == "all at once" else 2.0, "grace": 0.5 if how == "too late" else 60}
    (tmp_path / "script.py").write_text(SCRIPT.format(**values))
    process = subprocess.Popen(
        [sys.executable, tmp_path / "script.py", tmp_path / "checkpoints"],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        # A signal between the last report and the step would end the program normally.
        last = "2.0" if how == "all at once" else "stuck"
        assert any(line.startswith(last) for line in process.stdout)
        os.killpg(process.pid, signal.SIGTERM)  # the workers, too
        if how == "twice":
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(stop_signals.DUPLICATE_SIGNAL_SECONDS + 0.5)
            os.killpg(process.pid, signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        if how == "all at once":
            assert process.returncode == 128 + signal.SIGTERM
            newest = CheckpointFolder(tmp_path / "checkpoints").list_paths()[-1]
            assert f"SIGTERM: training ends; go on with resume={str(newest)!r}" in errors
            assert CheckpointFolder(tmp_path / "checkpoints").load(newest).meta["epoch"] >= 2
        else:
            assert process.returncode == -signal.SIGTERM, errors
    finally:
        process.kill()
        process.communicate()


def test_signal_stops_all_ranks_after_the_same_round():
    """Two hosts' pools of ranks count their batches separately."""
    from synkhronos.training.trainer.local_batch_loop import LocalBatchLoop

    plan = SimpleNamespace(rank_groups=[range(2), range(2, 3)], batch_size=10, start=30, stop=1000, can_stop=True)
    counts = SimpleNamespace(array=np.array([7, 0, 2, 0]))
    lock = SimpleNamespace(pull=lambda *_: None, push=lambda *_: None)
    loop = LocalBatchLoop.__new__(LocalBatchLoop)
    loop.plan, loop._batch_counts, loop.max_steps_per_launch = plan, counts, 2
    loop.periodic_exchange = SimpleNamespace(restart_countdown=lambda: 64)
    loop.meter = SimpleNamespace(time_activity=lambda _: threading.Lock())
    seen = {0: [], 2: []}
    try:
        stop_signals._stop_signal = signal.SIGTERM
        for rank in (2, 0):
            loop.context = SimpleNamespace(number=rank, size=3, lock=lambda _: ValueContext(lock))
            seen[rank] = [start for batches in loop._iterate_taken_batches() for start in batches.starts]
            assert loop.end == 30 + 4 * 3 * 10  # seven batches of two ranks are four rounds
    finally:
        stop_signals._stop_signal = 0
    assert seen == {2: [30 + 8 * 10, 30 + 11 * 10], 0: [30 + 10 * 10]}


class ValueContext:
    def __init__(self, value):
        self.value = value

    def __enter__(self):
        return self.value

    def __exit__(self, *_):
        pass
