"""Loop over epochs with a progress bar, which times training steps."""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import numpy as np

try:
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm
except ModuleNotFoundError as error:
    raise SystemExit(f"this demo needs {error.name}: pip install 'synkhronos[lasagne]'") from None

__all__ = ["RunResults", "Trainer", "fit"]


class Trainer(Protocol):
    """A network's functions and their data."""

    n_ranks: int

    def make_batches(self, rng: np.random.Generator) -> Sequence[Any]:
        """Return an epoch's batches of shuffled rows, as arguments of `train`."""

    def count_rows(self, batch: Any) -> list[int]:
        """Return the number of rows of a batch that each rank computes."""

    def train(self, batches: Sequence[Any]) -> list[Any]:
        """Take a step for each batch; return the loss before each, which a GPU may still be computing."""

    def validate(self) -> tuple[float, float]:
        """Return the mean loss and the error rate (0 to 1) of the validation data."""


@dataclass
class RunResults:
    """Results of a run."""

    title: str
    n_ranks: int
    #: Mean training loss of each epoch.
    losses: list[float] = field(default_factory=list)
    #: Loss and error rate (0 to 1) after each epoch, and of the test data at the end.
    validation: list[tuple[float, float]] = field(default_factory=list)
    test: tuple[float, float] | None = None
    #: Time to fork, build and compile, until the first steps are done.
    setup_seconds: float = 0.0
    #: Time of all training steps, except those that compiled, and the images that each rank computed in it.
    seconds: float = 0.0
    images: list[int] = field(default_factory=list)

    def compute_speed(self, images: int) -> float:
        """Return images per second; NaN if every step compiled."""
        return images / self.seconds if sum(self.images) else math.nan


def fit(trainer: Trainer, options: argparse.Namespace, title: str, start: float) -> RunResults:
    """Train for some epochs, and validate after each."""
    rng = np.random.default_rng(options.seed)
    run = RunResults(title, trainer.n_ranks, images=[0] * trainer.n_ranks)
    compiled: set[Any] = set()
    # Messages of the library are printed above the progress bar.
    log = logging.getLogger("synkhronos")
    with logging_redirect_tqdm([log]), tqdm(desc=title, unit="step", disable=options.quiet) as bar:
        for epoch in range(options.epochs):
            batches = trainer.make_batches(rng)[: options.steps]
            if not batches:
                raise SystemExit("there are fewer images than one batch has: choose a smaller batch size")
            bar.total = options.epochs * len(batches)
            row_counts = [trainer.count_rows(batch) for batch in batches]
            # At least three calls in an epoch: the first one, which compiles, is not counted.
            steps_per_launch = min(options.at_once, max(1, len(batches) // 3))
            losses: list[Any] = []
            begin = perf_counter()
            for start_step in range(0, len(batches), steps_per_launch):
                launch = slice(start_step, start_step + steps_per_launch)
                shape = str(row_counts[launch])
                if shape not in compiled:
                    # These steps compile, so they are not counted.
                    bar.set_description(f"{title}, compiling")
                    values = [float(loss) for loss in losses]
                    run.seconds += perf_counter() - begin
                    losses = values + [float(loss) for loss in trainer.train(batches[launch])]
                    compiled.add(shape)
                    bar.set_description(title)
                    begin = perf_counter()
                    run.setup_seconds = run.setup_seconds or begin - start
                else:
                    losses += trainer.train(batches[launch])
                    run.images = [sum(images) for images in zip(run.images, *row_counts[launch], strict=True)]
                bar.update(len(row_counts[launch]))
            # Losses are read once per epoch: reading one waits for the GPUs, which are then idle until the next step.
            values = [float(loss) for loss in losses]
            run.seconds += perf_counter() - begin
            run.losses.append(float(np.average(values, weights=[sum(counts) for counts in row_counts])))
            bar.set_description(f"{title}, validating")
            run.validation.append(trainer.validate())
            bar.set_description(title, refresh=False)
            bar.set_postfix(
                epoch=epoch + 1, loss=f"{run.losses[-1]:.4f}", validation_error=f"{run.validation[-1][1]:.2%}"
            )
    return run
