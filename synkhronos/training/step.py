"""The command behind a training step.

`Step`
    Compute the gradient, combine it, move the parameters: in one launch where XLA computes on GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from synkhronos.collectives.commands import Agreed, Reduce
from synkhronos.devices.jax.foreign import combining
from synkhronos.function.call import Call, Part
from synkhronos.graphs import library_of
from synkhronos.graphs.family import AT_FIRST_CALL
from synkhronos.graphs.mirror import stored
from synkhronos.graphs.xla import Combination, Exchange
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
    exchange : Exchange
        How the gradients travel where all of it is one launch.
    times : int
        How many steps to take in the one launch; each rank's rows are those of the first, then those of the second, ...
    """

    gradient: Call
    reduce: Reduce
    update: Call
    exchange: Exchange
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
        is_second = rank.number == (rank.root + 1) % rank.size
        if self.update.compile and is_second and update.program.compiles == AT_FIRST_CALL:
            # Beside the gradient, which the master compiles meanwhile.
            update.program.library.compile_now(update.compiled.function)
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
        combination = Combination(shared.container.storage, self.exchange, rank.size)
        launch = chained(update.compiled.run, combination, self.times)
        return None if launch is None else partial(self._launch, rank, launch)

    def _launch(self, rank: Rank, launch: Callable[..., Any], *inputs: Any) -> Any:
        """Launch what combines in the middle of it, when all ranks are about to do so."""
        agreed = self.reduce.agree(rank)
        assert isinstance(agreed, Agreed)  # `_in_one` has seen where the gradient is
        ((_, _, device, (shape, _)),) = agreed.parts
        communicator = device.communicator(rank)
        # What is exchanged in another dtype has been divided before.
        combine = _Combine(rank, communicator, "sum" if self.exchange.dtype else self.reduce.op, shape, self.times > 1)

        # Nothing may be raised in what XLA calls; and when this rank has launched, all will have in a moment, so that
        # the updates are applied on all ranks, or, if one of them fails, on none.
        with undisturbed() as signals:
            with combining(combine, self.times):
                results = launch(*inputs)
            signals.renew()
            communicator.meet(signals.relent)
            rank.commit()
        return results


class _Combine:
    """Combines the ranks' gradients in the middle of a launch; see `synkhronos.devices.jax.foreign.Combine`."""

    def __init__(self, rank: Rank, communicator: Any, op: str, shape: tuple[int, ...], many: bool):
        self._rank, self._communicator, self._op, self._many = rank, communicator, op, many
        self._shape = shape
        self._begun = 0

    def start(self, spans: Sequence[Any], stream: int | None) -> None:
        """Begin with a part of the vector."""
        self._communicator.start_within(spans, self._op, stream)
        self._begun += sum(span.n_items for span in spans)

    def finish(self, spans: Sequence[Any], counts: int, stream: int | None) -> None:
        """Combine the rest, if the ranks have agreed on so many items."""
        if self._many:
            self._rank.commit()  # the first of them may count though a later one fails
        count, self._begun = self._begun + sum(span.n_items for span in spans), 0
        if count != math.prod(self._shape):
            self.wait(stream)
            raise ValueError(f"all_reduce: expected shape {self._shape}, as before the launch, got {count} items")
        self._communicator.all_reduce_within(spans, self._op, counts, stream)

    def wait(self, stream: int | None) -> None:
        """Have what the stream does next come after what was begun."""
        self._communicator.wait_within(stream)
