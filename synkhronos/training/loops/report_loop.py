"""The loop from report to report that trainers and the launcher share.

Epochs are divided into intervals, each of which ends with a report::

    train --> make_report --> validate --> finish_interval --> observe --> call_report_hooks --> save
      ^                                                                                           |
      +-------------------------------------------------------------------------------------------+

`observe` compares the report with the best one so far, and `save` is called only for some reports.  If a signal stops
`train` or `validate`, the method returns False.  `save_at_signal` then saves the position within the interval, and
the loop ends without a report.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from synkhronos.training.monitoring.best_cost import BestCost, to_cost
from synkhronos.training.monitoring.report import Report


class ReportLoop(ABC):
    """Base class of loops over reports.  Subclasses define how to train until a report, validate and save."""

    #: Metric that `best_cost` observes: its name, and "min" or "max".
    metric: tuple[str, str]
    #: Number of reports without an improvement after which the loop ends; None: no limit.
    patience: int | None
    #: Whether to write a checkpoint at each new best report.
    saves_best: bool
    #: Number of reports between two checkpoints; 0: no checkpoints.  One is also written at the end.
    checkpoint_every: int
    n_reports = 0

    def train_and_report(self) -> Iterator[Report]:
        """Train, validate and save, until the last epoch or a signal.  Yield the report of each interval."""
        while not self.is_over():
            report = self.make_report() if self.train() else None
            if report is None or not self.validate(report):
                self.save_at_signal()
                return
            self.finish_interval(report)
            self.n_reports += 1
            is_best = self.observe(report)
            self.call_report_hooks(report)
            is_due = self.checkpoint_every and (self.n_reports % self.checkpoint_every == 0 or self.is_over())
            if is_due or is_best and self.saves_best:
                self.save(report)
            yield report

    def is_over(self) -> bool:
        """Whether all epochs are trained, or the metric has not improved for ``patience`` reports."""
        return self.has_trained_all_epochs() or self.is_patience_exhausted()

    def is_patience_exhausted(self) -> bool:
        """Whether the metric has not improved for ``patience`` reports."""
        return self.patience is not None and self.best_cost.n_reports_since_best >= self.patience

    def observe(self, report: Report) -> bool:
        """Compare a report with the best one so far.  Return True if it is better."""
        return self.best_cost.observe(to_cost(report.metrics, self.metric))

    @property
    @abstractmethod
    def best_cost(self) -> BestCost:
        """Tracker of the best value of the metric, and of the reports since."""

    @abstractmethod
    def has_trained_all_epochs(self) -> bool:
        """Whether all epochs are trained."""

    @abstractmethod
    def train(self) -> bool:
        """Train to the end of the interval.  Return False if a signal stops it."""

    @abstractmethod
    def make_report(self) -> Report:
        """Return the report of the interval, without validation."""

    @abstractmethod
    def validate(self, report: Report) -> bool:
        """Compute the validation of a report.  Return False if a signal stops it."""

    @abstractmethod
    def save_at_signal(self) -> None:
        """Write a checkpoint within the interval, after a signal."""

    @abstractmethod
    def finish_interval(self, report: Report) -> None:
        """Move to the next interval, and pass the report to the recorders."""

    @abstractmethod
    def call_report_hooks(self, report: Report) -> None:
        """Run the actions that follow a report: adapt the learning rate, call the model class's methods."""

    @abstractmethod
    def save(self, report: Report) -> None:
        """Write a checkpoint after a report."""
