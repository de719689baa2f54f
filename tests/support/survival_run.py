"""A training in which a random worker is killed every few seconds, beside an undisturbed one.

    python tests/support/survival_run.py --seconds 60 --every 5 --ranks 3 --rule BSP

The undisturbed training goes first, without a pause, and takes as many epochs as the other.  Prints a line for each
death, and at the end whether the parameters and the reports are equal and how often each row was used.  Exits with 1 if
a synchronous rule has other parameters, or a row was used more or less often than others.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import signal
import sys
import threading
import time

os.environ.setdefault("PYTENSOR_FLAGS", "mode=FAST_COMPILE")
os.environ.setdefault("THEANO_FLAGS", "blas.ldflags=,mode=FAST_COMPILE")
sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[2]), str(pathlib.Path(__file__).resolve().parent)]

import numpy as np
from trainer_model import SYNCHRONOUS, Model, X, Y

import synkhronos as synk
from synkhronos import ranks


class Killer(threading.Thread):
    """Kills a random worker every few seconds.

    Parameters
    ----------
    every : float
        Seconds between two deaths.
    seed : int
    """

    def __init__(self, every: float, seed: int):
        super().__init__(daemon=True)
        self.every, self.random, self.is_over, self.n_killed = every, random.Random(seed), threading.Event(), 0

    def run(self) -> None:
        """Kill until `is_over` is set."""
        while not self.is_over.wait(self.every):
            pids = list(ranks.session().workers.pids.values())
            if pids:
                self.n_killed += 1
                os.kill(self.random.choice(pids), signal.SIGKILL)


def train(name: str, n_ranks: int, use_gpu: bool, n_epochs: int, killer: Killer | None, seconds: float):
    """Train for some seconds, or a number of epochs; return the parameters, the rows' counts, and the reports."""
    synk.fork(n_ranks, use_gpu=use_gpu)
    model = Model(name, rate=0.001)
    if killer is not None:
        killer.start()
    began, reports = time.monotonic(), []
    for report in model.epochs(epochs=n_epochs, valid=(X, Y), on_death="continue"):
        reports.append(report)
        for death in report.deaths:
            print(f"{time.monotonic() - began:6.1f} s", death, flush=True)
        if time.monotonic() - began > seconds:
            break
    if killer is not None:
        killer.is_over.set()
        killer.join()
    try:
        result = np.asarray(model.values()), np.asarray(model.used()), reports
    except synk.WorkerError:  # killed after the last report
        result = np.asarray(model.values()), None, reports
    synk.close()
    return result


def main() -> int:
    """Run both trainings and compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=5.0)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--gpu", action="store_true", help="ranks on GPUs; --every has to be longer than a recovery")
    parser.add_argument("--rule", default="BSP")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    killer = Killer(options.every, options.seed)
    values, used, reports = train(options.rule, options.ranks, options.gpu, 10**9, killer, options.seconds)
    expected, _, others = train(options.rule, options.ranks, options.gpu, len(reports), None, 1e9)
    deaths = [death for report in reports for death in report.deaths]
    is_same = np.array_equal(values, expected)
    losses = [report.loss for report in reports] == [report.loss for report in others]
    counts = None if used is None else sorted(set(used.tolist()))
    print(
        f"{options.rule}: {len(reports)} epochs, {killer.n_killed} workers killed, {len(deaths)} deaths survived; "
        f"seconds lost: {sum(d['seconds'] for d in deaths):.1f}, at most {max(d['seconds'] for d in deaths):.2f}; "
        f"parameters equal: {is_same}; losses equal: {losses}; each row used {counts} times"
    )
    wrong = counts not in (None, [float(len(reports))]) or options.rule in SYNCHRONOUS and not (is_same and losses)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
