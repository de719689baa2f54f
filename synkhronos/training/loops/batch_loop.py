"""The loop over batches that trainers and the launcher share.

Each iteration trains on the next batches::

    iterate_steps --> step --> finish_step --> record --> decide_stop
          ^                                                    |
          +----------------------------------------------------+

`iterate_steps` ends at the next report; the owner of the loop then validates, reports and saves.

Subclasses of `BatchLoop` differ in who takes a step:

- `JointBatchLoop` of ``training/trainer`` runs in the master.  Each step is a command of all ranks, which exchanges
  gradients: BSP on gradients.
- `LocalBatchLoop` of ``training/trainer`` runs on every rank.  Each rank takes its own steps, and a `PeriodicExchange`
  exchanges parameters by an exchange rule.
- `ModelBatchLoop` of ``launcher/rank_process`` does the same with a model class, which chooses the rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from synkhronos.exchange_rules import ExchangeRule, ExchangeState
from synkhronos.programs import RankContext
from synkhronos.timelines.spans import register_traced_method
from synkhronos.training.monitoring.meter import ActivityTimer


class BatchLoop(ABC):
    """Base class of loops over the batches until the next report."""

    def run(self) -> None:
        """Train on all batches, or until a signal."""
        for batches in self.iterate_steps():
            self.finish_step(self.step(batches))
            self.record(batches)
            if self.decide_stop():
                break

    @abstractmethod
    def iterate_steps(self) -> Iterator[Any]:
        """Yield the batches of each call of `step`."""

    @abstractmethod
    def step(self, batches: Any) -> int:
        """Train on the batches.  Return the number of steps."""

    @abstractmethod
    def finish_step(self, steps: int) -> None:
        """Finish the ``steps`` steps of `step`: count them, and exchange with other ranks if an exchange is due."""

    @abstractmethod
    def record(self, batches: Any) -> None:
        """Write the records that are due."""

    @abstractmethod
    def decide_stop(self) -> bool:
        """Return True if training stops after these batches.  In some subclasses all ranks must call this."""


for method, span in (("step", "step"), ("finish_step", "exchange"), ("record", "record")):
    register_traced_method(BatchLoop, method, span, span)


class PeriodicExchange:
    """Runs the exchange of an exchange rule when it is due, and adds its duration to ``seconds["exchange"]``."""

    def __init__(
        self, context: RankContext, exchange_rule: ExchangeRule, state: ExchangeState, seconds: dict[str, float]
    ):
        self._context, self.exchange_rule, self.state, self._seconds = context, exchange_rule, state, seconds
        self._steps_left = 1

    def restart_countdown(self) -> int:
        """Set the countdown to the number of steps until the exchange rule's next exchange, and return it."""
        self._steps_left = self.exchange_rule.count_steps_left(self.state)
        return self._steps_left

    def advance(self, steps: int) -> bool:
        """Advance the countdown by ``steps`` steps.  Return True if an exchange is due."""
        self.state.step += steps
        self.state.steps_since_exchange += steps
        self._steps_left -= steps
        return self._steps_left <= 0

    def run(self) -> None:
        """Run the exchange rule's exchange, and set the number of steps since the last exchange to 0."""
        with ActivityTimer(self._seconds, "exchange", lambda: self._context.wait_seconds):
            self.exchange_rule.exchange(self._context, self.state)
            self.state.steps_since_exchange = 0


def adapt_interval_steps(steps: int, seconds: float, target_seconds: float) -> int:
    """Return the number of steps that take about ``target_seconds``, at most twice ``steps``; these took ``seconds``.

    Examples
    --------
    >>> adapt_interval_steps(10, 2.0, 1.0), adapt_interval_steps(10, 0.1, 1.0)
    (5, 20)
    """
    return max(1, min(2 * steps, int(steps * target_seconds / max(seconds, 1e-9))))
