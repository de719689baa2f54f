"""Loaders for ranks: plain calls, the trainer under each kind of rule, resuming, classes of the launcher."""

import os

import numpy as np
import pytest
from library import assert_same, shared, tensor
from loading_sources import (
    DAMAGED_ROWS,
    ROWS,
    TARGETS,
    MostlyDamagedRows,
    NumberedPictures,
    PartlyDamagedRows,
    PartlyUnreadableRows,
    RegressionRows,
    SlowRegressionRows,
    UnloadableRows,
    make_order,
    make_picture,
)
from system import is_alive, list_children

import synkhronos as synk
from synkhronos import exchange_rules
from synkhronos.loading import Loader, LoadError
from synkhronos.loading.loader import open_rows
from synkhronos.training import CheckpointFolder, Recorder, make_trainer
from synkhronos.training.monitoring.recorder import read_records
from synkhronos.training.updates import sgd

pytestmark = [pytest.mark.usefixtures("forked_loaders")]

#: Parameters after a step of length 0.01 from 0 on the five rows of `PartlyUnreadableRows` that can be read.
STEP_ON_READABLE_ROWS = [0.01 * 2 * 30 / 5, 0.01 * 2 * 10 / 5, 0.0]

# -- for ranks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "processes"), [(1, 3), (2, 1), (2, 2), (3, 1), (3, 3)])
def test_loader_rows_on_ranks_equal_numpy(fork, load, n, processes):
    fork(n)
    x, y = tensor.dtensor4("x"), tensor.ivector("y")
    f = synk.function([x, y], [(x.sum(axis=(1, 2, 3)), "gather"), (y, "gather")])
    loader = load(NumberedPictures(23), processes=processes, vars=[x, y])
    for epoch in range(2):
        sums, labels = [], []
        for batch in loader.epoch(epoch, 7, seed=3):
            total, number = f(*loader.data, batch=batch)
            sums.append(np.asarray(total))
            labels.append(np.asarray(number))
            assert number.dtype == np.int32
        expected = make_order(23, 3, epoch)
        np.testing.assert_array_equal(np.concatenate(labels), expected)
        assert_same(np.concatenate(sums), [make_picture(row).sum() for row in expected])
    assert loader.wait_seconds > 0 and loader.n_skipped == 0


def test_loader_processes_end_with_the_ranks(fork):
    fork(2)
    loader = Loader(NumberedPictures(9), processes=2)
    batches = loader.epoch(0, 3)
    next(batches)
    pids = list(loader._pool.pids)
    assert len(pids) == 2 and set(pids) <= set(list_children(os.getpid()))
    synk.close()
    assert not any(is_alive(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="can't continue: .* the loader or the ranks were closed"):
        next(batches)
    fork(3)
    assert sum(len(range(9)[batch]) for batch in loader.epoch(0, 4)) == 9  # new ranks start new loader processes
    loader.close()
    with pytest.raises(RuntimeError, match="data: available only within a loop"):
        loader.data  # noqa: B018


# -- the trainer ---------------------------------------------------------------------------------------------


def make_least_squares_trainer(rule, **kwargs):
    x, y = tensor.dmatrix("x"), tensor.dvector("y")
    w = shared(np.zeros(3), "w")
    loss = ((tensor.dot(x, w) - y) ** 2).mean()
    return make_trainer(loss, [w], x, y, sgd, rule, learning_rate=0.02, validate={"mse": loss}, **kwargs)


def train(rule, data, **kwargs):
    """Train, and return the parameters and the reports."""
    new_trainer = make_least_squares_trainer(rule)
    reports = list(new_trainer.epochs(*data, **{"batch_size": 5, "epochs": 3, "seed": 3, "every": 4, **kwargs}))
    return new_trainer.params[0].get_value(), reports


@pytest.mark.parametrize(
    ("rule", "n"),
    [(exchange_rules.BSP(), 1), (exchange_rules.BSP(average="params"), 3), (exchange_rules.LocalSGD(3), 3)],
    ids=str,
)
def test_trainer_with_loader_equals_arrays(fork, load, rule, n):
    fork(n)
    expected, reports = train(rule, (ROWS, TARGETS), valid=(ROWS, TARGETS))
    loader = load([ROWS, TARGETS], processes=1 + n % 3)
    valid = load([ROWS, TARGETS], shuffle=False)
    params, others = train(rule, (loader, None), valid=valid)
    assert_same(params, expected)
    for report, other_report in zip(reports, others, strict=True):
        assert (report.rows_seen, report.steps, report.batch_description) == (
            other_report.rows_seen,
            other_report.steps,
            other_report.batch_description,
        )
        np.testing.assert_allclose(
            [other_report.loss, other_report.validation["mse"]], [report.loss, report.validation["mse"]], rtol=1e-12
        )


@pytest.mark.parametrize(
    "rule", [exchange_rules.EASGD(period=2), exchange_rules.GoSGD(probability=0.5), exchange_rules.ASGD()], ids=repr
)
def test_loader_with_asynchronous_ranks_reads_each_row_once(fork, load, rule):
    fork(3)
    loader = load([ROWS, TARGETS], processes=2, depth=2)
    params, reports = train(rule, (loader, None), epochs=4)
    assert reports[-1].rows_seen == 4 * 103 and sum(report.steps for report in reports) >= 4 * 21
    assert reports[-1].loss < reports[0].loss


def test_recorder_has_loader_waiting_time(load, tmp_path, two_ranks_per_test):

    for rule, ranks in ((exchange_rules.BSP(), 1), (exchange_rules.LocalSGD(2), 2)):
        folder = tmp_path / type(rule).__name__
        loader = load(SlowRegressionRows(40, 0.01))
        _, reports = train(rule, (loader, None), epochs=1, every=None, recorder=Recorder(folder, every=2))
        seconds = reports[-1].seconds
        assert seconds["load"] > 0.1  # 40 rows of 10 ms, except those read during steps
        lines = read_records(folder)
        for rank in range(ranks):
            assert sum(line["load"] for line in lines[f"rank-{rank}"]) > 0.1


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [(exchange_rules.BSP(), 2, 1), (exchange_rules.LocalSGD(2), 2, 2), (exchange_rules.LocalSGD(2), 1, 3)],
    ids=str,
)
@pytest.mark.slow
def test_trainer_with_loader_resumes_within_an_epoch(fork, load, tmp_path, rule, before, after):
    pytest.importorskip("safetensors", reason="the extra `training` is not installed")
    records = []
    fork(before)
    first = make_least_squares_trainer(rule)
    epochs = first.epochs(
        load(RegressionRows(), processes=2), None, 5, 2, seed=3, every=3, checkpoints=CheckpointFolder(tmp_path)
    )
    report = next(epochs)
    epochs.close()
    w = first.params[0].get_value()
    synk.close()
    fork(after)
    again, expected = make_least_squares_trainer(rule), make_least_squares_trainer(rule)
    loader, arrays = load([ROWS, TARGETS], processes=2), (ROWS, TARGETS)
    folders = [CheckpointFolder(tmp_path), CheckpointFolder(tmp_path)]
    stored = folders[0].list_paths()[0]
    for resumed, data in ((again, (loader, None)), (expected, arrays)):
        reports = list(resumed.epochs(*data, 5, 2, seed=3, every=3, resume=stored))
        records.append((resumed.params[0].get_value(), reports[-1].rows_seen, sum(r.steps for r in reports)))
    assert_same(records[0][0], records[1][0])
    assert records[0][1:] == records[1][1:] and report.rows_seen == 15 * before and not np.array_equal(records[0][0], w)


def test_trainer_counts_skipped_loader_rows(load, two_ranks_per_test):
    good = [i for i in range(103) if i not in DAMAGED_ROWS]
    for rule in (exchange_rules.BSP(), exchange_rules.LocalSGD(2)):
        loader = load(PartlyDamagedRows(), on_error="skip", processes=2)
        params, reports = train(rule, (loader, None), epochs=2, every=None)
        assert loader.n_skipped == 2 * len(DAMAGED_ROWS) and len(good) == 103 - len(DAMAGED_ROWS)
        assert reports[-1].loss < reports[0].loss


def test_trainer_skips_unreadable_batches(load, two_ranks_per_test):
    for rule in (exchange_rules.BSP(), exchange_rules.LocalSGD(2), exchange_rules.EASGD(period=2)):
        loader = load(MostlyDamagedRows(), on_error="skip")
        _, reports = train(rule, (loader, None), batch_size=2, epochs=2, every=None)
        assert loader.n_skipped == 2 * (103 - 13) and len(reports) == 2


@pytest.mark.parametrize("average", ["gradient", "params"])
def test_bsp_weights_ranks_by_the_rows_that_are_read(load, average, two_ranks_per_test):
    x, y, w = tensor.dmatrix("x"), tensor.dvector("y"), shared(np.zeros(3), "w")
    loss = ((tensor.dot(x, w) - y) ** 2).mean()
    trainer = make_trainer(loss, [w], x, y, sgd, exchange_rules.BSP(average), 0.01)
    loader = load(PartlyUnreadableRows(), shuffle=False, on_error="skip")
    (report,) = trainer.epochs(loader, None, 4, 1)
    np.testing.assert_allclose(w.get_value(), STEP_ON_READABLE_ROWS, rtol=1e-12)
    assert report.loss == 6.0


def test_loader_rows_may_stop_within_a_unit(fork, load):
    fork(1)
    loader, read = load([np.arange(23)], shuffle=False), []
    for start, stop in ((0, 6), (6, 14), (14, 22), (22, 23)):
        rows = open_rows(loader, 0, start, 4, 0, 1)
        for first in range(start, stop, 4):
            last = min(first + 4, stop)
            read += np.asarray(rows.data[0])[rows.wait_for_row_indexes(first, last)].tolist()
            rows.free(first, last)
        rows.record_position(stop)
    assert read == list(range(23))


def test_validation_without_readable_rows_is_an_error(fork, load):
    fork(1)
    with pytest.raises(LoadError, match="none of the rows of the validation data could be read"):
        next(
            make_least_squares_trainer(exchange_rules.BSP()).epochs(
                ROWS, TARGETS, 5, 1, valid=load(UnloadableRows(), on_error="skip")
            )
        )


@pytest.mark.parametrize(
    "rule", [exchange_rules.BSP(), exchange_rules.LocalSGD(2), exchange_rules.EASGD(period=2)], ids=repr
)
@pytest.mark.slow
def test_unreadable_row_ends_training_but_not_the_ranks(load, rule, two_ranks_per_test):
    with pytest.raises((LoadError, synk.WorkerError), match=r"row \d+ can't be read .*: OSError: damaged"):
        train(rule, (load(PartlyDamagedRows(), processes=2), None))
    params, _ = train(rule, (load([ROWS, TARGETS]), None))  # the ranks remain usable
    assert np.abs(np.asarray(params) - [1, 2, 3]).max() < 3


# -- classes of the launcher ---------------------------------------------------------------------------------


def test_launcher_model_reads_from_loaders(tmp_path):
    from launch_runs import read_json_lines, run
    from paths import SUPPORT

    run(
        "train",
        "--set=model='launch_models/loaded.py:Loaded'",
        "--set=ranks=2",
        "--devices=cpu",
        "--set=epochs=8",
        f"--folder={tmp_path}",
        cwd=SUPPORT,
    )
    reports = read_json_lines(tmp_path, "reports")
    assert len(reports) == 8 and reports[-1]["validation"]["cost"] < reports[0]["validation"]["cost"] / 2
    assert reports[-1]["batch"] == "2 x 10"
    assert reports[-1]["seconds"]["load"] > 0


@pytest.mark.slow
def test_launcher_weights_ranks_by_the_rows_that_are_read(tmp_path):
    from launch_runs import read_json_lines, run
    from paths import SUPPORT

    model = "--set=model='launch_models/loaded.py:PartlyUnreadable'"
    average = "--set=rule_options.average=params"
    run("train", model, average, "--set=ranks=2", "--devices=cpu", f"--folder={tmp_path}", cwd=SUPPORT)
    np.testing.assert_allclose(np.load(tmp_path / "params.npz")["arr_0"], STEP_ON_READABLE_ROWS, rtol=1e-12)
    assert read_json_lines(tmp_path, "reports")[0]["loss"] == 6.0
