"""Recorder for users' classes: the interface of Theano-MPI's recorder, records of this library.

A class gets it as an argument of ``train_iter``, ``val_iter`` and ``print_info``.  The class reports costs and times to
it, and the run counts the steps::

    train_iter: start(), end("calc"), train_error(...)  --+
    run:        begin_epoch(), stepped()                --+--> write(): a line of the run's folder, and on the console
    val_iter:   val_error(...)                          -----> validation_sums(): the epoch's report, over all ranks

Methods of Theano-MPI's recorder that the run makes superfluous do nothing.
"""

from __future__ import annotations

import re
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from synkhronos.launch.output import RemoteRecords
from synkhronos.training.recorder import Recorder

#: Names of activities: Theano-MPI's, and those of this library's records.
_WORDS = {"calc": "compute", "comm": "exchange", "sync": "wait", "wait": "load", "load": "load"}


class ClassRecorder:
    """Recorder with the methods of Theano-MPI's: collects costs, errors and times, and writes a line from time to time.

    Parameters
    ----------
    rank : int
    recorder : Recorder or RemoteRecords, optional
        Recorder that the lines are written to; default: none.
    every : int
        Number of steps between two lines.
    rows : int
        Number of rows of a step.
    folder : path, optional
        Folder in which `plot` saves pictures, in ``plots/``; default: they are not drawn.

    Attributes
    ----------
    verbose : bool
        Whether this is rank 0's recorder.
    seconds : dict of str to float
        Time by activity since the run began: compute, exchange, wait, load, and the class' own.
    learning_rate : float or None
        Learning rate of the next lines; set by the run.
    epoch : int
        Number of the epoch, from 0.
    steps : int
        Number of steps in this epoch.
    total : int
        Number of steps since the run began, including those before a resumption.
    untimed : int
        Number of the epoch's first steps that do not count in its speed: those before a resumption, and steps in which
        functions may have been compiled.
    epoch_began : float
        Beginning of the time in which the epoch's other steps were taken, by `time.perf_counter`.

    Examples
    --------
    >>> recorder = ClassRecorder(0)
    >>> recorder.start()
    >>> recorder.end("calc")
    >>> recorder.train_error(1, 0.5, 0.1)
    >>> recorder.val_error(1, 0.25, 0.5, 0.125)
    >>> recorder.validation_sums()
    (1, {'cost': 0.25, 'error': 0.5, 'top5': 0.125})
    """

    def __init__(
        self,
        rank: int,
        recorder: Recorder | RemoteRecords | None = None,
        every: int = 40,
        rows: int = 1,
        folder: Path | None = None,
    ):
        self.rank, self.every, self.rows = rank, every, rows
        self.verbose = rank == 0
        self._folder = folder
        self._plots: dict[str, int] = {}
        self._latest: list[Any] | None = None
        self.unit = "rows" if rows > 1 else "batches"
        self._recorder = recorder
        self.seconds = dict.fromkeys(("compute", "exchange", "wait", "load"), 0.0)
        self._began: float | None = None
        self.learning_rate: float | None = None
        self.epoch = self.total = 0
        self.clear_train_info()
        self._forget_validation()
        self.begin_epoch(0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        calls = sorted(each for each in vars(type(self)) if not each.startswith("_"))
        raise AttributeError(f"the recorder has no {name!r}: it answers {', '.join(calls)}")

    # -- interface of classes --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the clock, which `end` stops."""
        self._began = time.perf_counter()

    def end(self, mode: str) -> None:
        """Add the time since `start` to an activity.

        Parameters
        ----------
        mode : str
            Theano-MPI's ``calc``, ``comm``, ``sync``, ``wait`` (for data) or ``load``, or a name of the class' own.

        Raises
        ------
        RuntimeError
            If `start` was not called.
        """
        if self._began is None:
            raise RuntimeError(f"recorder.end({mode!r}): expected recorder.start() before it")
        word = _WORDS.get(mode, mode)
        self.seconds[word] = self.seconds.get(word, 0.0) + time.perf_counter() - self._began
        self._began = None

    def train_error(self, count: int, cost: Any, error: Any = None, weight: Any = 1) -> None:
        """Record the cost of an iteration.

        Parameters
        ----------
        count : int
            Theano-MPI's; changes nothing.
        cost : scalar
        error : scalar, optional
        weight : scalar
            Number of items that cost and error are means over.  A cost of weight 0 is ignored.
        """
        self._costs.append(cost)
        self._weights.append(weight)
        if error is not None:
            self._errors.append(error)

    def print_train_info(self, count: int) -> None:
        """Write and print a line, if ``every`` steps have been taken since the last one."""
        if self._steps() >= self.every:
            self.write()

    def clear_train_info(self) -> None:
        """Discard the costs and errors since the last line."""
        self._costs: list[Any] = []
        self._weights: list[Any] = []
        self._errors: list[Any] = []

    def val_error(self, count: int, cost: Any, error: Any = None, error_top_5: Any = None, rows: float = 1) -> None:
        """Add a batch to the validation.

        Parameters
        ----------
        count : int
            Theano-MPI's; changes nothing.
        cost, error, error_top_5 : scalar, optional
            Means over the batch.
        rows : float
            Weight of the batch.  A batch of weight 0 is ignored.
        """
        self._val_rows += rows
        if not rows:
            return
        for name, value in (("cost", cost), ("error", error), ("top5", error_top_5)):
            if value is not None:
                self._val[name] = self._val.get(name, 0.0) + rows * _mean(value)

    def get_latest_val_info(self) -> list[Any] | None:
        """Return ``[count, cost, error, top5]`` of the last validation, over all ranks; None before the first."""
        return self._latest

    def plot_init(self, name: str, fig_specs: Any = None, save: bool = False) -> None:
        """Declare the name of a picture, for `plot`; the other arguments are Theano-MPI's, and change nothing."""
        if not isinstance(name, str):
            raise TypeError(f"plot_init(): expected a text as name, got {name!r}")
        self._plots.setdefault(name, 0)

    def plot(self, name: str, lines: Any = None, image: Any = None, save: bool = False, **style: Any) -> None:
        """Draw lines or an image, and save a new picture in the run's folder.

        Without a folder or matplotlib nothing is drawn.  If matplotlib is missing, the first call prints a message.

        Parameters
        ----------
        name : str
            Name given to `plot_init`.
        lines : list of lists of numbers, optional
        image : ndarray, optional
            Array of two dimensions, or of three with red, green and blue last.
        save
            Theano-MPI's; changes nothing.
        **style
            ``lw``, the width of lines; ``cmap``, the colours of images.

        Raises
        ------
        ValueError
            If there are both lines and an image, or neither; or for a name that `plot_init` did not get.
        """
        if name not in self._plots:
            raise ValueError(f"plot(): expected a name given to plot_init(), got {name!r}")
        if (lines is None) == (image is None):
            raise ValueError("plot(): expected either lines or an image")
        self._plots[name] += 1
        if self._folder is None:
            return
        if find_spec("matplotlib") is None:
            if sum(self._plots.values()) == 1:
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
        figure.savefig(folder / f"{safe}-rank-{self.rank}-{self._plots[name]}.png")

    def save(self, *_: Any, **__: Any) -> None:
        """Do nothing, as the run does it.

        It gathers and prints the validation, times epochs, writes lines at once, and removes later lines when it is
        resumed.
        """

    gather_val_info = print_val_info = start_epoch = end_epoch = load = cut = show = save

    # -- interface of the run --------------------------------------------------------------------------------

    def note_validation(self, count: int, means: dict[str, float]) -> None:
        """Set the means of a validation over all ranks, which `get_latest_val_info` returns."""
        if means:
            self._latest = [count, *(means.get(name) for name in ("cost", "error", "top5"))]

    def begin_epoch(self, epoch: int) -> None:
        """Reset the counters at the start of an epoch."""
        self.epoch, self.steps, self.loss, self._noted = epoch, 0, 0.0, 0.0
        self.epoch_began = self._line_began = time.perf_counter()
        self._written, self._line_seconds = 0, dict(self.seconds)
        self.untimed = 0

    def resume_epoch(self, steps: int, loss: float, noted: float) -> None:
        """Set the counters to those of a checkpoint within the epoch.

        Parameters
        ----------
        steps : int
            Number of steps of the epoch before the checkpoint.
        loss : float
            Sum of their costs, each times its weight.
        noted : float
            Sum of their weights.
        """
        self.steps = self._written = self.untimed = steps
        self.loss, self._noted = loss, noted

    def stepped(self, compiled: float | None = None) -> None:
        """Count an iteration.

        Parameters
        ----------
        compiled : float, optional
            Seconds of an iteration that may have compiled functions: it does not count in the speed.
        """
        self.steps += 1
        self.total += 1
        if compiled is not None:  # rows per second are computed without it
            self.untimed += 1
            self.epoch_began += compiled
            self._line_began += compiled

    def _steps(self) -> int:
        """Return the number of steps since the last line."""
        return self.steps - self._written

    def write(self) -> None:
        """Write and print a line about the iterations since the last one, if there were any."""
        if not self._steps():
            return
        weights = [_mean(weight) for weight in self._weights]
        cost = self._weighted_sum(self._costs, weights)
        self.loss += cost
        self._noted += sum(weights)
        now = time.perf_counter()
        timed = self._steps() - (self.untimed if not self._written else 0)
        rate = timed * self.rows / (now - self._line_began)
        loss = cost / sum(weights) if sum(weights) else None
        if self._recorder is not None:
            self._recorder.write_rank(
                self.rank,
                {
                    "epoch": self.epoch,
                    "step": self.total,
                    "seen": self.total * self.rows,
                    "rows": self._steps() * self.rows,
                    "loss": loss,
                    "learning_rate": self.learning_rate,
                    "rows_per_second": rate,
                    **{name: value - self._line_seconds.get(name, 0.0) for name, value in self.seconds.items()},
                },
            )
        shown = [f"epoch {self.epoch + 1}, iteration {self.total}"]
        shown += [f"cost {loss:.4g}"] if loss is not None else []
        if self._errors and loss is not None:
            weights = weights if len(weights) == len(self._errors) else [1.0] * len(self._errors)
            shown += [f"error {self._weighted_sum(self._errors, weights) / sum(weights):.4g}"]
        sys.stdout.write(f"{', '.join(shown)}; {rate:,.0f} {self.unit}/s\n")
        self.clear_train_info()
        self._written, self._line_began, self._line_seconds = self.steps, now, dict(self.seconds)

    @staticmethod
    def _weighted_sum(values: list[Any], weights: list[float]) -> float:
        """Return the sum of values times weights; a value of weight 0 is ignored, even if it is NaN."""
        return sum(weight * _mean(value) for value, weight in zip(values, weights, strict=True) if weight)

    def last_weight(self) -> float:
        """Return the weight of the last cost; 0 if there was none since the last line."""
        return _mean(self._weights[-1]) if self._weights else 0.0

    def loss_sums(self) -> tuple[float, float]:
        """Return the sum of the epoch's costs, each times its weight, and that of the weights, up to the last line."""
        return self.loss, self._noted

    def mean_loss(self) -> float | None:
        """Return the mean cost of the epoch up to the last line; None if the class recorded none."""
        return self.loss / self._noted if self._noted else None

    def validation_sums(self) -> tuple[float, dict[str, float]]:
        """Return the sums of a validation, and reset them.

        Returns
        -------
        rows : float
            Sum of the batches' weights.
        sums : dict of str to float
            Sums of ``cost``, ``error`` and ``top5``, each times the batch's weight.
        """
        found = self._val_rows, self._val
        self._forget_validation()
        return found

    def _forget_validation(self) -> None:
        self._val: dict[str, float] = {}
        self._val_rows: float = 0


def _mean(value: Any) -> float:
    """Return a value of any array type as a float; the mean of an array."""
    return float(np.mean(np.asarray(value, np.float64)))
