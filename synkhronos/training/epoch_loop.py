"""The loop over epochs, which trainers and the launcher's runs share.

Epochs are divided into intervals, each of which ends with a report::

    train() --> make_report() --> validate() --> complete() --> observe() --> adapt() --> save()
       ^                                                                                    |
       +------------------------------------------------------------------------------------+

`observe` compares the report with the best one so far, and `save` is called only for some reports.
A signal may stop `train` or `validate`.  Then `stop` saves the position within the interval instead of a report.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from synkhronos.training.early_stop import EarlyStop, to_cost
from synkhronos.training.report import Report


class EpochLoop(ABC):
    """Loop over intervals until the last epoch; subclasses define how to train, validate and save.

    Attributes
    ----------
    metric : (str, {"min", "max"})
        Metric that `early_stop` observes.
    patience : int or None
        Number of reports without an improvement after which the loop ends.
    saves_best : bool
        Whether to save at each report that is the best so far.
    checkpoint_every : int
        Number of reports between two checkpoints, which are also written at the end; 0: none.
    n_reports : int
        Number of reports so far.
    """

    metric: tuple[str, str]
    patience: int | None
    saves_best: bool
    checkpoint_every: int
    n_reports = 0

    def iterate_reports(self) -> Iterator[Report]:
        """Train until the last epoch or until a signal; yield the report of each interval."""
        while not self.is_over():
            report = None if self.train() else self.make_report()
            if report is None or self.validate(report):
                self.stop()
                return
            self.complete(report)
            self.n_reports += 1
            is_best = self.observe(report)
            self.adapt(report)
            is_due = self.checkpoint_every and (self.n_reports % self.checkpoint_every == 0 or self.is_over())
            if is_due or is_best and self.saves_best:
                self.save(report)
            yield report

    def is_over(self) -> bool:
        """Whether all epochs are trained, or the metric has not improved for ``patience`` reports."""
        return self.is_complete() or self.is_exhausted()

    def is_exhausted(self) -> bool:
        """Whether the metric has not improved for ``patience`` reports."""
        return self.patience is not None and self.early_stop.since >= self.patience

    def observe(self, report: Report) -> bool:
        """Compare a report with the best one so far; return whether it is better."""
        return self.early_stop.observe(to_cost(report.metrics, self.metric))

    @property
    @abstractmethod
    def early_stop(self) -> EarlyStop:
        """Best report so far."""

    @abstractmethod
    def is_complete(self) -> bool:
        """Whether all epochs are trained."""

    @abstractmethod
    def train(self) -> bool:
        """Train to the end of the interval; return whether a signal has stopped it before."""

    @abstractmethod
    def make_report(self) -> Report:
        """Return the report of the interval, without validation."""

    @abstractmethod
    def validate(self, report: Report) -> bool:
        """Set the validation of a report; return whether a signal has stopped it."""

    @abstractmethod
    def stop(self) -> None:
        """Save the position within the interval, after a signal."""

    @abstractmethod
    def complete(self, report: Report) -> None:
        """Move the position to the next interval, and pass the report to the recorders."""

    @abstractmethod
    def adapt(self, report: Report) -> None:
        """Let a report change the learning rate of the next interval."""

    @abstractmethod
    def save(self, report: Report) -> None:
        """Write a checkpoint after a report."""
