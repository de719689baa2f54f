"""Compares trainings with random options on several ranks, with deaths and resumptions, with those of one process.

    python tests/support/fuzz_trainer.py --seed 0 --seconds 60

Each case draws a model of one or two inputs, an update rule, options, a number of rows, and steps of 12 rows in all.
One process trains first.  The same training then runs on several ranks; with workers that are killed; and in two parts,
on different numbers of ranks, with a sharded optimizer or without.  Exits with 1 at the first case whose parameters,
averages or reports differ.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import pathlib
import random
import signal
import sys
import tempfile
import threading
import time
from typing import Any

os.environ.setdefault("PYTENSOR_FLAGS", "mode=FAST_COMPILE,cxx=")
os.environ.setdefault("THEANO_FLAGS", "blas.ldflags=,mode=FAST_COMPILE,cxx=")
sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[2]), str(pathlib.Path(__file__).resolve().parent)]

import numpy as np
from library import shared, tensor

import synkhronos as synk
from synkhronos import ranks
from synkhronos.training import Checkpoint, Trainer, make_trainer, updates

#: Rows of a step of all ranks: a multiple of each number of ranks up to 4.
STEP = 12
#: Maximal seconds of a training.
STUCK = 120
RULES = ["sgd", "momentum", "nesterov_momentum", "adagrad", "rmsprop", "adadelta", "adam", "adamax", "amsgrad"]
RULES += ["adamw", "lion", "lamb", "muon"]


class Case:
    """A random model and its options."""

    def __init__(self, seed: int):
        self.seed = seed
        source, rng = random.Random(seed), np.random.default_rng(seed)
        self.source = source
        self.n_inputs, width, hidden = source.choice([1, 1, 2]), source.randint(1, 4), source.randint(1, 4)
        self.n_rows = source.randint(STEP, 5 * STEP)
        self.x = [rng.normal(size=(self.n_rows, width)) for _ in range(self.n_inputs)]
        self.y = rng.normal(size=self.n_rows)
        shapes = [*[(width, hidden)] * self.n_inputs, (hidden,), ()]
        self.first = [rng.normal(size=shape) for shape in shapes]
        self.rule = source.choice(RULES)
        self.options: dict[str, Any] = {}
        if self.rule != "adadelta":
            self.options["learning_rate"] = source.choice([0.01, 0.05])
        for name, chance, values in (
            ("clip_norm", 0.4, [0.1, 1.0]),
            ("ema", 0.4, [0.5, 0.99]),
            ("num_slices", 0.3, [2, 3]),
            ("loss_scale", 0.2, ["dynamic"]),
        ):
            if source.random() < chance:
                self.options[name] = source.choice(values)
        self.has_weight = source.random() < 0.3 and "num_slices" not in self.options
        self.epochs, self.every = source.randint(1, 3), source.choice([None, 1, 2])

    def __repr__(self) -> str:
        return (
            f"seed {self.seed}: {self.rule} {self.options}, {self.n_inputs} inputs, {self.n_rows} rows, "
            f"weight {self.has_weight}, {self.epochs} epochs, every {self.every}"
        )

    def make_trainer(self, shards: bool) -> Trainer:
        """Return a trainer of the model with its initial values."""
        x = [tensor.dmatrix(f"x{i}") for i in range(self.n_inputs)]
        y = tensor.dvector("y")
        params = [shared(value.copy(), f"p{i}") for i, value in enumerate(self.first)]
        *weights, bias, scale = params
        hidden = sum(tensor.dot(x_i, weight) for x_i, weight in zip(x, weights, strict=True)) + bias
        errors = (tensor.tanh(hidden).sum(axis=1) * scale - y) ** 2
        loss, options = errors.mean(), dict(self.options)
        if self.has_weight:
            options["weight"] = (y**2).sum()
            loss = (y**2 * errors).sum() / options["weight"]
        rule, rate = getattr(updates, self.rule), options.pop("learning_rate", 1.0)
        return make_trainer(
            loss, params, x, [y], rule, learning_rate=rate, validate={"mse": errors.mean()}, shard_optimizer=shards,
            **options,
        )  # fmt: skip

    def train(
        self, n_ranks: int, shards: bool = False, deaths: int = 0, folder: str = "", stop: int = 0, resume: Any = None
    ) -> list[Any]:
        """Train on some ranks; return parameters, averages and reports.

        Parameters
        ----------
        n_ranks : int
        shards : bool
            Whether the optimizer is sharded.
        deaths : int
            Number of workers that are killed, at random times.
        folder : str
            Folder of checkpoints.
        stop : int
            Number of reports after which the training ends; 0 for all.
        resume : path, optional
        """
        faulthandler.dump_traceback_later(STUCK, exit=True)
        synk.fork(n_ranks, use_gpu=False)
        trainer = self.make_trainer(shards)
        epochs = trainer.epochs(
            self.x, [self.y], STEP // n_ranks, self.epochs, valid=(self.x, [self.y]),
            every=self.every, checkpoint=Checkpoint(folder, keep=99) if folder else None, resume=resume,
            on_death="continue" if deaths else "stop", max_deaths=1000,
        )  # fmt: skip
        over, reports = threading.Event(), []

        def kill() -> None:
            session = ranks.get_session()
            while trainer._loop is None or not trainer._loop.operation_runner.has_copy:
                time.sleep(0.002)
            for _ in range(deaths):
                if over.wait(self.source.uniform(0.0, 0.3)):
                    return
                for pid in list(session.worker_pids.values())[:1]:
                    os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        if deaths:
            killer.start()
        for report in epochs:
            reports.append((report.seen, report.loss, report.validation["mse"]))
            if len(reports) == stop:
                break
        over.set()
        if deaths:
            killer.join()
        values = [np.asarray(p.get_value()) for p in trainer.params]
        if ranks.get_session().close_reason is None and "ema" in self.options and not deaths:
            values += [np.asarray(average.get_value()) for average in trainer.get_ema() or []]
        synk.close()
        return [values, reports]

    def check(self) -> None:
        """Compare all ways of training with that of one process."""
        source, can_shard = (
            self.source,
            self.rule not in ("lamb", "sgd") or "ema" in self.options and self.rule == "sgd",
        )
        values, reports = self.train(1)
        for deaths in (0, 3):
            n, shards = source.randint(2, 4), can_shard and source.random() < 0.5
            self.compare(
                f"{n} ranks, {deaths} deaths, sharded {shards}", self.train(n, shards, deaths), values, reports
            )
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            before, after = source.randint(1, 4), source.randint(1, 4)
            first, second = (can_shard and source.random() < 0.5 for _ in range(2))
            stop = source.randint(1, len(reports))
            _, begun = self.train(before, first, folder=folder, stop=stop)
            ended, resumed_reports = self.train(after, second, folder=folder, resume="latest")
            words = f"{stop} reports on {before} ranks, sharded {first}, then on {after}, sharded {second}"
            self.compare(
                words, [ended, begun[: len(reports) - len(resumed_reports)] + resumed_reports], values, reports
            )

    def compare(self, words: str, results: list[Any], values: list[Any], reports: list[Any]) -> None:
        """Raise AssertionError if a training differs from that of one process."""
        for values_of_rank, other in zip(results[0], values, strict=False):
            np.testing.assert_allclose(values_of_rank, other, rtol=1e-7, atol=1e-9, err_msg=words)
        np.testing.assert_allclose(results[1], reports, rtol=1e-7, atol=1e-9, err_msg=words)


def main() -> int:
    """Check random cases for ``--seconds``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    began, n_cases = time.monotonic(), 0
    while time.monotonic() - began < options.seconds:
        case = Case(options.seed * 100_000 + n_cases)
        try:
            case.check()
        except Exception:
            print("differs:", case, flush=True)
            raise
        n_cases += 1
    print(f"{n_cases} cases, no difference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
