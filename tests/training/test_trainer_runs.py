"""Runs of a trainer: resuming from checkpoints, schedules, early stops, records, and errors."""

import math
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest
from library import XLA, shared, tensor
from trainer_model import ALL, ROWS, Model, X, Y

import synkhronos as synk
from synkhronos import exchange_rules
from synkhronos.training import CheckpointError, CheckpointFolder, Recorder, make_trainer, schedules
from synkhronos.training.monitoring.meter import RankTotals
from synkhronos.training.monitoring.recorder import read_records
from synkhronos.training.monitoring.report import make_report
from synkhronos.training.train_function.train_function import TrainFunction
from synkhronos.training.updates import adam, partition, sgd

# -- going on ------------------------------------------------------------------------------------------------


CHANGES = [("BSP", 2, 3), ("LocalSGD", 2, 1), ("LocalSGD", 1, 3), ("DiLoCo", 2, 1), ("EASGD", 2, 3), ("EASGD", 3, 1)]
CHANGES += [("ASGD", 2, 1), ("GoSGD", 1, 2), ("GoSGD", 3, 1), ("Swap", 2, 3)]


@pytest.mark.parametrize(("name", "before", "after"), CHANGES if not XLA else CHANGES[1:2])
@pytest.mark.slow
def test_resume_on_other_ranks_uses_the_remaining_rows(fork, tmp_path, name, before, after):
    fork(before)
    model = Model(name)
    next(iter(model.epochs(5, 1, every=2, checkpoints=CheckpointFolder(tmp_path))))
    stored, value = np.asarray(synk.gather(model.counts, nd_up=1)), model.values()
    assert stored.sum() == 10 * before
    synk.close()
    fork(after)
    model = Model(name)
    reports = list(model.epochs(5, 1, every=2, checkpoints=CheckpointFolder(tmp_path), resume="latest"))
    # Each rank's counts continue those of an earlier rank.
    new = np.asarray(synk.gather(model.counts, nd_up=1)) - stored[[r % before for r in range(after)]]
    assert (new.sum(0) + stored.sum(0)).tolist() == [1.0] * ROWS
    assert reports[-1].rows_seen == ROWS
    assert np.abs(model.values() - value).max() > 0


def test_rules_resize_states_to_other_numbers_of_ranks():
    ranks = [
        {"params": np.full(3, float(r)), "optimizer": np.full(3, 10.0 * r), "excluded": np.zeros(0), "step": 4, "steps_since_exchange": 1,
         "own": {"weight": np.array([0.5, 0.25, 0.25][r])}, "shared": {"centre": np.full(3, 9.0)}}
        for r in range(3)
    ]  # fmt: skip
    for size in (1, 2, 3, 5):
        local = exchange_rules.LocalSGD().resize_states(ranks, size)
        assert [state["params"].tolist() for state in local] == [[1.0] * 3] * size
        assert [state["optimizer"].tolist() for state in local] == [[10.0] * 3] * size
        gossip = exchange_rules.GoSGD().resize_states(ranks, size)
        assert sum(state["own"]["weight"] for state in gossip) == 1
        mean = sum(state["own"]["weight"] * state["params"] for state in gossip)
        np.testing.assert_allclose(mean, [0.25 + 0.5] * 3)
        elastic = exchange_rules.EASGD().resize_states(ranks, size)
        assert [state["params"][0] for state in elastic] == [0.0, 1.0, 2.0, 9.0, 9.0][:size]
        assert [state["optimizer"][0] for state in elastic] == [0.0, 10.0, 20.0, 0.0, 0.0][:size]
        assert len(exchange_rules.Swap().resize_states(ranks, size)) == size
    assert [state["params"][0] for state in exchange_rules.ASGD().resize_states(ranks, 2)] == [9.0, 9.0]
    for state in ranks:
        state["own"] = {"base": np.array([1.0, 2.0, 3.0]), "n_average_items": 1}
    (pushed,) = exchange_rules.Downpour(asynchronous=False).resize_states(ranks, 1)
    # All ranks' steps are added to the base; the last element is a running average.
    assert pushed["params"].tolist() == [1 + (-1 + 0 + 1), 2 + (-2 - 1 + 0), 3 + (-3 - 2 - 1) / 3]


@pytest.mark.parametrize(
    "rule",
    [
        exchange_rules.EASGD(period=4, asynchronous=False),
        exchange_rules.Downpour(10, 10, asynchronous=False),
        exchange_rules.LocalSGD(4),
    ],
    ids=repr,
)
def test_synchronous_rules_resume_on_other_ranks_within_a_period(fork, tmp_path, rule):
    def train(n_ranks, rate, n_epochs, **options):
        fork(n_ranks)
        w = shared(np.zeros(4), "w")
        x, y = tensor.dmatrix("x"), tensor.dvector("y")
        trainer = make_trainer(((tensor.dot(x, w) - y) ** 2).mean(), [w], x, y, sgd, rule, rate)
        reports = trainer.epochs(X, Y, 5, n_epochs, checkpoints=CheckpointFolder(tmp_path, keep=9), **options)
        next(reports)
        value = np.asarray(w.get_value())
        reports.close()
        synk.close()
        return value

    value = train(2, 0.02, 1)  # 6 steps, of which 2 since the exchange
    assert np.abs(value).min() > 0.01
    checkpoint = CheckpointFolder(tmp_path).list_paths()[0]
    for n_ranks in (1, 3):
        resumed = train(n_ranks, 1e-300, 2, every=1, resume=checkpoint)  # one step of no length
        np.testing.assert_allclose(resumed, value, rtol=1e-12)


def test_resume_without_a_checkpoint_starts_anew(tmp_path, two_ranks_per_test):
    model = Model("LocalSGD")
    reports = list(model.epochs(5, 1, checkpoints=CheckpointFolder(tmp_path), resume="latest"))
    assert [report.rows_seen for report in reports] == [ROWS]


def test_second_call_that_has_nothing_left_to_train_warns(two_ranks_per_test):
    model = Model("BSP", rate=1e-300)
    assert len(list(model.epochs(5, 2))) == 2
    with pytest.warns(RuntimeWarning, match=r"nothing left to train: the total, epochs=2, includes the 2 of earlier"):
        assert list(model.epochs(5, 2)) == []
    assert len(list(model.epochs(5, 9, valid=(X, Y), patience=1))) == 2
    with pytest.warns(RuntimeWarning, match="nothing left to train: an earlier call has stopped by patience"):
        assert list(model.epochs(5, 9, valid=(X, Y), patience=1)) == []


@pytest.mark.parametrize("name", ["LocalSGD", "EASGD", "GoSGD"][: 1 if XLA else 3])
def test_resume_of_a_finished_training_trains_nothing(fork, tmp_path, name):
    fork(2)
    model = Model(name)
    assert len(list(model.epochs(5, 1, checkpoints=CheckpointFolder(tmp_path)))) == 1
    value = model.values()
    synk.close()
    fork(2)
    model = Model(name)
    assert list(model.epochs(5, 1, checkpoints=CheckpointFolder(tmp_path), resume="latest")) == []
    np.testing.assert_allclose(model.values(), value, rtol=1e-14)


def test_resume_after_early_stop_trains_nothing(tmp_path, two_ranks_per_test):
    stops = {"valid": (X, Y), "patience": 1, "checkpoints": CheckpointFolder(tmp_path)}
    assert len(list(Model("BSP", rate=1e-300).epochs(5, 9, **stops))) == 2
    assert list(Model("BSP", rate=1e-300).epochs(5, 9, **stops, resume="latest")) == []
    assert len(list(Model("BSP", rate=1e-300).epochs(5, 9, **{**stops, "patience": 2}, resume="latest"))) == 1


def get_weight_and_own(context, name):
    storage = context.get_persistent_dict(name)
    return storage["state"].own["weight"], np.array(storage["own_params"])


@pytest.mark.skipif(XLA, reason="the trainer's own bookkeeping, and XLA takes seconds to compile")
def test_gosgd_weights_and_messages_sum_to_one(fork):
    fork(3)
    x, w = tensor.dmatrix("x"), shared(np.zeros(4), "w")
    trainer = make_trainer(((tensor.dot(x, w) - 1) ** 2).mean(), [w], x, [], sgd, exchange_rules.GoSGD(1.0), 0.1)
    for _ in trainer.epochs(X, [], 5, 3):  # the last sender's weight is in a mailbox
        ranks = synk.run(get_weight_and_own, trainer._model.state.spec.name)
        assert math.isclose(sum(weight for weight, _ in ranks), 1.0)
        np.testing.assert_allclose(sum(weight * parameters for weight, parameters in ranks), w.get_value(), rtol=1e-12)


class Counts(exchange_rules.ExchangeRule):
    """Rule that adds 1 after each step, and fails once, in the middle of the second epoch."""

    def exchange(self, context, state):
        state.vector = state.vector + 1
        if state.step == 9 and not context.get_persistent_dict("failed"):
            context.get_persistent_dict("failed")["once"] = True
            context.barrier("all have come to the same place")
            raise RuntimeError("not now")


@pytest.mark.parametrize("name", ALL)
def test_trainer_starts_from_params_that_the_user_has_set(name, two_ranks_per_test):
    model = Model(name, rate=1e-300)
    list(model.epochs(5, 1))
    synk.broadcast(model.w, np.full(4, 100.0))
    list(model.epochs(5, 2))
    np.testing.assert_allclose(model.values(), [100.0] * 4 + [0.0], rtol=1e-12, atol=1e-200)


def test_nan_among_the_parameters_is_not_set_by_the_user(two_ranks_per_test):
    values = []
    for unused in (0.0, np.nan):
        x, w = tensor.dmatrix("x"), shared(np.array([0.0] * 4 + [unused]), "w")
        trainer = make_trainer(tensor.dot(x, w[:4]).mean(), [w], x, [], sgd, exchange_rules.DiLoCo(period=2))
        list(trainer.epochs(X, [], 5, 3))
        values.append(w.get_value()[:4])
    np.testing.assert_array_equal(*values)  # the rule's own momentum is kept


@pytest.mark.skipif(XLA, reason="the trainer's own bookkeeping, and XLA takes seconds to compile")
def test_trainer_continues_after_an_error(two_ranks_per_test):
    x, w = tensor.dmatrix("x"), shared(np.zeros(4), "w")
    trainer = make_trainer(tensor.dot(x, w).mean() * 0.0, [w], x, [], sgd, Counts())
    reports = trainer.epochs(X, [], 5, 2)
    next(reports)
    assert w.get_value().tolist() == [6.0] * 4
    with pytest.raises((RuntimeError, synk.WorkerError), match="not now"):
        next(reports)
    with pytest.warns(RuntimeWarning, match=r"continues after 60 rows: an error .* steps on later rows may remain"):
        list(trainer.epochs(X, [], 5, 2))
    assert w.get_value().tolist() == [15.0] * 4  # 6 + 3 + 6


class InterruptedSchedule:
    """Constant rate; after half of the first epoch, its first call raises KeyboardInterrupt."""

    is_interrupted = False

    def __call__(self, epoch):
        if 0.5 <= epoch < 1 and not self.is_interrupted:
            self.is_interrupted = True
            raise KeyboardInterrupt
        return 0.05 + 1e-12 * epoch  # every step sets the rate


def test_bsp_continues_after_the_last_step_before_an_interrupt(tmp_path, two_ranks_per_test):
    values, records = [], []
    for is_interrupted in (True, False):
        schedule, recorder = InterruptedSchedule(), Recorder(tmp_path / str(is_interrupted), every=1)
        schedule.is_interrupted = not is_interrupted
        model = Model("BSP", rate=schedule)
        if is_interrupted:
            with pytest.raises(KeyboardInterrupt):
                list(model.epochs(5, 1, recorder=recorder))
        (report,) = model.epochs(5, 1, recorder=recorder)
        assert model.count_uses().tolist() == [1.0] * ROWS
        values.append((report.rows_seen, report.steps, report.loss, model.values().tolist()))
        records.append([(line["step"], line["seen"], line["loss"]) for line in read_records(recorder.folder)["rank-0"]])
    assert values[0] == values[1]
    assert records[0] == records[1]


def test_interrupt_within_a_step_warns_that_it_may_be_repeated(monkeypatch, two_ranks_per_test):
    model = Model("BSP")

    def interrupt(self, *args, take=TrainFunction.take_steps_with_weights):
        take(self, *args)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainFunction, "take_steps_with_weights", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(model.epochs(5, 1))
    with pytest.warns(RuntimeWarning, match=r"continues after 0 rows: an error .* steps on later rows may remain"):
        list(model.epochs(5, 1))


def set_different_steps(context, name):
    storage = context.get_persistent_dict(name)
    storage["state"].step += context.number
    storage["state"].steps_since_exchange = context.number
    del storage["own_params"]


def get_steps(context, name):
    state = context.get_persistent_dict(name)["state"]
    return state.step, state.steps_since_exchange


@pytest.mark.skipif(XLA, reason="the trainer's own bookkeeping, and XLA takes seconds to compile")
@pytest.mark.parametrize(
    "rule", [exchange_rules.LocalSGD(3), exchange_rules.SlowMo(3)], ids=lambda rule: type(rule).__name__
)
def test_trainer_interrupt_at_different_steps_restarts_the_epoch(rule, two_ranks_per_test):
    x, w = tensor.dmatrix("x"), shared(np.zeros(4), "w")
    trainer = make_trainer(((tensor.dot(x, w) - 1) ** 2).mean(), [w], x, [], sgd, rule, 0.1)
    reports = trainer.epochs(X, [], 5, 3)
    next(reports)
    before = synk.run(get_steps, trainer._model.state.spec.name)[0][0]
    synk.run(set_different_steps, trainer._model.state.spec.name)
    next(reports)  # once SlowMo's exchanges were unpaired, and LocalSGD's were those of different steps
    places = synk.run(get_steps, trainer._model.state.spec.name)
    assert places[0] == places[1] and places[0][0] == 2 * before + 1


def test_resume_refuses_mixing_asynchronous_and_synchronous(tmp_path, two_ranks_per_test):
    x, w = tensor.dmatrix("x"), shared(np.zeros(4), "w")

    def trainer(asynchronous):
        rule = exchange_rules.EASGD(asynchronous=asynchronous)
        return make_trainer(((tensor.dot(x, w) - 1) ** 2).mean(), [w], x, [], sgd, rule, 0.1)

    list(trainer(False).epochs(X, [], 5, 1, checkpoints=CheckpointFolder(tmp_path)))
    with pytest.raises(
        CheckpointError, match="of EASGD with asynchronous=False, but this run has asynchronous=True: asynchronous and"
    ):
        list(trainer(True).epochs(X, [], 5, 2, resume=CheckpointFolder(tmp_path).list_paths()[0]))


def test_early_stop_uses_only_validation(tmp_path, two_ranks_per_test):
    keep = {"checkpoints": CheckpointFolder(tmp_path)}
    assert len(list(Model("BSP", rate=1e-300).epochs(5, 3, **keep))) == 3  # without validation, and no epoch is better
    stops = {"valid": (X, Y), "patience": 1, "resume": "latest"}
    assert len(list(Model("BSP", rate=1e-300).epochs(5, 9, **keep, **stops))) == 2


def test_early_stop_with_a_renamed_metric_starts_anew(tmp_path, two_ranks_per_test):
    x, w = tensor.dmatrix("x"), shared(np.zeros(4), "w")
    loss = ((tensor.dot(x, w) - 1) ** 2).mean()

    def reports(validate, epochs, **options):
        schedule = schedules.plateau(1e-300, factor=0.5, patience=3)
        trainer = make_trainer(loss, [w], x, [], sgd, exchange_rules.BSP(), schedule, validate=validate)
        options = {"checkpoints": CheckpointFolder(tmp_path), "patience": 1, "valid": (X, []), **options}
        return len(list(trainer.epochs(X, [], 5, epochs, **options))), schedule.best

    assert reports({"low": 0 * loss}, 9) == (2, 0.0)
    assert reports({"low": 0 * loss}, 9, resume="latest") == (0, 0.0)
    count, best = reports({"high": loss, "low": 0 * loss}, 9, resume="latest")
    assert count == 2 and best > 0


class FailsAtStart(exchange_rules.EASGD):
    """Rule that fails once on a rank: on rank 0 in `setup`, on rank 1 when it is unpickled."""

    failed = False  # in each process separately

    def __init__(self, rank):
        super().__init__(period=2)
        self.rank, self.master = rank, os.getpid()

    def __setstate__(self, state):
        self.__dict__.update(state)
        if self.rank == 1 and os.getpid() != self.master:
            self.fail()

    def setup(self, context, state):
        if self.rank == context.number == 0:
            self.fail()
        super().setup(context, state)

    def fail(self):
        if not FailsAtStart.failed:
            FailsAtStart.failed = True
            time.sleep(0.2)  # the other rank has started by now
            raise RuntimeError("not yet")


@pytest.mark.skipif(XLA, reason="the start of ranks does not depend on the device, and XLA takes seconds to compile")
@pytest.mark.parametrize("rank", [0, 1])
def test_trainer_failed_start_on_one_rank_restarts_all(fork, monkeypatch, rank):
    monkeypatch.setattr(FailsAtStart, "failed", False)
    fork(2)
    x, w = tensor.dmatrix("x"), shared(np.full(3, 5.0), "w")
    trainer = make_trainer(tensor.dot(x, w).mean() * 0.0, [w], x, [], sgd, FailsAtStart(rank))
    with pytest.raises(RuntimeError, match="not yet"):
        next(trainer.epochs(X[:, :3], [], 5, 1))
    (report,) = trainer.epochs(X[:, :3], [], 5, 1)
    assert report.rows_seen == ROWS
    assert w.get_value().tolist() == [5.0] * 3  # the centre starts from the ranks' parameters


class Interrupted(exchange_rules.GoSGD):
    """Rule that is interrupted once on rank 1, in `setup` or while it waits for a lock."""

    failed = False

    def __init__(self, place):
        super().__init__(1.0)
        self.place = place

    def setup(self, context, state):
        if self.place == "setup" and context.number == 1:
            self.fail()
        super().setup(context, state)

    def _send(self, context, state, target):
        if self.place == "lock" and context.number == 1 and not Interrupted.failed:
            context = SimpleNamespace(lock=self.fail)
        elif context.number == 0:
            time.sleep(0.05)  # otherwise it could take all batches before rank 1 takes one
        super()._send(context, state, target)

    def fail(self, *_):
        if not Interrupted.failed:
            Interrupted.failed = True
            time.sleep(0.2)  # the other rank has sent a message by now
            raise RuntimeError("not now")


@pytest.mark.skipif(XLA, reason="the start of ranks does not depend on the device, and XLA takes seconds to compile")
@pytest.mark.parametrize("place", ["setup", "lock"])
def test_gosgd_interrupt_keeps_the_mean(fork, monkeypatch, place):
    monkeypatch.setattr(Interrupted, "failed", False)
    fork(2)
    x, w = tensor.dmatrix("x"), shared(np.full(3, 5.0), "w")
    trainer = make_trainer(tensor.dot(x, w).mean() * 0.0, [w], x, [], sgd, Interrupted(place))
    with pytest.raises(RuntimeError, match="not now"):
        next(trainer.epochs(X[:, :3], [], 5, 1))
    (_,) = trainer.epochs(X[:, :3], [], 5, 1)
    np.testing.assert_allclose(w.get_value(), [5.0] * 3, rtol=1e-14)


# -- schedules, stops, records -------------------------------------------------------------------------------


def test_reported_learning_rate_is_of_a_stepping_rank():
    seconds = {"compute": 1.0}
    idle = RankTotals(seconds=seconds, learning_rate=0.0)
    busy = RankTotals(5.0, 5.0, 5, 1, seconds, 0.1)
    assert make_report([idle, busy], 0.5, 5, "2 x 5").learning_rate == 0.1
    assert np.isnan(make_report([idle, idle], 0.5, 0, "2 x 5").learning_rate)


@pytest.mark.parametrize("name", ["BSP", "LocalSGD"])
def test_learning_rates_follow_the_schedule(tmp_path, name, two_ranks_per_test):
    schedule = schedules.steps(0.1, {1: 0.1})
    recorder = Recorder(tmp_path, every=1)
    reports = list(Model(name, rate=schedule).epochs(5, 2, recorder=recorder))
    assert [report.learning_rate for report in reports] == pytest.approx([0.1, 0.01])
    lines = read_records(tmp_path)["rank-0"]
    assert {round(line["learning_rate"], 9) for line in lines if line["epoch"] == 1} == {0.01}


@pytest.mark.parametrize("n_good_epochs", [0, 1])
@pytest.mark.parametrize("name", ["BSP", "LocalSGD"])
def test_nan_loss_stops_before_a_checkpoint(tmp_path, name, n_good_epochs, two_ranks_per_test):
    checkpoints, seen = CheckpointFolder(tmp_path), []
    rate = schedules.steps(0.05, {1: 1e200}) if n_good_epochs else 1e200
    with (
        np.errstate(all="ignore"),
        pytest.raises(FloatingPointError, match=r"learning rate of (5e\+198|1e\+200) may be too high"),
    ):
        for report in Model(name, rate=rate).epochs(5, 9, checkpoints=checkpoints):
            seen.append(report.rows_seen)
    assert seen == [ROWS] * n_good_epochs
    paths = checkpoints.list_paths()
    assert [checkpoints.load(path).meta["seen"] for path in paths] == seen
    assert all(np.isfinite(array).all() for path in paths for array in checkpoints.load(path).arrays.values())


@pytest.mark.parametrize("name", ["BSP", "LocalSGD"])
def test_trainer_names_a_nan_row(name, two_ranks_per_test):
    row_numbers, x, y = np.arange(ROWS), X.copy(), Y.copy()
    x[[17, 40], 2], y[23] = np.nan, -np.inf
    for (inputs, targets, valid), words in (
        ((x, Y, (X, Y)), r"row 17 of x_data, 'x', has nan, the first of 2 such rows; nothing was saved since"),
        ((X, y, (X, Y)), r"row 23 of y_data, 'y', has -inf; nothing was saved since"),
        ((X, Y, (x, Y)), r"after 60 rows, validation \{'mse': nan\}: row 17 of valid, 'x', has nan"),
    ):
        with np.errstate(invalid="ignore"), pytest.raises(FloatingPointError, match=words):
            list(
                Model(name).trainer.epochs(
                    inputs, [targets, row_numbers], 5, 1, valid=(valid[0], [valid[1], row_numbers])
                )
            )
    # A row that was not used since the last report is not named.
    with np.errstate(all="ignore"), pytest.raises(FloatingPointError, match="learning rate of 1e.200 may be too high"):
        order = np.random.default_rng((0, 0)).permutation(ROWS)
        late = X.copy()
        late[order[-1]] = np.nan
        list(Model(name, rate=1e200).trainer.epochs(late, [Y, row_numbers], 5, 1, every=2))


@pytest.mark.parametrize("name", [name for name in ALL if name in ("BSP", "LocalSGD", "EASGD")])
def test_recorder_has_lines_of_each_rank(tmp_path, name, two_ranks_per_test):
    reports = []

    class Mine:
        def write(self, record):
            reports.append(record["seen"])

    model = Model(name)
    list(model.epochs(5, 2, recorder=[Recorder(tmp_path, every=2), Mine()]))
    files = read_records(tmp_path)
    assert [record["seen"] for record in files["reports"]] == reports == [ROWS, 2 * ROWS]
    rank_lines = [line for file, lines in files.items() if file != "reports" for line in lines]
    assert sum(line["rows"] for line in rank_lines) == 2 * ROWS
    for line in rank_lines:
        assert {"epoch", "step", "loss", "learning_rate", "compute", "exchange", "wait", "load"} <= set(line)
        assert line["loss"] > 0 and line["rows_per_second"] > 0


@pytest.mark.parametrize("name", ["BSP", "LocalSGD"])
def test_losses_are_summed_in_step_order(fork, tmp_path, name):
    """A recorder, which reads losses in between, does not change the last bits of a report's loss."""
    fork(1)
    recorders = [], [Recorder(tmp_path / "often", every=1)], [Recorder(tmp_path / "rarely", every=3)]
    options = {"batch_size": 1, "epochs": 4}
    losses = [[report.loss for report in Model(name).epochs(recorder=recorder, **options)] for recorder in recorders]
    assert losses[0] == losses[1] == losses[2]
    if name == "BSP":
        return  # one command takes many steps, and has one line
    often, rarely = (read_records(tmp_path / name)["rank-0"] for name in ("often", "rarely"))
    for i, line in enumerate(rarely):
        first, second, third = [record["loss"] for record in often[3 * i : 3 * i + 3]]
        assert line["loss"] == (first + second + third) / 3  # since Python 3.12, sum() rounds otherwise


def test_resume_truncates_records(tmp_path, two_ranks_per_test):
    checkpoints, recorder = CheckpointFolder(tmp_path / "c", every=2), Recorder(tmp_path / "r", every=1)
    list(Model("LocalSGD").epochs(5, 3, checkpoints=checkpoints, recorder=recorder))
    paths = checkpoints.list_paths()
    assert [checkpoints.load(path).meta["seen"] for path in paths] == [2 * ROWS, 3 * ROWS]
    list(Model("LocalSGD").epochs(5, 3, checkpoints=checkpoints, recorder=recorder, resume=paths[0]))
    files = read_records(tmp_path / "r")
    assert [record["seen"] for record in files["reports"]] == [ROWS, 2 * ROWS, 3 * ROWS]
    assert sum(line["rows"] for name, lines in files.items() if name != "reports" for line in lines) == 3 * ROWS


def test_excluded_parameters_stay_local(two_ranks_per_test):
    ALL["own bias"] = (lambda: exchange_rules.LocalSGD(1, exclude=lambda p: p.name == "b"), sgd)
    try:
        model = Model("own bias")
        list(model.epochs(5, 1))
    finally:
        del ALL["own bias"]
    w, b = np.asarray(synk.gather(model.w, nd_up=1)), np.asarray(synk.gather(model.b, nd_up=1))
    np.testing.assert_array_equal(w[0], w[1])
    assert abs(b[0] - b[1]).max() > 1e-6


def test_moments_of_an_excluded_parameter_stay_local(two_ranks_per_test):
    x, y = tensor.dmatrix("x"), tensor.dvector("y")
    w, b, c = shared(np.zeros(4), "w"), shared(0.0, "b"), shared(0.0, "c")
    rule = exchange_rules.LocalSGD(1, state="average", exclude=lambda p: p.name == "b")
    loss = ((tensor.dot(x, w) + b + c - y) ** 2).mean()
    for update_rule in (adam, partition((lambda p: p.name == "b", adam), sgd)):
        trainer = make_trainer(loss, [w, b, c], x, y, update_rule, rule)
        list(trainer.epochs(X, Y, 5, 1))
        moments = {s.name: synk.gather(s, nd_up=1) for s in trainer.optimizer_state}
        assert {name for name, (first, second) in moments.items() if np.any(first != second)} == {"b_m", "b_v"}


def update_learning_rate(loss, params, learning_rate, weight=None):
    updates = sgd(loss, params, learning_rate, weight=weight)
    updates.param_updates[learning_rate] = learning_rate * 0.5
    return updates


def test_learning_rate_that_steps_update_is_not_reset(two_ranks_per_test):
    x, w = tensor.dmatrix("x"), shared(np.zeros(4), "w")
    rule = exchange_rules.LocalSGD(2, state="reset")
    trainer = make_trainer(tensor.dot(x, w).mean(), [w], x, [], update_learning_rate, rule, 0.5)
    list(trainer.epochs(X, [], 5, 1))
    assert trainer.learning_rate.get_value() == 0.5**7  # after six steps


@pytest.mark.parametrize("name", ["BSP", "LocalSGD"])
def test_learning_rate_that_the_user_sets_warns(name, two_ranks_per_test):
    model = Model(name, rate=1e-3)
    list(model.epochs(5, 1))
    synk.broadcast(model.trainer.learning_rate, np.zeros(()))
    with pytest.warns(
        RuntimeWarning, match=r"has been set to 0, but the schedule sets it to 0\.001: set Trainer.schedule"
    ):
        (report,) = model.epochs(5, 2)
    assert report.learning_rate == model.trainer.learning_rate.get_value() == 1e-3
    model.trainer.schedule = 1e-4
    assert next(model.epochs(5, 3)).learning_rate == 1e-4  # without a warning


@pytest.mark.skipif(XLA, reason="the trainer's own bookkeeping, and XLA takes seconds to compile")
@pytest.mark.parametrize("batch_size", [3, 5])  # in the last step a rank has fewer rows, or none
def test_averages_of_parameters_are_weighted_by_rows(batch_size, two_ranks_per_test):
    values = []
    for name in ("BSP", "BSP of parameters"):
        model = Model(name, rows=13)
        list(model.epochs(batch_size, 1, rows=13))
        values.append(model.values())
    np.testing.assert_allclose(values[1], values[0], rtol=1e-13)


def test_interval_of_weight_0_has_a_loss_of_nan(two_ranks_per_test):
    x, mask, w = tensor.dmatrix("x"), tensor.dvector("mask"), shared(np.zeros(4), "w")
    loss = (mask * (tensor.dot(x, w) - 1) ** 2).sum() / mask.sum()
    trainer = make_trainer(loss, [w], x, mask, sgd, weight=mask.sum(), validate={"error": (loss, "mean", mask.sum())})
    ones = np.ones(ROWS)
    ones[np.random.default_rng((0, 0)).permutation(ROWS)[10:20]] = 0
    reports = list(trainer.epochs(X, ones, 5, 1, every=1, valid=(X, 0 * ones), patience=9))
    assert np.isnan([report.loss for report in reports]).tolist() == [False, True, False, False, False, False]
    assert np.isnan([report.validation["error"] for report in reports]).all()


# -- errors --------------------------------------------------------------------------------------------------


def test_schedule_under_a_local_rule_has_to_be_pickled(two_ranks_per_test):
    with pytest.raises(
        TypeError, match=r"learning_rate: under LocalSGD.* expected one that can be pickled, .* got <fun"
    ):
        list(Model("LocalSGD", rate=lambda epoch: 0.1).epochs(5, 1))


def test_checkpoint_folder_is_locked_by_a_trainer(fork, tmp_path):
    fork(1)
    checkpoints, model = CheckpointFolder(tmp_path), Model("LocalSGD")
    list(model.epochs(5, 1, checkpoints=checkpoints))
    with pytest.raises(CheckpointError, match="rows-0+[1-9][0-9]* is of another training run: continue it with"):
        next(Model("LocalSGD").epochs(5, 1, checkpoints=checkpoints))
    list(model.epochs(5, 2, checkpoints=checkpoints))  # the same model continues
    assert [checkpoints.load(path).meta["epoch"] for path in checkpoints.list_paths()] == [1, 2]


def test_folder_of_another_training_than_the_resumed_one_is_refused(fork, tmp_path):
    fork(1)
    first, other = CheckpointFolder(tmp_path / "first"), CheckpointFolder(tmp_path / "other")
    list(Model("BSP").epochs(5, 1, checkpoints=first))
    list(Model("BSP").epochs(5, 3, checkpoints=other))
    (path,), others = first.list_paths(), other.list_paths()
    model = Model("BSP")
    with pytest.raises(CheckpointError, match=f"{other.folder} has checkpoints of another training run than {path}: "):
        list(model.epochs(5, 2, checkpoints=other, resume=path))
    assert other.list_paths() == others and len(others) == 3
    (tmp_path / "link").symlink_to(first.folder)
    list(model.epochs(5, 2, checkpoints=first, resume=tmp_path / "link" / path.name))
    empty = CheckpointFolder(tmp_path / "empty")
    assert [report.epoch for report in Model("BSP").epochs(5, 3, checkpoints=empty, resume=path)] == [2, 3]
    linked = CheckpointFolder(tmp_path / "linked")
    (linked.folder / path.name).symlink_to(path)
    assert [report.epoch for report in Model("BSP").epochs(5, 3, checkpoints=linked, resume="latest")] == [2, 3]


# -- datasets that change --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["BSP", "LocalSGD", "EASGD"] if not XLA else ["LocalSGD"])
def test_data_may_have_other_lengths_in_each_epoch(tmp_path, name, two_ranks_per_test):
    model = Model(name)
    lengths, numbers_seen = [31, 47, 60, 17], []
    for epoch, n in enumerate(lengths, 1):
        data = X[:n], [Y[:n], np.arange(n)]
        numbers_seen += [
            report.rows_seen for report in model.trainer.epochs(*data, 5, epoch, recorder=Recorder(tmp_path))
        ]
    assert numbers_seen == np.cumsum(lengths).tolist() and model.count_uses().sum() == sum(lengths)
    assert [report["seen"] for report in read_records(tmp_path)["reports"]] == numbers_seen


@pytest.mark.parametrize("name", ["BSP", "EASGD"] if not XLA else ["LocalSGD"])
def test_data_that_grow_between_two_reports(name, two_ranks_per_test):
    model = Model(name)
    x, y, numbers = synk.data(X[:30]), synk.data(Y[:30]), synk.data(np.arange(30))
    epochs = model.trainer.epochs(x, [y, numbers], 5, 3, every=2)
    assert [next(epochs).rows_seen, next(epochs).rows_seen] == [20, 30]
    for data, values in ((x, X), (y, Y), (numbers, np.arange(ROWS))):
        data.set_value(values)
    assert [next(epochs).rows_seen for _ in range(3)] == [50, 70, 90]
    assert model.count_uses().tolist() == [2.0] * 30 + [1.0] * 30
    y.set_length(40)
    with pytest.raises(ValueError, match=r"^x_data, y_data: expected equally many rows of each, got \[60, 40, 60\]"):
        next(epochs)


def test_data_that_grow_resume_at_the_end_of_an_epoch(tmp_path, two_ranks_per_test):
    model, checkpoints = Model("LocalSGD"), CheckpointFolder(tmp_path, keep=9)
    list(model.epochs(5, 1, rows=40, every=3, checkpoints=checkpoints))
    within, end = checkpoints.list_paths()
    again = Model("LocalSGD")
    (report,) = again.epochs(5, 2, checkpoints=checkpoints, resume=end)
    assert report.rows_seen == 40 + ROWS and set(again.count_uses()) == {1.0, 2.0}
    for options, path in (({}, within), ({"seed": 1}, within), ({"rows": 30}, end)):
        with pytest.raises(CheckpointError, match="the order of rows would be another"):
            next(Model("LocalSGD").epochs(5, 2, **options, resume=path))


def test_data_of_an_unfinished_epoch_must_not_change(two_ranks_per_test):
    model = Model("LocalSGD")
    next(model.epochs(5, 1, every=2))
    for options in ({"rows": 40}, {"seed": 1}):
        with pytest.raises(ValueError, match=r"^x_data, seed: expected 60 rows and seed 0, since the last call"):
            next(model.epochs(5, 1, **options))
    assert [report.rows_seen for report in model.epochs(5, 1)] == [ROWS] and set(model.count_uses()) == {1.0}
