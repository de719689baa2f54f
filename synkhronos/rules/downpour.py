"""Rules by which ranks send their steps to a centre, and fetch it.

`Downpour`
    Sends and fetches each so often.
`ASGD`
    Does both at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from synkhronos.checks import flag
from synkhronos.devices import JAX
from synkhronos.rules.base import Rule, by_rows, check_period
from synkhronos.rules.elastic import CENTRE, centre_of
from synkhronos.rules.state import BLOCK, State
from synkhronos.tasks import Worker


class Downpour(Rule):
    """Downpour SGD: ranks add their steps to a centre every ``push`` steps, and copy the centre every ``fetch`` steps.

    With a the sum of a rank's steps since it last pushed: x̃ ← x̃ + a, a ← 0 on a push; x ← x̃ on a fetch: Dean et al.,
    "Large scale distributed deep networks" (2012), appendix, algorithm 1.1.  Together (``asynchronous=False``) the
    steps of all ranks are summed: with period 1 gradient descent at p times the learning rate.  The steps of all ranks
    add up, so that the learning rate has to be lower with more of them, and periods short.

    Parameters
    ----------
    push, fetch : int
        A rank's steps between two pushes, and between two fetches.
    asynchronous : bool
        Whether each rank does so when it is ready, under a lock.
    exclude
        As for `Rule`.
    """

    def __init__(
        self,
        push: int = 1,
        fetch: int = 1,
        asynchronous: bool = True,
        exclude: Callable[[Any], bool] | None = None,
    ):
        self.push, self.fetch = check_period(push, "push"), check_period(fetch, "fetch")
        super().__init__(math.gcd(self.push, self.fetch), exclude)
        self.asynchronous = flag(asynchronous, "asynchronous")
        if not self.asynchronous and self.push != self.fetch:
            raise ValueError(f"push, fetch: expected the same for all ranks together, got {push} and {fetch}")

    def memory(self, n_ranks: int, size: int, dtype: np.dtype) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Return the centre, and how often it was written."""
        return {"centre": ((size,), dtype), "sequence": ((1,), np.int64)} if self.asynchronous else {}

    def left(self, state: State) -> int:
        """Return how many steps there are until the next exchange, also if an interrupt has kept one from its place."""
        period = math.gcd(self.push, self.fetch)
        return period - state.step % period

    def setup(self, worker: Worker, state: State) -> None:
        """Begin, with the centre where all are."""
        state.own["base"] = state.vector
        state.own["seen"] = 0
        if not self.asynchronous:
            return
        if worker.number == 0:
            state.rows["centre"].write(state.own["base"])
        worker.barrier("the centre is set")

    def exchange(self, worker: Worker, state: State) -> int | None:
        """Push, fetch, or both; return the push's number, if ranks come one by one."""
        if not self.asynchronous:
            steps = state.vector - state.own["base"]
            state.own["base"] = state.own["base"] + by_rows(state, steps, lambda each: worker.all_reduce(each, "sum"))
            state.vector = state.own["base"]
            return None
        pushes, fetches = state.step % self.push == 0, state.step % self.fetch == 0
        return self._exchanged(worker, state, pushes, fetches) if pushes or fetches else None

    def _exchanged(self, worker: Worker, state: State, pushes: bool, fetches: bool) -> int | None:
        """Push, fetch, or both; return the push's number."""
        runs, vector = state.opened()
        rows, own = state.rows, state.own
        with worker.lock(CENTRE) as lock:
            lock.read(rows["sequence"], rows["centre"])
            sequence = int(state.shared["sequence"][0])
            alone = sequence == own["seen"]  # nobody else has written since this rank fetched
            if runs is None:
                vector = self._on_device(state, vector, pushes, fetches, alone)
            else:
                self._by_blocks(state, runs, pushes, fetches, alone)
            if pushes:
                state.shared["sequence"][0] = sequence + 1
                lock.write(rows["sequence"], rows["centre"])
            # Who has fetched, and has nothing left to push, stands where the centre is until somebody else writes.
            own["seen"] = sequence + 1 if pushes and (fetches or alone) else -1
        if vector is not None and fetches:
            state.vector = vector
        return sequence if pushes else None

    def _by_blocks(self, state: State, runs: list[np.ndarray], pushes: bool, fetches: bool, alone: bool) -> None:
        """Push, fetch, or both, in place."""
        centre, base, d = state.shared["centre"], state.own["base"], state.scratch("steps", BLOCK)
        for x, place in state.params.blocks(runs):
            c, b, steps = centre[place], base[place], d[: x.size]
            np.subtract(x, b, out=steps)
            if pushes and alone:
                c[...] = x  # to the last bit where the rank has stepped to
            elif pushes:
                np.add(c, steps, out=c)
            if fetches:
                x[...] = c
                # What it has not pushed yet it keeps to push.
                np.copyto(b, c) if pushes else np.subtract(c, steps, out=b)
            elif pushes:
                b[...] = x

    def _on_device(self, state: State, x: Any, pushes: bool, fetches: bool, alone: bool) -> Any:
        """Push, fetch, or both, as `_by_blocks` does; return where the rank is."""
        centre, own = state.rows["centre"], state.own
        steps = x - own["base"]
        if pushes:
            there = x if alone else centre.to_device(JAX) + steps
            centre.write(there)
        else:
            there = centre.to_device(JAX)
        if fetches:
            x = there
        own["base"] = x if pushes else there - steps
        return x

    def report(self, worker: Worker, state: State) -> Any:
        """Push what is left, and return the centre."""
        if not self.asynchronous:
            return state.own["base"]
        if not (state.vector == state.own["base"]).all():
            self._exchanged(worker, state, pushes=True, fetches=False)
        worker.barrier("all have pushed")
        return centre_of(worker, state)

    def resized(self, ranks: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
        """Start all at the centre; nothing is left to push at a report."""
        first = ranks[0]
        centre = first["shared"]["centre"] if self.asynchronous else first["own"]["base"]
        own = {"base": centre.copy(), "seen": -1}
        optimizer = np.mean([each["optimizer"] for each in ranks], axis=0).astype(first["optimizer"].dtype)
        return [{**first, "params": centre.copy(), "own": dict(own), "optimizer": optimizer} for _ in range(size)]


class ASGD(Downpour):
    """Asynchronous SGD: `Downpour` that pushes and fetches at once, every ``period`` steps.

    x̃ ← x̃ + (x − x_old), x = x_old = x̃: the rule of this name in Platoon.

    Parameters
    ----------
    period : int
        A rank's steps between two exchanges.
    exclude
        As for `Rule`.
    """

    def __init__(self, period: int = 1, exclude: Callable[[Any], bool] | None = None):
        super().__init__(period, period, True, exclude)
