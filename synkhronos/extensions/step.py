"""The command behind a training step.

`Step`
    Compute the gradient, combine it, move the parameters: in one launch where XLA computes on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from synkhronos.collectives.commands import Copies, Reduce
from synkhronos.devices.jax.foreign import combining
from synkhronos.function.call import Call, Part
from synkhronos.graphs import library_of
from synkhronos.graphs.mirror import stored
from synkhronos.ranks import Rank
from synkhronos.ranks.interrupts import undisturbed


class Step(NamedTuple):
    """Take a training step on all ranks, in one command: the ranks don't meet at the master's in the middle of it.

    Attributes
    ----------
    gradient : Call
        Of what writes each rank's gradient into a shared variable.
    reduce : Reduce
        Of that variable alone.
    update : Call
        Of what moves the parameters by it; without inputs and outputs.
    times : int
        How many steps to take in the one launch; each rank's rows are those of the first, then those of the second, ...
    """

    gradient: Call
    reduce: Reduce
    update: Call
    times: int = 1

    @property
    def effect(self) -> str | None:
        """What an error says was done, if it was: only the update counts."""
        return self.update.effect if self.times == 1 else "Steps were taken"

    @property
    def effect_in_part(self) -> str | None:
        """What an error says if a rank was in the middle of many steps."""
        if self.times == 1:
            return None
        return "Some steps may have been taken, on some ranks more than on others: broadcast() makes them equal again."

    def run(self, rank: Rank) -> tuple[Any, Any] | None:
        """Take this rank's part; return what the two calls return, None if some rank can't take many steps at once."""
        gradient, update = self.gradient.part(rank), self.update.part(rank)
        launch = self._in_one(rank, gradient, update)
        if self.times > 1 and not all(rank.exchange_known(launch is not None)):
            return None
        if launch is not None:
            return self.gradient.complete(rank, gradient, launch, self.times), []
        with rank.uncommitted():
            loss = self.gradient.complete(rank, gradient)
            self.reduce.run(rank)
        return loss, self.update.complete(rank, update)

    def _in_one(self, rank: Rank, gradient: Part, update: Part) -> Callable[..., Any] | None:
        """Return what does all of it in one launch, None where it can't be done.

        Ranks meet and combine in the same order either way, as calls whose outputs are read later meet nowhere when
        they are compiled: they need not agree on it.
        """
        device = gradient.program.device
        chained = getattr(gradient.compiled.run, "followed_by", None)
        if chained is None or update.program.device is not device:
            return None
        if not gradient.active or self.gradient.variant.accumulate:
            return None
        (key,) = self.reduce.keys
        if rank.size == 1:
            return chained(update.compiled.run, None, self.times)
        shared = stored(rank, key)
        value = library_of(shared).get(shared)
        # What the user may have put there is moved, or cast, on the long way.
        if not device.holds(value) or value.dtype != shared.type.dtype or not device.combines_within(value.dtype):
            return None
        launch = chained(update.compiled.run, shared.container.storage, self.times)
        return None if launch is None else partial(self._launch, rank, launch)

    def _launch(self, rank: Rank, launch: Callable[..., Any], *inputs: Any) -> Any:
        """Launch what combines in the middle of it, when all ranks are about to do so."""
        copies = Copies(rank, self.reduce.keys, self.reduce.nccl)
        copies.check_equal(0, "all_reduce")
        communicator, layout, op = copies.communicator(0), copies.of(0)[0], self.reduce.op
        del copies  # it has a reference to the very array that is about to be written

        def combine(source: int, target: int, count: int, counts: int, stream: int | None) -> None:
            if self.times > 1:
                rank.commit()  # the first of them may count though a later one fails
            communicator.all_reduce_within(source, target, count, layout, op, counts, stream)

        # Nothing may be raised in what XLA calls; and when this rank has launched, all will have in a moment, so that
        # the updates are applied on all ranks, or, if one of them fails, on none.
        with undisturbed() as signals:
            with combining(combine, self.times):
                results = launch(*inputs)
            signals.renew()
            communicator.meet(signals.relent)
            rank.commit()
        return results
