"""Rules in which ranks push their changes to a common centre, and fetch it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from synkhronos.checks import check_flag, suggest_keywords
from synkhronos.devices import get_array_device
from synkhronos.programs import RankContext
from synkhronos.rules.elastic import CENTRE_LOCK, CentreRule, read_centre
from synkhronos.rules.rule import Exclude, check_period, reduce_by_rows
from synkhronos.rules.state import State
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
        See `Rule`.

    Examples
    --------
    >>> Downpour(push=2, fetch=4)
    Downpour(push=2, fetch=4, asynchronous=True)
    """

    @suggest_keywords
    def __init__(self, push: int = 1, fetch: int = 1, asynchronous: bool = True, exclude: Exclude = None):
        self.push, self.fetch = check_period(push, "push"), check_period(fetch, "fetch")
        super().__init__(math.gcd(self.push, self.fetch), exclude)
        self.asynchronous = check_flag(asynchronous, "asynchronous")
        if not self.asynchronous and self.push != self.fetch:
            raise ValueError(f"push, fetch: expected equal numbers with asynchronous=False, got {push} and {fetch}")

    def count_steps_left(self, state: State) -> int:
        """Return the number of steps until the next exchange.

        It depends on ``state.step``, so that an interrupted exchange does not shift later ones.
        """
        period = math.gcd(self.push, self.fetch)
        return period - state.step % period

    def setup(self, context: RankContext, state: State) -> None:
        """Set the centre, and this rank's base, to the parameters."""
        state.own["base"] = state.vector
        state.own["seen"] = 0
        super().setup(context, state)

    def exchange(self, context: RankContext, state: State) -> int | None:
        """Push, fetch, or both; return the number of earlier pushes, or None without a push or if synchronous."""
        if not self.asynchronous:
            steps = state.vector - state.own["base"]
            state.own["base"] = state.own["base"] + reduce_by_rows(
                state, steps, lambda vector: context.all_reduce(vector, "sum")
            )
            state.vector = state.own["base"]
            return None
        is_push, is_fetch = state.step % self.push == 0, state.step % self.fetch == 0
        return self._push_and_fetch(context, state, is_push, is_fetch) if is_push or is_fetch else None

    def _push_and_fetch(self, context: RankContext, state: State, is_push: bool, is_fetch: bool) -> int | None:
        """Push, fetch, or both, under the lock; return the number of earlier pushes, or None without a push."""
        views, vector = state.get_writable_params()
        rows, own = state.shared_rows, state.own
        with context.lock(CENTRE_LOCK) as lock:
            lock.pull(rows["sequence"], rows["centre"])
            sequence = int(state.shared["sequence"][0])
            is_base_current = sequence == own["seen"]  # no other rank has pushed since this rank fetched
            if views is None:
                vector = self._exchange_on_device(state, vector, is_push, is_fetch, is_base_current)
            else:
                self._exchange_blocks(state, views, is_push, is_fetch, is_base_current)
            if is_push:
                state.shared["sequence"][0] = sequence + 1
                lock.push(rows["sequence"], rows["centre"])
            # Invariant: while sequence == own["seen"], this rank's base is the centre.
            own["seen"] = sequence + 1 if is_push and (is_fetch or is_base_current) else -1
        if vector is not None and is_fetch:
            state.vector = vector
        return sequence if is_push else None

    def _exchange_blocks(
        self, state: State, views: list[np.ndarray], is_push: bool, is_fetch: bool, is_base_current: bool
    ) -> None:
        """Push, fetch, or both, in place in host memory."""
        centre, base, d = state.shared["centre"], state.own["base"], state.scratch
        for x, bounds in state.params.iterate_blocks(views):
            c, b, steps = centre[bounds], base[bounds], d[: x.size]
            np.subtract(x, b, out=steps)
            if is_push and is_base_current:
                c[...] = x  # exact: c + (x - b) could round
            elif is_push:
                np.add(c, steps, out=c)
            if is_fetch:
                x[...] = c
                # Invariant: x - base is the sum of the steps that are not pushed yet.
                np.copyto(b, c) if is_push else np.subtract(c, steps, out=b)
            elif is_push:
                b[...] = x

    def _exchange_on_device(
        self, state: State, x: Array, is_push: bool, is_fetch: bool, is_base_current: bool
    ) -> Array:
        """Push, fetch, or both, for parameters ``x`` on a device other than host memory; return the new parameters."""
        centre, own, device = state.shared_rows["centre"], state.own, get_array_device(x)
        steps = x - own["base"]
        if is_push:
            new_centre = x if is_base_current else centre.to_device(device) + steps
            centre.write(new_centre)
        else:
            new_centre = centre.to_device(device)
        if is_fetch:
            x = new_centre
        own["base"] = x if is_push else new_centre - steps
        return x

    def compute_consensus(self, context: RankContext, state: State) -> Array:
        """Push the remaining steps, and return the centre."""
        if not self.asynchronous:
            return state.own["base"]
        if not (state.vector == state.own["base"]).all():
            self._push_and_fetch(context, state, is_push=True, is_fetch=False)
        context.barrier("all have pushed")
        return read_centre(context, state)

    def resize_states(self, states: list[dict[str, Any]], n_ranks: int) -> list[dict[str, Any]]:
        """Start all ranks at the centre.  No steps are lost: a report, which pushes them, precedes a checkpoint."""
        first = states[0]
        centre = first["shared"]["centre"] if self.asynchronous else first["own"]["base"]
        own = {"base": centre.copy(), "seen": -1}
        optimizer = np.mean([state["optimizer"] for state in states], axis=0).astype(first["optimizer"].dtype)
        return [{**first, "params": centre.copy(), "own": dict(own), "optimizer": optimizer} for _ in range(n_ranks)]


class ASGD(Downpour):
    """Asynchronous SGD: `Downpour` that pushes and fetches every ``period`` steps.

    x̃ ← x̃ + (x − x_old), x = x_old = x̃: the rule of this name in Platoon.

    Parameters
    ----------
    period, exclude
        See `Rule`.
    """

    @suggest_keywords
    def __init__(self, period: int = 1, exclude: Exclude = None):
        super().__init__(period, period, True, exclude)
