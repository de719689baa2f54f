"""Killed processes of loaders and readers leave no process, no memory, and lose no row."""

import _thread
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from library import shared, tensor
from loading_sources import DamagedPictures, NumberedPictures, SlowPictures, make_order
from paths import ROOT, SUPPORT
from system import is_alive, time_limit, wait_until, wait_until_ended

import synkhronos as synk
from synkhronos import exchange_rules, ranks
from synkhronos.loading import LoadError
from synkhronos.training import make_trainer
from synkhronos.training.updates import sgd

pytestmark = [pytest.mark.faults]

LIMIT = 30


# -- a loader dies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "phase"),
    [(0, "before the first batch"), (1, "in the middle"), (0, "while the ring is full"), (1, "stopped")],
)
def test_killed_loader_is_named(load, number, phase):
    loader = load(SlowPictures(60, 0.0 if phase == "while the ring is full" else 0.02), processes=2)
    batches, labels = loader.arrays(0, 6), []
    if phase != "before the first batch":
        labels += next(batches)[1].tolist()
    else:
        loader._prepare_pool(loader._make_plan(0, 6, 0, 0, False)[0], make_layout(loader, 6), False)
    if phase == "while the ring is full":
        wait_until(lambda: loader._pool.ring.is_filled(3))
    pid = loader._pool.pids[number]
    if phase == "stopped":
        os.kill(pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(
        LoadError, match=rf"loader {number} \(process {pid}\) was killed by SIGKILL .*No data is lost"
    ) as e:
        for _, numbers in batches:
            labels += numbers.tolist()
            killed = time.monotonic()
    assert time.monotonic() - killed < LIMIT
    assert e.value.row == len(labels) and labels == make_order(60)[: len(labels)].tolist()
    for _, numbers in loader.arrays(0, 6, start_row=e.value.row):  # with new loaders
        labels += numbers.tolist()
    assert labels == make_order(60).tolist()
    assert pid not in loader._pool.pids


def make_layout(loader, unit):
    from synkhronos.loading.ring import RingLayout

    return RingLayout(1, loader.processes, loader.depth, unit)


def test_row_that_kills_its_loader_is_named(load, tmp_path):
    position = int(make_order(20)[9])
    loader = load(DamagedPictures(20, kills=(position, str(tmp_path / "once"))), processes=3)
    with pytest.raises(LoadError, match="was killed by SIGKILL"):
        list(loader.arrays(0, 4))
    assert sum(len(numbers) for _, numbers in loader.arrays(0, 4)) == 20  # this row kills its loader once


def start_training(rule, loader):
    """Return a trainer and the iterator of its reports."""
    x, y = tensor.dtensor4("x"), tensor.dvector("y")
    w = shared(np.zeros(()), "w")
    loss = ((w - y / 100) ** 2).mean() + 0 * x.sum()
    trainer = make_trainer(loss, [w], x, y, sgd, rule, learning_rate=0.05)
    return trainer, trainer.epochs(loader, None, batch_size=5, epochs=50, every=2)


@pytest.mark.parametrize("rule", [exchange_rules.BSP(), exchange_rules.EASGD(period=2)], ids=repr)
def test_killed_loader_ends_training(fork, load, rule):
    fork(3)
    loader = load(SlowPictures(200, 0.003), processes=2)
    trainer, reports = start_training(rule, loader)
    next(reports)
    os.kill(loader._pool.pids[1], signal.SIGKILL)
    with time_limit(), pytest.raises((LoadError, synk.WorkerError), match=r"loader 1 \(process \d+\)"):
        list(reports)
    assert np.isfinite(trainer.params[0].get_value())  # the ranks are alive
    assert next(start_training(rule, loader)[1]).rows_seen == 30  # and the loader has new processes


# -- a rank, or the program, dies ----------------------------------------------------------------------------


def test_death_of_a_rank_ends_loaders(fork, load):
    fork(3)
    loader, rule = load(SlowPictures(200, 0.003), processes=2), exchange_rules.BSP()
    _, reports = start_training(rule, loader)
    next(reports)
    pids = list(loader._pool.pids)
    os.kill(ranks.get_session().worker_pids[2], signal.SIGKILL)
    with pytest.raises(synk.WorkerError, match="rank 2 .* was killed by SIGKILL"):
        list(reports)
    wait_until_ended(pids)
    fork(2)
    assert next(start_training(rule, loader)[1]).rows_seen == 20


@pytest.mark.parametrize(
    ("how", "sent"),
    [
        ("ranks", signal.SIGKILL),
        ("ranks", signal.SIGINT),
        ("alone", signal.SIGINT),
        ("exits", None),
    ],
)
def test_loader_leaves_nothing_at_exit(tmp_path, how, sent):
    process = subprocess.Popen(
        [sys.executable, str(SUPPORT / "loading_script.py"), str(tmp_path), how],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{SUPPORT}"},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until((tmp_path / "processes.json").exists)
        processes = json.loads((tmp_path / "processes.json").read_text())
        pids = processes["workers"] + processes["loaders"]
        assert len(processes["loaders"]) == 2
        if sent == signal.SIGINT:  # to all processes of the group, as a terminal sends it
            os.killpg(process.pid, sent)
        elif sent is not None:
            os.kill(process.pid, sent)
        assert process.wait(LIMIT) == (3 if sent is None else -sent)
        wait_until_ended(pids)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_loader_ignores_signals_that_the_program_handles(tmp_path):
    process = subprocess.Popen(
        [sys.executable, str(SUPPORT / "loading_script.py"), str(tmp_path), "handles"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{SUPPORT}"},
        start_new_session=True,
    )
    try:
        wait_until((tmp_path / "count").exists)
        os.killpg(process.pid, signal.SIGTERM)
        done = (tmp_path / "count").read_text()
        wait_until(lambda: (tmp_path / "count").read_text() not in ("", done))
        pids = json.loads((tmp_path / "processes.json").read_text())["loaders"]
        assert all(map(is_alive, pids))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    wait_until_ended(pids)


# -- interrupts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks_too", [False, True])
def test_interrupt_ends_the_wait_for_a_batch(fork, load, ranks_too):
    if ranks_too:
        fork(2)
    loader = load(SlowPictures(12, 0.2), processes=2)

    def go_through(row=0):
        if not ranks_too:
            return [numbers.tolist() for _, numbers in loader.arrays(0, 4, start_row=row)]
        return [np.array(loader.data[1][batch]).tolist() for batch in loader.epoch(0, 4, start_row=row)]

    threading.Timer(0.5, _thread.interrupt_main).start()
    with time_limit(), pytest.raises(KeyboardInterrupt):
        while True:
            go_through()
    assert sum(go_through(), []) == make_order(12).tolist()


def test_interrupt_at_any_moment_leaves_a_loader_usable(load):
    loader = load(NumberedPictures(50), processes=2, depth=2)
    for turn in range(25):
        timer = threading.Timer(0.002 * turn, _thread.interrupt_main)
        try:
            timer.start()
            while True:
                for _ in loader.arrays(turn, 5):
                    pass
        except KeyboardInterrupt:
            timer.join()
        labels = [numbers.tolist() for _, numbers in loader.arrays(turn, 5)]
        assert sum(labels, []) == make_order(50, epoch=turn).tolist()
