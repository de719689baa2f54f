"""Runs that continue after deaths of workers have the same rows and bits, for each rule and at any moment."""

import os
import random
import signal
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from library import DEVICE, HOSTS, fork_ranks, shared, tensor
from trainer_model import ROWS, SYNCHRONOUS, Model, X, Y

import synkhronos as synk
from synkhronos import ranks, startup
from synkhronos.loading import Loader
from synkhronos.ranks.errors import Death
from synkhronos.ranks.mailbox import Mailbox
from synkhronos.training import CheckpointFolder, Recorder, make_trainer
from synkhronos.training.checkpoints.checkpoint_folder import CheckpointError
from synkhronos.training.loops.death_limit import MAX_DEATHS_SINCE_COPY
from synkhronos.training.monitoring import recorder
from synkhronos.training.trainer import death_recovery, trainer_report_loop
from synkhronos.training.trainer.death_recovery import RecoveryPolicy
from synkhronos.training.trainer.epoch_data import TrainerData
from synkhronos.training.trainer.trainer_state import TrainerPosition
from synkhronos.training.updates import adam, momentum

pytestmark = [
    pytest.mark.skipif(DEVICE != "host" or bool(HOSTS), reason="workers that are forks of this process"),
    pytest.mark.new_ranks,
]
RANKS = 3


@pytest.fixture(autouse=True)
def close_ranks():
    yield
    synk.close()


class CommandKiller:
    """Kill a worker at some commands of a trainer.

    Parameters
    ----------
    moments : dict of int to (rank, bool)
        The rank to kill at a command: before the command is posted, or while the workers run it.
    waits : bool
        Count commands from the first copy of the state to the end of the training; otherwise from now on.
    """

    def __init__(self, monkeypatch, moments=None, waits=True):
        self.moments, self.count, self.killed, self.commands = moments or {}, 0, 0, []
        send, copy, self.is_armed = Mailbox.post, RecoveryPolicy._copy_state, not waits

        def copy_and_arm(survival):
            copy(survival)
            self.is_armed = True

        def kill_and_send(mailbox, *args):
            session = ranks.get_session()
            if not self.is_armed or waits and not session._n_keep_memory_contexts:
                return send(mailbox, *args)
            rank, is_late = self.moments.get(self.count, (None, False))
            self.count += 1
            self.commands.append(type(args[-1]).__name__)
            if rank is None:
                return send(mailbox, *args)
            self.killed += 1
            if is_late:
                send(mailbox, *args)
            pid = session.worker_pids[rank]
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            if not is_late:
                send(mailbox, *args)

        monkeypatch.setattr(Mailbox, "post", kill_and_send)
        monkeypatch.setattr(RecoveryPolicy, "_copy_state", copy_and_arm)


def train(name="BSP", noise=False, rate=0.05, update=None, shard_optimizer=False, **kwargs):
    """Train a new model on new ranks; return its values, the number of uses of each row, and the reports."""
    fork_ranks(RANKS)
    model = Model(name, noise=noise, rate=rate, update=update, shard_optimizer=shard_optimizer)
    reports = list(model.epochs(valid=(X, Y), on_death="continue", **kwargs))
    values, used = model.values(), model.count_uses()
    synk.close()
    assert not death_recovery._copies_by_trainer  # the memory of the copy is freed
    return values, used, reports


def check_same(name, disturbed, undisturbed):
    assert len(set(disturbed[1])) == 1  # each row is used equally often
    np.testing.assert_array_equal(disturbed[1], undisturbed[1])
    assert [report.rows_seen for report in disturbed[2]] == [report.rows_seen for report in undisturbed[2]]
    if name in SYNCHRONOUS:
        np.testing.assert_array_equal(disturbed[0], undisturbed[0])
        for report, expected in zip(disturbed[2], undisturbed[2], strict=True):
            assert (report.loss, report.validation) == (expected.loss, expected.validation)


def train_twice(monkeypatch, name, choose, tmp_path=None, **kwargs):
    """Train without deaths and count the commands, then with deaths at those that ``choose(count)`` returns."""
    folder = (lambda part: {}) if tmp_path is None else lambda part: {"checkpoints": CheckpointFolder(tmp_path / part)}
    counter = CommandKiller(monkeypatch)
    undisturbed = train(name, **folder("undisturbed"), **kwargs)
    monkeypatch.undo()
    killer = CommandKiller(monkeypatch, choose(counter.count))
    disturbed = train(name, **folder("disturbed"), **kwargs)
    monkeypatch.undo()
    check_same(name, disturbed, undisturbed)
    return killer, disturbed, undisturbed


@pytest.mark.parametrize("name", ["BSP", "EASGD"])
def test_on_death_continue_equals_an_undisturbed_training(name, monkeypatch):
    killer, disturbed, undisturbed = train_twice(monkeypatch, name, lambda count: {count // 2: (1, True)})
    deaths = [death for report in disturbed[2] for death in report.deaths]
    assert killer.killed == len(deaths) == 1 and not any(report.deaths for report in undisturbed[2])
    assert deaths[0]["rank"] == 1 and "SIGKILL" in deaths[0]["cause"] and deaths[0]["host"] == ""
    assert deaths[0]["step"] >= 0 and deaths[0]["seconds"] > 0


@pytest.mark.faults
@pytest.mark.parametrize(
    ("name", "seed"), [("BSP", 0), ("SlowMo", 1), ("EASGD", 0), ("ASGD", 1), ("GoSGD", 1), ("Swap", 0)]
)
def test_on_death_continue_after_random_deaths(name, seed, monkeypatch, tmp_path):
    source = random.Random(seed)

    def choose(count):
        chosen = range(seed, count, 16)  # a recovery takes four commands
        return {k + source.randrange(8): (source.randrange(1, RANKS), source.random() < 0.7) for k in chosen}

    killer, disturbed, _ = train_twice(monkeypatch, name, choose, tmp_path, noise=seed == 1, epochs=4, every=2)
    assert killer.killed > 2 and any(report.deaths for report in disturbed[2])


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize(("name", "spawns"), [("BSP", False), ("BSP", True), ("LocalSGD", False), ("LocalSGD", True)])
def test_on_death_continue_works_with_a_loader(name, spawns, monkeypatch):
    """With new processes in place of forks, as in JAX mode and on several hosts, loader processes start anew, too."""

    def make(moments=None):
        killer = CommandKiller(monkeypatch, moments)
        monkeypatch.setattr(death_recovery, "is_fork_unsafe", lambda: spawns)
        fork_ranks(RANKS)
        model, arrays = Model(name), [X, Y, np.arange(ROWS)]
        if name == "BSP":
            model.trainer.schedule = lambda epoch: 0.05 / (1 + epoch)
        loader, valid = Loader(arrays, processes=1), Loader(arrays, shuffle=False, processes=1)
        reports = list(model.trainer.epochs(loader, None, 5, 2, valid=valid, on_death="continue"))
        result = model.values(), model.count_uses(), reports
        loader.close()
        synk.close()
        monkeypatch.undo()
        return killer, result

    counter, undisturbed = make()
    moments = {counter.count // 3: (2, True), counter.count // 2: (1, False)}
    if name == "BSP":  # a death while the learning rate is set, between two steps
        moments[counter.commands.index("Scatter", 6)] = 1, True
    killer, disturbed = make(moments)
    assert killer.killed == len(moments)
    check_same(name, disturbed, undisturbed)


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("kind", ["whole", "sharded", "sharded, fresh workers"])
def test_on_death_copies_equal_variables_from_the_master(kind, monkeypatch):
    options = {"ema": 0.5, "shard_optimizer": kind != "whole"}

    def make(moments=None):
        killer = CommandKiller(monkeypatch, moments)
        if "fresh" in kind and moments:
            monkeypatch.setattr(death_recovery, "is_fork_unsafe", lambda: True)
        fork_ranks(RANKS)
        x, y, w = tensor.dmatrix("x"), tensor.dvector("y"), shared(np.zeros(4), "w")
        trainer = make_trainer(((tensor.dot(x, w) - y) ** 2).mean(), [w], x, y, adam, learning_rate=0.1, **options)
        reports = list(trainer.epochs(X, Y, 5, 6, on_death="continue"))
        states = [np.asarray(w.get_value()), *trainer._model.joint_step.get_optimizer_state()]
        by_rank = synk.gather(w, nd_up=1)
        synk.close()
        monkeypatch.undo()
        return killer, states, by_rank, reports

    counter, expected, _, _ = make()
    step = {"whole": 7, "sharded": 29}.get(kind, counter.count // 2)
    killer, states, by_rank, reports = make({k: (1 + k % 2, k % 4 < 2) for k in range(2, counter.count, step)})
    assert killer.killed > 1 and any(report.deaths for report in reports)
    for state, other in zip(states, expected, strict=True):
        np.testing.assert_array_equal(state, other)
    np.testing.assert_array_equal(by_rank, [states[0]] * RANKS)


def test_on_death_continues_random_streams_beside_a_sharded_optimizer(monkeypatch):
    options = {"noise": True, "update": momentum, "shard_optimizer": True}
    killer, disturbed, _ = train_twice(monkeypatch, "BSP", lambda count: {count // 2: (1, True)}, **options)
    assert killer.killed == sum(len(report.deaths) for report in disturbed[2]) == 1


def test_on_death_before_the_first_copy_ends_training(monkeypatch):
    fork_ranks(RANKS)
    iterator = Model("EASGD").epochs(on_death="continue")
    CommandKiller(monkeypatch, {2: (1, False)}, waits=False)
    with pytest.raises(synk.WorkerError, match=r"SIGKILL.*Call synkhronos\.fork\(\) to start again"):
        next(iterator)


@pytest.mark.parametrize(("name", "command"), [("BSP", 3), ("DiLoCo", 4), ("EASGD", 4)])
def test_on_death_keeps_changes_between_reports(monkeypatch, name, command):
    fork_ranks(RANKS)
    model = Model(name)
    iterator = model.epochs(epochs=3, on_death="continue")
    next(iterator)
    synk.broadcast(model.w, np.full(4, 7.0))
    synk.broadcast(model.trainer.learning_rate, np.full((), 1e-300))
    CommandKiller(monkeypatch, {command: (1, True)}, waits=False)
    model.trainer.schedule = 1e-300
    report = next(iterator)
    assert report.deaths and report.learning_rate == 1e-300
    np.testing.assert_allclose(model.w.get_value(), np.full(4, 7.0), rtol=1e-15)
    iterator.close()


def test_on_death_before_the_copy_of_changes_between_reports_ends_training(monkeypatch):
    fork_ranks(RANKS)
    model = Model("DiLoCo")
    iterator = model.epochs(epochs=2, on_death="continue")
    next(iterator)
    synk.broadcast(model.w, np.full(4, 7.0))
    CommandKiller(monkeypatch, {1: (1, True)}, waits=False)
    with pytest.raises(synk.WorkerError, match="SIGKILL"):  # the earlier copy would undo the change
        next(iterator)


def test_on_death_error_between_reports_can_be_caught(monkeypatch):
    fork_ranks(RANKS)
    model = Model("BSP")
    iterator = model.epochs(epochs=3, on_death="continue")
    next(iterator)
    CommandKiller(monkeypatch, {0: (1, True)}, waits=False)
    with pytest.raises(synk.WorkerError):
        model.count_uses()
    (death,) = next(iterator).deaths
    assert death["rank"] == 1 and death["step"] == 4
    next(iterator)
    assert set(model.count_uses()) == {3}


def break_devices(monkeypatch, is_broken):
    """Let the start of a new worker fail if ``is_broken(rank, size)``, except in `fork`."""
    is_recovery, set_up, replace = [False], startup._SetUpRank.run, ranks.Session.replace_workers

    def replace_workers(session, *args):
        is_recovery[0] = True  # new workers are forks
        return replace(session, *args)

    def fail_or_set_up(command, rank):
        if is_recovery[0] and not rank.is_master and is_broken(rank.number, rank.size):
            raise OSError("the device has fallen off the bus")
        set_up(command, rank)

    monkeypatch.setattr(ranks.Session, "replace_workers", replace_workers)
    monkeypatch.setattr(startup._SetUpRank, "run", fail_or_set_up)


@pytest.mark.parametrize("name", ["BSP", "BSP sharded", "LocalSGD", "GoSGD", "EASGD"])
def test_on_death_leaves_out_a_broken_device(name, monkeypatch, tmp_path):
    options: dict[str, Any] = {"noise": name == "BSP"}
    if name == "BSP sharded":
        name, options = "BSP", {"update": adam, "ema": 0.5, "shard_optimizer": True}
    fork_ranks(RANKS)
    model = Model(name, **options)
    break_devices(monkeypatch, lambda number, size: size == RANKS and number == 2)
    reports = []
    for report in model.epochs(
        epochs=3, valid=(X, Y), on_death="continue", checkpoints=CheckpointFolder(tmp_path / "three", keep=9)
    ):
        reports.append(report)
        if len(reports) == 1:
            os.kill(ranks.get_session().worker_pids[1], signal.SIGKILL)
            with pytest.raises(synk.WorkerError):
                while True:
                    model.count_uses()
    assert ranks.get_session().size == 2
    assert [report.batch_description for report in reports] == ["3 x 5 = 15", "2 x 5 = 10", "2 x 5 = 10"]
    assert [death["rank"] for death in reports[1].deaths] == [1, 2, 2]
    assert all("could not start: rank 2 raised OSError" in death["cause"] for death in reports[1].deaths[1:])
    values = model.values()
    synk.close()
    fork_ranks(2)
    resumed = Model(name, **options)
    checkpoints = CheckpointFolder(tmp_path / "three", keep=9)
    others = list(resumed.epochs(epochs=3, valid=(X, Y), resume=checkpoints.get_path(ROWS)))
    assert [report.rows_seen for report in others] == [report.rows_seen for report in reports[1:]]
    if name in SYNCHRONOUS:
        np.testing.assert_array_equal(values, resumed.values())
        assert [report.loss for report in others] == [report.loss for report in reports[1:]]


def test_on_death_keeps_the_device_of_a_worker_that_is_killed_at_its_start(monkeypatch):
    fork_ranks(RANKS)
    model, attempts = Model("BSP"), []
    CommandKiller(monkeypatch, {20: (1, True)})

    def count_attempts(session, *args, replace=ranks.Session.replace_workers):
        attempts.append(1)
        return replace(session, *args)

    def kill_at_the_first_two(number, size):
        if number == 1 and len(attempts) < 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    monkeypatch.setattr(ranks.Session, "replace_workers", count_attempts)
    break_devices(monkeypatch, kill_at_the_first_two)
    reports = list(model.epochs(epochs=3, on_death="continue"))
    assert [len(report.deaths) for report in reports if report.deaths] == [3]
    assert ranks.get_session().size == RANKS and set(model.count_uses()) == {3}


@pytest.mark.parametrize("name", ["BSP", "EASGD"])
def test_on_death_leaves_out_all_workers_within_steps(name, monkeypatch):
    fork_ranks(RANKS)
    model = Model(name, update=momentum, shard_optimizer=name == "BSP")
    CommandKiller(monkeypatch, {4: (1, True)})
    break_devices(monkeypatch, lambda number, size: True)
    reports = list(model.epochs(epochs=3, valid=(X, Y), on_death="continue"))
    assert ranks.get_session().size == 1 and reports[-1].batch_description == "1 x 5 = 5"
    assert [report.rows_seen for report in reports] == [60, 120, 180]
    assert sum(len(report.deaths) for report in reports) == 5
    np.testing.assert_allclose(synk.function([], model.w.sum())(), np.sum(model.w.get_value()))
    assert [velocity.get_value().shape for velocity in model.trainer.optimizer_state] == [(4,), (1,)]  # not sharded now


@pytest.mark.parametrize("name", ["Downpour", "EASGD together", "GoSGD"])
def test_on_death_leaves_out_all_workers_before_the_first_step(name, monkeypatch):
    values = []
    for size in (RANKS, 1):
        fork_ranks(size)
        model = Model(name, rate=0.01)
        model.w.set_value(np.ones(4))
        if size > 1:
            synk.distribute()
            CommandKiller(monkeypatch, {1: (1, True)})
            break_devices(monkeypatch, lambda number, size: True)
        list(model.epochs(on_death="continue"))
        assert ranks.get_session().size == 1
        values.append(model.values())
        synk.close()
    np.testing.assert_array_equal(*values)


#: Processes that `get_rate_or_interrupt` interrupts.
PIDS_TO_INTERRUPT: set[int] = set()


def get_rate_or_interrupt(epochs):
    """Return a rate, or interrupt a process within its second epoch; copies of a schedule share no state."""
    if epochs > 1.2 and os.getpid() in PIDS_TO_INTERRUPT:
        PIDS_TO_INTERRUPT.remove(os.getpid())
        raise KeyboardInterrupt
    return 0.01


@pytest.mark.parametrize("name", ["DiLoCo", "LocalSGD"])
def test_on_death_goes_on_after_an_interrupt_within_steps(name):
    fork_ranks(2)
    PIDS_TO_INTERRUPT.add(os.getpid())
    model = Model(name, rate=get_rate_or_interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(model.epochs(epochs=3, on_death="continue"))
    with pytest.warns(RuntimeWarning, match="continues after 60 rows"):
        for report in model.epochs(epochs=3, on_death="continue"):
            for pid in ranks.get_session().worker_pids.values() if report.epoch == 2 else ():
                os.kill(pid, signal.SIGKILL)
    assert (report.rows_seen, len(report.deaths)) == (3 * ROWS, 1)


def test_on_death_raises_an_error_of_the_rule_at_once(monkeypatch):
    def resize_states(rule, states, n_ranks):
        raise ZeroDivisionError

    fork_ranks(2)
    model = Model("EASGD")
    monkeypatch.setattr(type(model.rule), "resize_states", resize_states)
    break_devices(monkeypatch, lambda number, size: True)
    with pytest.raises(ZeroDivisionError):
        for _ in model.epochs(on_death="continue"):
            os.kill(ranks.get_session().worker_pids[1], signal.SIGKILL)


@pytest.mark.parametrize(("name", "source"), [("BSP", "loader"), ("BSP", "parts"), ("EASGD", "parts")])
def test_on_death_leaves_out_a_device_and_uses_each_row_once(name, source, monkeypatch):
    fork_ranks(RANKS)
    model, row_numbers = Model(name), np.arange(ROWS)
    x, y = Loader([X, Y, row_numbers], processes=1), None
    if source == "parts":
        x, y = synk.data_parts(lambda start, stop: X[start:stop], ROWS), [Y, row_numbers]
    CommandKiller(monkeypatch, {10: (1, True)})
    break_devices(monkeypatch, lambda number, size: size == RANKS and number == 1)
    reports = list(model.trainer.epochs(x, y, 5, 4, on_death="continue"))
    assert ranks.get_session().size == 2 and [report.rows_seen for report in reports] == [60, 120, 180, 240]
    used = model.count_uses()
    assert max(used) == 4 and (name != "BSP" or min(used) == 4)  # under EASGD the counts of the lost rank are missing


def test_rest_of_an_epoch_is_redistributed_and_no_other_training_resumes_in_it(monkeypatch):
    fork_ranks(RANKS)
    link = ranks.get_session()._group.link
    monkeypatch.setattr(link, "ranks_by_host", [range(1), range(1, 3)])
    parts = synk.data_parts(lambda start, stop: X[start:stop], ROWS)
    data = TrainerData([parts, synk.data(Y)], ROWS, 4, 0, None)
    data.allocate_row_order()
    before = data.prepare_row_source(1, 0, True).wait_for_row_indexes(0, data.n_epoch_rows).copy()
    assert data.round_stop_up_to_step(12, 30) == 30 and data.order_key == (60, 0, [4, 1, 2])
    monkeypatch.setattr(link, "ranks_by_host", [range(2), range(2, 3)])  # as if rank 1 had moved to the first host
    after = data.prepare_row_source(1, 12, True).wait_for_row_indexes(0, data.n_epoch_rows).copy()
    assert before[:12].tolist() == after[:12].tolist() and sorted(before.tolist()) == sorted(after.tolist())
    assert before.tolist() != after.tolist()
    steps = after[12:].reshape(-1, 12)
    assert steps[:, :8].max() < steps[:, 8:].min()  # rows of the first host, and of the second
    np.testing.assert_array_equal(parts, X)  # loaded again
    assert data.round_stop_up_to_step(12, 30) == 36 and data.round_stop_up_to_step(12, 60) == 60
    assert data.order_key[:2] == (60, 0) and len(data.order_key.partition_key) == 1  # no division, but a checksum
    again = data.prepare_row_source(1, 24, True)  # redistributed once
    assert again.wait_for_row_indexes(0, 60).tolist() == after.tolist()


def test_checkpoint_is_not_restored_into_rows_redistributed_otherwise(tmp_path, monkeypatch):
    """A loop that lost two ranks may hold rows in another order than its best checkpoint, for `restore_best`."""
    fork_ranks(RANKS)
    link = ranks.get_session()._group.link
    trained = Model("BSP").trainer._model
    trained.state.reset_if_session_is_new(ranks.get_session(), trained)

    def redistribute(epoch, *moves):
        """Return data whose rows were redistributed in an epoch, at each position among these ranks of each host."""
        monkeypatch.setattr(link, "ranks_by_host", [range(1), range(1, 3)])
        data = TrainerData([synk.data_parts(lambda start, stop: X[start:stop], ROWS)], ROWS, 4, 0, None)
        data.allocate_row_order()
        data.prepare_row_source(epoch, 0, True)
        for start, ranks_by_host in moves:
            monkeypatch.setattr(link, "ranks_by_host", ranks_by_host)
            data.prepare_row_source(epoch, start, True)
        return data

    first, second = (12, [range(2), range(2, 3)]), (36, [range(1), range(1, 2), range(2, 3)])
    data = redistribute(1, first)
    trained.state.position = TrainerPosition(epoch=1, epoch_position=24, n_rows_of_earlier_epochs=ROWS)
    path = trained.state.save(CheckpointFolder(tmp_path), data, trained.schedule)
    assert trained.state.restore(path, data, trained.schedule) == ROWS + 24
    for moves in (1, first, second), (1, second), (2, first), (1,):
        with pytest.raises(
            CheckpointError, match="rows that were redistributed .*: the order of rows would be another"
        ):
            trained.state.restore(path, redistribute(*moves), trained.schedule)


def test_host_gets_two_tries_and_the_ranks_of_a_lost_one_none(monkeypatch):
    """Ranks 4 and 5 are lost with their host; then the host of ranks 2 and 3 can't be reached, at first once."""
    fork_ranks(1)
    recovery, tried = Model("BSP").trainer._model.make_recovery_policy(100), []
    lost = Death.from_lost_host(range(4, 6), "c", "was lost")
    unreachable = [Death.from_failed_start(2, "b", "could not be reached", (2, 3)) for _ in range(3)]
    session = SimpleNamespace(size=6, rank=SimpleNamespace(master_rank=0), has_kept_memory=True, death=lost)
    deaths = [unreachable[0], None]

    def restore(ranks_to_remove):
        tried.append(list(ranks_to_remove))
        session.death = deaths.pop(0)
        if session.death is not None:
            raise RuntimeError
        session.size -= len(ranks_to_remove)

    monkeypatch.setattr(recovery, "_session", session)
    monkeypatch.setattr(recovery, "has_copy", True)
    monkeypatch.setattr(recovery, "_restore", restore)
    recovery._recover(RuntimeError(), 0.0)
    assert tried == [[4, 5], [4, 5]] and session.size == 4
    tried.clear()
    session.size, session.death, deaths[:] = 6, lost, [*unreachable[1:], None]
    recovery._death_limit.reset_counts_since_copy()
    recovery._recover(RuntimeError(), 0.0)
    assert tried == [[4, 5], [4, 5], [2, 3, 4, 5]] and session.size == 2


def test_stopped_validation_restores_generators_of_the_ranks_that_are_left(monkeypatch):
    """The number of ranks falls from 3 to 2 within a validation, which a signal stops."""
    sizes, restored = iter([3, 2]), []

    def run_as_ranks(task, generators, *states):
        if states:
            restored.extend(states)
        return [] if states else [["state"]] * next(sizes)

    def run_twice(operation):
        operation()
        restored.clear()
        return operation()

    monkeypatch.setattr(trainer_report_loop, "run", run_as_ranks)
    variables = SimpleNamespace(generators=["generator"])
    loop = SimpleNamespace(
        model=SimpleNamespace(state=SimpleNamespace(spec=SimpleNamespace(variables=variables))),
        checkpoints=True,
        death_policy=SimpleNamespace(run_update=run_twice),
        _validate=lambda report: False,
    )
    assert trainer_report_loop.TrainerReportLoop.validate(loop, None) is False
    assert restored == [[["state"]] * 2]


def test_on_death_without_a_device_for_the_master_ends_training(monkeypatch):
    fork_ranks(2)
    model = Model("BSP")
    iterator = model.epochs(epochs=3, valid=(X, Y), on_death="continue")
    next(iterator)
    set_up = startup._SetUpRank.run

    def fail_or_set_up(command, rank):
        if rank.is_master:
            raise OSError("the device has fallen off the bus")
        set_up(command, rank)

    monkeypatch.setattr(startup._SetUpRank, "run", fail_or_set_up)
    os.kill(ranks.get_session().worker_pids[1], signal.SIGKILL)
    with pytest.raises(synk.WorkerError, match="rank 0 could not start: OSError: .*; the master can't be left out"):
        list(iterator)


def test_on_death_is_recorded_and_each_step_once(monkeypatch, tmp_path):
    killer = CommandKiller(monkeypatch, {1: (1, True), 9: (2, False)})
    train("LocalSGD", recorder=Recorder(tmp_path, every=1))
    records = recorder.read_records(tmp_path)
    assert killer.killed == sum(len(record.get("deaths", ())) for record in records["reports"]) == 2
    for rank in range(RANKS):
        assert [record["step"] for record in records[f"rank-{rank}"]] == list(range(1, 9))


def test_on_death_in_the_same_step_ends_training(monkeypatch):
    fork_ranks(RANKS)
    model = Model("BSP")
    data = synk.data(np.ones(3))
    iterator = model.epochs(on_death="continue")
    next(iterator)
    # Commands that start new workers succeed.
    run = ranks.Session.run

    def kill_and_run(session, command):
        if type(command).__name__ == "StepCommand":
            os.kill(session.worker_pids[1], signal.SIGKILL)
        return run(session, command)

    monkeypatch.setattr(ranks.Session, "run", kill_and_run)
    with pytest.raises(
        synk.WorkerError,
        match=rf"4 deaths since the last copy of the state exceed the limit of {MAX_DEATHS_SINCE_COPY}",
    ) as caught:
        next(iterator)
    assert caught.value.rank == 1
    with pytest.raises(RuntimeError, match="memory was freed"):
        data[0]


def test_max_deaths_limits_deaths(monkeypatch):
    fork_ranks(RANKS)
    model = Model("BSP")
    CommandKiller(monkeypatch, dict.fromkeys((40, 80, 120), (1, True)))
    with pytest.raises(synk.WorkerError, match="3 deaths exceed max_deaths=2"):
        list(model.epochs(epochs=10, on_death="continue", max_deaths=2))


def test_on_death_stops_by_default(monkeypatch):
    fork_ranks(RANKS)
    model = Model("BSP")
    CommandKiller(monkeypatch, {6: (1, True)}, waits=False)
    with pytest.raises(synk.WorkerError, match="SIGKILL"):
        list(model.epochs())
    with pytest.raises(RuntimeError, match="SIGKILL"):
        ranks.get_session()


@pytest.mark.parametrize(("name", "noise"), [("BSP", True), ("LocalSGD", False)])
@pytest.mark.usefixtures("without_compiler")
def test_on_death_continue_with_spawned_workers(name, noise, monkeypatch):
    """As in JAX mode, new processes receive the data, the functions, the state, and the definitions of the script."""

    def rate(progress):
        return 0.05

    rate.__module__, rate.__qualname__ = "__main__", "rate"
    counter = CommandKiller(monkeypatch)
    undisturbed = train(name, noise)
    monkeypatch.undo()
    killer = CommandKiller(monkeypatch, {counter.count // 2: (1, True)})
    monkeypatch.setattr(death_recovery, "is_fork_unsafe", lambda: True)
    monkeypatch.setattr(sys.modules["__main__"], "rate", rate, raising=False)
    disturbed = train(name, noise, rate)
    check_same(name, disturbed, undisturbed)
    assert killer.killed == sum(len(report.deaths) for report in disturbed[2]) == 1
