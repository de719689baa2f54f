"""Recorder for model classes, with the interface of Theano-MPI's recorder and the records of this library.

The recorder is an argument of ``train_iter``, ``val_iter`` and ``print_info``.  The class reports costs and times, and
the run counts the steps::

    train_iter: start(), end("calc"), train_error(...)   --+
    run:        begin_epoch(), count_iteration()         --+--> Meter --> write_rank_record(): a line, also printed
    val_iter:   val_error(...)                           ----> take_validation_sums(): the epoch's report of all ranks

Methods of Theano-MPI's recorder that the run does not need do nothing.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from synkhronos.training.monitoring.meter import Meter, RankTotals

#: Names of activities in this library's records, by Theano-MPI's names.
_ACTIVITIES = {"calc": "compute", "comm": "exchange", "sync": "wait", "wait": "load", "load": "load"}


class ModelRecorder:
    """Recorder with the methods of Theano-MPI's recorder: collects costs, errors and times, and writes lines.

    Lines are written to ``recorder``, or only printed without one, every ``every`` steps.  `plot` saves pictures in the
    subfolder ``plots`` of ``folder``, the run's folder.  Without ``folder`` no pictures are drawn.

    Examples
    --------
    >>> recorder = ModelRecorder(0)
    >>> recorder.start()
    >>> recorder.end("calc")
    >>> recorder.train_error(1, 0.5, 0.1)
    >>> recorder.val_error(1, 0.25, 0.5, 0.125)
    >>> recorder.take_validation_sums()
    (1, {'cost': 0.25, 'error': 0.5, 'top5': 0.125})
    """

    def __init__(
        self, rank: int, recorder: Any = None, every: int = 40, rows_per_step: int = 1, folder: Path | None = None
    ):
        self.rank, self.every, self.rows_per_step = rank, every, rows_per_step
        self.verbose = rank == 0
        self._folder = folder
        self._picture_counts: dict[str, int] = {}
        self._latest_validation: list[Any] | None = None
        self.unit = "rows" if rows_per_step > 1 else "batches"
        self._recorder = recorder
        self.meter = Meter(rank, [self], _weigh_costs)
        self._clock_start: float | None = None
        self._last_cost, self._last_weight = math.nan, 0  # type: Any, Any
        self.learning_rate = math.nan
        self.clear_train_info()
        self._reset_validation()
        self.begin_epoch(0)

    # -- interface of classes --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the clock, which `end` stops."""
        self._clock_start = time.perf_counter()

    def end(self, mode: str) -> None:
        """Add the time since `start` to an activity.  Raise RuntimeError if `start` was not called.

        ``mode`` is Theano-MPI's ``calc``, ``comm``, ``sync``, ``wait`` (for data) or ``load``, or any other name.
        """
        if self._clock_start is None:
            raise RuntimeError(f"recorder.end({mode!r}): expected recorder.start() before it")
        activity = _ACTIVITIES.get(mode, mode)
        seconds = self.meter.seconds
        seconds[activity] = seconds.get(activity, 0.0) + time.perf_counter() - self._clock_start
        self._clock_start = None

    def train_error(self, count: int, cost: Any, error: Any = None, weight: Any = 1) -> None:
        """Record the cost of an iteration, a mean over ``weight`` items.  A cost of weight 0 is ignored."""
        self.meter.add_loss(cost, weight)
        self._last_cost, self._last_weight = cost, weight
        if error is not None:
            self._errors.append((error, weight))

    def print_train_info(self, count: int) -> None:
        """Write and print a line if ``every`` steps have been taken since the last line."""
        self.write_line(flush=False)

    def clear_train_info(self) -> None:
        """Discard the costs and errors since the last line."""
        self.meter.discard_losses()
        self._errors: list[tuple[Any, Any]] = []
        self._last_weight = 0

    def val_error(self, count: int, cost: Any, error: Any = None, error_top_5: Any = None, rows: float = 1) -> None:
        """Add the means of a batch of ``rows`` rows to the validation's sums.  A batch of none is ignored."""
        self._validation_weight += rows
        if not rows:
            return
        for name, value in (("cost", cost), ("error", error), ("top5", error_top_5)):
            if value is not None:
                self._validation_sums[name] = self._validation_sums.get(name, 0.0) + rows * _to_float(value)

    def get_latest_val_info(self) -> list[Any] | None:
        """Return ``[count, cost, error, top5]`` of the last validation over all ranks, or None before the first one."""
        return self._latest_validation

    def plot_init(self, name: str, fig_specs: Any = None, save: bool = False) -> None:
        """Declare the name of a picture for `plot`.  The other arguments, of Theano-MPI, have no effect."""
        self._picture_counts.setdefault(name, 0)

    def plot(self, name: str, lines: Any = None, image: Any = None, save: bool = False, **style: Any) -> None:
        """Draw lists of numbers as lines, or an array as an image, and save a new picture in the run's folder.

        An image has two dimensions, or three with red, green and blue last.  Styles are ``lw``, the width of lines, and
        ``cmap``, the colours of images.  ``save`` is an argument of Theano-MPI, and ignored.  Without a folder or
        matplotlib nothing is drawn.  If matplotlib is missing, the first call prints a message.

        Raise ValueError if both or neither of ``lines`` and ``image`` are given, or `plot_init` was not called with
        this name.
        """
        if name not in self._picture_counts:
            raise ValueError(f"plot(): expected a name given to plot_init(), got {name!r}")
        if (lines is None) == (image is None):
            raise ValueError("plot(): expected either lines or an image")
        self._picture_counts[name] += 1
        if self._folder is None:
            return
        if find_spec("matplotlib") is None:
            if sum(self._picture_counts.values()) == 1:
                sys.stdout.write("plot() draws nothing: matplotlib is not installed\n")
            return
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5, 4))
        axes = figure.subplots()
        axes.set_title(name)
        for line in lines if lines is not None else ():
            axes.plot(np.asarray(line, np.float64), lw=style.get("lw", 2))
        if image is not None:
            axes.imshow(np.asarray(image), cmap=style.get("cmap"))
        folder = self._folder / "plots"
        folder.mkdir(parents=True, exist_ok=True)
        safe = re.sub(r"[^\w-]", "_", name)
        figure.savefig(folder / f"{safe}-rank-{self.rank}-{self._picture_counts[name]}.png")

    def save(self, *_: Any, **__: Any) -> None:
        """Do nothing: the run gathers validation, times epochs, writes lines, and removes later ones itself."""

    gather_val_info = print_val_info = start_epoch = end_epoch = load = cut = show = save

    # -- interface of the run --------------------------------------------------------------------------------

    def set_validation_means(self, count: int, means: dict[str, float]) -> None:
        """Set the result of `get_latest_val_info`: means of a validation over all ranks."""
        if means:
            self._latest_validation = [count, *(means.get(name) for name in ("cost", "error", "top5"))]

    def begin_epoch(self, epoch: int, steps: int = 0, weighted_cost_sum: float = 0.0, weight_sum: float = 0.0) -> None:
        """Begin an epoch, or continue it after ``steps`` steps, with the sums of their weighted costs and weights."""
        self.epoch, self.epoch_start_time = epoch, time.perf_counter()
        rows = steps * self.rows_per_step
        self.meter.begin_interval(RankTotals(weighted_cost_sum, weight_sum, rows, steps, first_launch_rows=rows))

    def count_iteration(self, seconds: float = 0.0) -> None:
        """Count an iteration of ``seconds`` seconds.  The speed excludes the first iteration."""
        self.meter.count_step(self.rows_per_step)
        self.meter.record_first_launch(1, self.rows_per_step, seconds)

    def write_line(self, flush: bool = True) -> None:
        """Write and print a line for the iterations since the last line.  Without ``flush``, only if a line is due."""
        self.meter.write_lines(self.epoch, self.meter.total_steps * self.rows_per_step, self.learning_rate, flush)

    def write_rank_record(self, rank: int, record: dict[str, Any]) -> None:
        """Write and print a line; called by `Meter`."""
        if self._recorder is not None:
            self._recorder.write_rank_record(rank, record)
        parts = [f"epoch {self.epoch + 1}, iteration {record['step']}"]
        if record["loss"] is not None:
            parts += [f"cost {record['loss']:.4g}"]
            errors = _weigh_costs([error for error, _ in self._errors], [weight for _, weight in self._errors])
            if total := sum(weight for _, weight in errors):
                parts += [f"error {sum(error for error, _ in errors) / total:.4g}"]
        sys.stdout.write(f"{', '.join(parts)}; {record['rows_per_second']:,.0f} {self.unit}/s\n")
        self.clear_train_info()

    def get_last_weight(self) -> float:
        """Return the weight of the last cost, or 0 if there was none since the last line."""
        return _to_float(self._last_weight)

    def get_last_cost(self) -> float:
        """Return the last cost, or NaN before the first one."""
        return _to_float(self._last_cost)

    def take_validation_sums(self) -> tuple[float, dict[str, float]]:
        """Return the weight of a validation's batches, and its weighted sums by name.  Reset both."""
        sums = self._validation_weight, self._validation_sums
        self._reset_validation()
        return sums

    def _reset_validation(self) -> None:
        self._validation_sums: dict[str, float] = {}
        self._validation_weight: float = 0


def _weigh_costs(costs: Sequence[Any], weights: Sequence[Any]) -> list[tuple[float, float]]:
    """Return pairs of cost times weight, and weight.  Costs of weight 0 are ignored, even NaN."""
    return [(w * _to_float(cost) if w else 0.0, w) for cost, w in zip(costs, map(_to_float, weights), strict=True)]


def _to_float(value: object) -> float:
    """Convert a scalar of any array type to a float; for an array, its mean."""
    return float(value) if isinstance(value, int | float) else float(np.mean(np.asarray(value, np.float64)))
