"""Rules that average.

`BSP`
    After each step.
`LocalSGD`
    After some steps.
`PostLocal`
    After each step at first, after some steps later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from synkhronos.checks import one_of
from synkhronos.rules.base import Rule, check_period
from synkhronos.rules.state import State
from synkhronos.tasks import Worker


class BSP(Rule):
    """Bulk-synchronous parallel: all ranks take each step together.

    With ``average="gradient"`` (Theano-MPI's "cdd") the ranks' gradients are averaged, each counted by its rows, and
    all take the same step: x ← x − η (1/p) Σ_i g^i(x).  With ``average="params"`` (its "avg") each rank takes a step of
    its own, and then parameters are averaged: x^i ← (1/p) Σ_j (x^j − η g^j(x^j)).  Both are the same for plain gradient
    descent, and for momentum, not for rules such as Adam that scale by the gradient's size.  Where the loss has a
    weight (see `synkhronos.training.make_trainer`), gradients and parameters count by it.

    Parameters
    ----------
    average : {"gradient", "params"}
    exclude
        As for `Rule`, and for ``average="params"`` alone.
    precision
        As for `Rule`; of gradients None or "bfloat16".
    """

    def __init__(
        self,
        average: Literal["gradient", "params"] = "gradient",
        exclude: Callable[[Any], bool] | None = None,
        precision: str | None = None,
    ):
        super().__init__(1, exclude, precision)
        self.average = one_of(average, "average", ("gradient", "params"))
        if average == "gradient" and exclude is not None:
            raise ValueError("exclude: expected average='params' with it: parameters can be excluded, gradients can't")
        if average == "gradient" and precision not in (None, "bfloat16"):
            raise ValueError(f"precision: expected None or 'bfloat16' for gradients, got {precision!r}")

    def exchange(self, worker: Worker, state: State) -> None:
        """Average."""
        factor = 1.0
        if state.count_items is not None:
            items = worker.exchange(state.count_items())
            if sum(items):
                factor = items[worker.number] * worker.size / sum(items)
        state.vector = self.mean(worker, state, factor)


class LocalSGD(Rule):
    """Local SGD: each rank takes steps of its own; every so often parameters are averaged.

    x^i ← (1/p) Σ_j x^j after every ``period`` steps of x^i ← x^i − η g^i(x^i): Stich, "Local SGD converges fast and
    communicates little", arXiv:1805.09767, algorithm 1.

    Parameters
    ----------
    period : int or callable
        Steps between two averages.
    state : {"keep", "average", "reset"}
        What becomes of the optimizer's variables (velocities, say) then: each rank keeps its own, they are averaged,
        or they begin again at zero.
    exclude, precision
        As for `Rule`.
    """

    def __init__(
        self,
        period: int | Callable[[int], int] = 10,
        state: Literal["keep", "average", "reset"] = "keep",
        exclude: Callable[[Any], bool] | None = None,
        precision: str | None = None,
    ):
        super().__init__(period, exclude, precision)
        self.state = one_of(state, "state", ("keep", "average", "reset"))

    def exchange(self, worker: Worker, state: State) -> None:
        """Average."""
        state.vector = self.mean(worker, state)
        if self.state == "average" and state.optimizer.size:
            state.optimizer.set(worker.all_reduce(state.optimizer.get()))
        elif self.state == "reset":
            state.optimizer.set(np.zeros(state.optimizer.size, state.optimizer.dtype))


class PostLocal(LocalSGD):
    """Post-local SGD: averages after each step at first, after ``period`` steps from step ``start`` on.

    Lin et al., "Don't use large mini-batches, use local SGD", arXiv:1808.07217, section 3.  They start when the
    learning rate is first lowered.

    Parameters
    ----------
    period : int or callable
        The steps between two averages, from step ``start`` on.
    start : int
        The number of steps after which ``period`` applies.
    state, exclude, precision
        As for `LocalSGD`.
    """

    def __init__(
        self,
        period: int | Callable[[int], int] = 10,
        start: int = 1000,
        state: Literal["keep", "average", "reset"] = "keep",
        exclude: Callable[[Any], bool] | None = None,
        precision: str | None = None,
    ):
        super().__init__(period, state, exclude, precision)
        self.start = check_period(start, "start")

    def left(self, state: State) -> int:
        """Return how many steps there are until the next average."""
        return 1 if state.step < self.start else super().left(state)
