"""Rules in which ranks push their changes to a common centre, and fetch it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from synkhronos.checks import check_flag, suggest_keywords
from synkhronos.exchange_rules.elastic import CENTRE_LOCK, CentreRule, read_centre
from synkhronos.exchange_rules.rule import Exclude, check_period, reduce_with_weighted_averages
from synkhronos.exchange_rules.state import ExchangeState
from synkhronos.programs import RankContext
from synkhronos.variable_types import Array


class Downpour(CentreRule):
    """Downpour SGD: a rank adds its change to a centre every ``push`` steps, and copies it every ``fetch`` steps.

    With a, the sum of a rank's steps since its last push: x̃ ← x̃ + a, a ← 0 at a push; x ← x̃ at a fetch.  Dean et
    al., "Large scale distributed deep networks" (2012), appendix, algorithm 1.1.  The steps of all ranks add up: more
    ranks need a lower learning rate and short periods.  With ``asynchronous=False`` and period 1 this is gradient
    descent at p times the learning rate.

    Parameters
    ----------
    push, fetch : int
        Number of a rank's steps between two pushes, and between two fetches.
    asynchronous : bool
        Whether each rank exchanges at its own pace, under a lock.
    exclude
        See `ExchangeRule`.

    Examples
    --------
    >>> Downpour(push=2, fetch=4)
    Downpour(push=2, fetch=4, asynchronous=True)
    """

    changeable_options = frozenset({"push", "fetch"})

    @suggest_keywords
    def __init__(self, push: int = 1, fetch: int = 1, asynchronous: bool = True, exclude: Exclude = None):
        self.push, self.fetch = check_period(push, "push"), check_period(fetch, "fetch")
        super().__init__(math.gcd(self.push, self.fetch), exclude)
        self.asynchronous = check_flag(asynchronous, "asynchronous")
        if not self.asynchronous and self.push != self.fetch:
            raise ValueError(f"push, fetch: expected equal numbers with asynchronous=False, got {push} and {fetch}")

    def count_steps_left(self, state: ExchangeState) -> int:
        """Return the number of steps until the next exchange.

        The number depends on ``state.step`` alone, so an interrupted exchange does not shift later ones.
        """
        period = math.gcd(self.push, self.fetch)
        return period - state.step % period

    def setup(self, context: RankContext, state: ExchangeState) -> None:
        """Set the centre, and this rank's base, to the parameters."""
        state.own |= {"base": state.vector, "seen": 0, "n_average_items": state.n_average_items}
        super().setup(context, state)

    def exchange(self, context: RankContext, state: ExchangeState) -> int | None:
        """Push, fetch, or both.  Return the number of earlier pushes, or None without a push or if synchronous."""
        if not self.asynchronous:
            state.vector = state.own["base"] = self._add_steps_of_all_ranks(context, state)
            return None
        is_push, is_fetch = state.step % self.push == 0, state.step % self.fetch == 0
        return self._push_and_fetch(context, state, is_push, is_fetch) if is_push or is_fetch else None

    def _add_steps_of_all_ranks(self, context: RankContext, state: ExchangeState) -> Array:
        """Return the base plus the steps of all ranks since the last exchange.  A collective."""
        base = state.own["base"]
        return base + reduce_with_weighted_averages(
            state, state.vector - base, lambda vector: context.all_reduce(vector, "sum")
        )

    def _push_and_fetch(self, context: RankContext, state: ExchangeState, is_push: bool, is_fetch: bool) -> int | None:
        """Push, fetch, or both, under the lock.  Return the number of earlier pushes, or None without a push."""
        rows, own = state.shared_rows, state.own

        def push_and_fetch(
            x: Array, get_block: Callable[[], Array], base: Array
        ) -> tuple[Array | None, Array | None, Array]:
            if is_push and is_base_current:
                return x if is_fetch else None, x, x  # exact: centre + (x - base) could round
            # Invariant: x - base is the sum of the steps that are not pushed yet.
            centre, steps = get_block(), x - base
            if not is_push:
                return centre, None, centre - steps
            centre += steps
            return (centre, centre, centre) if is_fetch else (None, centre, x)

        with context.lock(CENTRE_LOCK) as lock:
            lock.pull(rows["sequence"], rows["centre"])
            sequence = int(state.shared["sequence"][0])
            is_base_current = sequence == own["seen"]  # no other rank has pushed since this rank fetched
            state.update_with_shared("centre", push_and_fetch, own_name="base")
            if is_push:
                state.shared["sequence"][0] = sequence + 1
                lock.push(rows["sequence"], rows["centre"])
            # Invariant: while sequence == own["seen"], this rank's base is the centre.
            own["seen"] = sequence + 1 if is_push and (is_fetch or is_base_current) else -1
        return sequence if is_push else None

    def compute_consensus(self, context: RankContext, state: ExchangeState) -> Array:
        """Return the centre with the remaining steps, which asynchronous ranks push now."""
        if not self.asynchronous:
            return self._add_steps_of_all_ranks(context, state) if state.steps_since_exchange else state.own["base"]
        if not (state.vector == state.own["base"]).all():
            self._push_and_fetch(context, state, is_push=True, is_fetch=False)
        context.barrier("all have pushed")
        return read_centre(context, state)

    def resize_states(self, states: list[dict[str, Any]], n_ranks: int) -> list[dict[str, Any]]:
        """Start all ranks at the centre with the steps that are not pushed yet.

        Asynchronous ranks have pushed them: a report, which does so, precedes a checkpoint.
        """
        first, n = states[0], int(states[0]["own"].get("n_average_items", 0))
        if self.asynchronous:
            centre = first["shared"]["centre"]
        else:
            base = first["own"]["base"]
            steps = np.sum([state["params"] - base for state in states], axis=0)
            steps[len(steps) - n :] /= len(states)  # running averages are not added up
            centre = (base + steps).astype(base.dtype)
        optimizer = np.mean([state["optimizer"] for state in states], axis=0).astype(first["optimizer"].dtype)
        common = {**first, "optimizer": optimizer, "steps_since_exchange": 0}
        return [
            {**common, "params": centre.copy(), "own": {"base": centre.copy(), "seen": -1, "n_average_items": n}}
            for _ in range(n_ranks)
        ]


class ASGD(Downpour):
    """Asynchronous SGD: `Downpour` that pushes and fetches every ``period`` steps.

    x̃ ← x̃ + (x − x_old), x = x_old = x̃: the rule of this name in Platoon.

    Parameters
    ----------
    period, exclude
        See `ExchangeRule`.
    """

    changeable_options = frozenset({"period"})

    @suggest_keywords
    def __init__(self, period: int = 1, exclude: Exclude = None):
        super().__init__(period, period, True, exclude)
