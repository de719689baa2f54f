"""Synchronous rules that average parameters or gradients."""

from __future__ import annotations

from typing import Literal

import numpy as np

from synkhronos.checks import check_choice, suggest_keywords
from synkhronos.exchange_rules.rule import ExchangeRule, Exclude, Period, check_period
from synkhronos.exchange_rules.state import ExchangeState
from synkhronos.programs import RankContext


class BSP(ExchangeRule):
    """Bulk-synchronous parallel: averages gradients or parameters over all ranks at each step.

    - ``average="gradient"`` (Theano-MPI's "cdd"): gradients are averaged, weighted by rows, and all ranks take the same
      step: x ← x − η (1/p) Σ_i g^i(x).
    - ``average="params"`` (Theano-MPI's "avg"): each rank takes its own step, then parameters are averaged:
      x^i ← (1/p) Σ_j (x^j − η g^j(x^j)).

    The averages are weighted by the ranks' rows, or by the loss's weight (see `synkhronos.training.make_trainer`).  The
    results are equal for plain gradient descent, and for momentum if the weights of a step are equal, but not for
    update rules such as Adam, which scale the gradient.

    Parameters
    ----------
    average : {"gradient", "params"}, optional
        Default: gradients.
    exclude : callable, optional
        See `ExchangeRule`; only with ``average="params"``.
    precision : str, optional
        See `ExchangeRule`; for gradients None or "bfloat16".

    Attributes
    ----------
    has_default_average : bool
        Whether ``average`` was not given.  In a run of the launcher, the default depends on the model class.

    Examples
    --------
    >>> BSP(average="params", precision="float32")
    BSP(average='params', precision='float32')
    """

    is_bulk_synchronous = True

    @suggest_keywords
    def __init__(
        self,
        average: Literal["gradient", "params"] | None = None,
        exclude: Exclude = None,
        precision: str | None = None,
    ):
        super().__init__(1, exclude, precision)
        self.has_default_average = average is None
        self.average = "gradient" if average is None else check_choice(average, "average", ("gradient", "params"))
        self.averages_gradients = self.average == "gradient"
        if self.averages_gradients and exclude is not None:
            raise ValueError("exclude: expected average='params': gradients can't be excluded")
        if self.averages_gradients and precision not in (None, "bfloat16"):
            raise ValueError(f"precision: expected None or 'bfloat16' for gradients, got {precision!r}")

    def exchange(self, context: RankContext, state: ExchangeState) -> None:
        """Average parameters, weighted by rows or by the loss's weight."""
        relative_weight = 1.0
        if state.count_items is not None:
            items = context.all_gather(state.count_items())
            if sum(items):
                relative_weight = items[context.number] * context.size / sum(items)
        state.vector = self.compute_mean(context, state, relative_weight)


class LocalSGD(ExchangeRule):
    """Local SGD: averages parameters every ``period`` steps.

    x^i ← (1/p) Σ_j x^j after every ``period`` steps of x^i ← x^i − η g^i(x^i): Stich, "Local SGD converges fast and
    communicates little", arXiv:1805.09767, algorithm 1.

    Parameters
    ----------
    period : int or callable
        Number of steps between two averages.
    state : {"keep", "average", "reset"}
        Treatment of the optimizer's variables, such as velocities, at an exchange: each rank keeps its own, or they are
        averaged, or set to zero.
    exclude, precision
        See `ExchangeRule`.

    Examples
    --------
    >>> LocalSGD(period=20, state="average")
    LocalSGD(period=20, state='average')
    """

    @suggest_keywords
    def __init__(
        self,
        period: Period = 10,
        state: Literal["keep", "average", "reset"] = "keep",
        exclude: Exclude = None,
        precision: str | None = None,
    ):
        super().__init__(period, exclude, precision)
        self.state = check_choice(state, "state", ("keep", "average", "reset"))

    def exchange(self, context: RankContext, state: ExchangeState) -> None:
        """Average parameters, and average or reset the optimizer's variables."""
        state.vector = self.compute_mean(context, state)
        # `self.state` has the name of the constructor's argument, by which `ExchangeRule.get_options` reads it.
        if self.state == "average" and state.optimizer.size:
            state.optimizer.set(context.all_reduce(state.optimizer.get()))
        elif self.state == "reset":
            state.optimizer.set(np.zeros(state.optimizer.size, state.optimizer.dtype))


class PostLocal(LocalSGD):
    """Post-local SGD: averages parameters at each step, and from step ``start`` on every ``period`` steps.

    Lin et al., "Don't use large mini-batches, use local SGD", arXiv:1808.07217, section 3.  In the paper ``start`` is
    the step at which the learning rate is first lowered.

    Parameters
    ----------
    start : int
        Number of steps after which ``period`` applies.
    period, state, exclude, precision
        See `LocalSGD`.
    """

    changeable_options = frozenset({"period", "start"})

    @suggest_keywords
    def __init__(
        self,
        period: Period = 10,
        start: int = 1000,
        state: Literal["keep", "average", "reset"] = "keep",
        exclude: Exclude = None,
        precision: str | None = None,
    ):
        super().__init__(period, state, exclude, precision)
        self.start = check_period(start, "start")

    def count_steps_left(self, state: ExchangeState) -> int:
        return 1 if state.step < self.start else super().count_steps_left(state)
