"""The command behind a training step.

`Step`
    Compute the gradient, combine it, move the parameters: in one launch where the engine can.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from synkhronos.collectives.commands import AllReducePlan, Reduce
from synkhronos.engines import Runner
from synkhronos.function.call import Call, RankCall
from synkhronos.graphs.library import AT_FIRST_CALL
from synkhronos.graphs.mirror import get_object
from synkhronos.ranks import Command, Rank


class _StepFields(NamedTuple):
    #: Of what writes each rank's gradient into a shared variable.
    gradient: Call
    #: Of that variable alone.
    reduce: Reduce
    #: Of what moves the parameters by it; without inputs and outputs.
    update: Call
    #: In which dtype the gradients travel where all of it is one launch; None for their own.
    exchange: str | None
    #: Items at the vector's end that always travel in their own dtype: they are not gradients.
    tail: int = 1
    #: How many steps to take in the one launch; each rank's rows are those of the first, then those of the second, ...
    times: int = 1


class Step(_StepFields, Command):
    """Take a training step on all ranks, in one command: the ranks don't meet at the master's in the middle of it."""

    __slots__ = ()

    @property
    def effect(self) -> str | None:
        """What an error says was done, if it was: only the update counts."""
        return self.update.effect if self.times == 1 else "Steps were taken"

    @property
    def partial_effect(self) -> str | None:
        """What an error says if a rank was in the middle of many steps."""
        if self.times == 1:
            return None
        return "Some steps may have been taken, on some ranks more than on others: broadcast() makes them equal again."

    def run(self, rank: Rank) -> tuple[Any, Any] | None:
        """Take this rank's part; return what the two calls return, None if some rank can't take many steps at once."""
        gradient, update = self.gradient.bind(rank), self.update.bind(rank)
        chain = self._chain(rank, gradient, update)
        if self.times > 1 and not all(rank.exchange_cached(chain is not None)):
            return None
        if chain is not None:
            gradient.runner = chain
            return self.gradient.execute(rank, gradient), []
        is_second = rank.number == (rank.root + 1) % rank.size
        if self.update.needs_compile and is_second and update.program.compile_order == AT_FIRST_CALL:
            # Beside the gradient, which the master compiles meanwhile.
            update.program.library.compile_now(update.compiled.function)
        with rank.suspend_commits():
            loss = self.gradient.execute(rank, gradient)
            self.reduce.run(rank)
        return loss, self.update.execute(rank, update)

    @property
    def op(self) -> str:
        """By which reduction the gradient is combined."""
        return self.reduce.op

    def get_shared(self, rank: Rank) -> Any:
        """Return this rank's copy of the gradient's variable."""
        (key,) = self.reduce.keys
        return get_object(rank, key)

    def agree(self, rank: Rank) -> tuple[Any, tuple[int, ...]]:
        """Return what combines the gradient, and its shape on all ranks."""
        plan = self.reduce.plan(rank)
        assert isinstance(plan, AllReducePlan)  # the engine has checked the device of the gradient
        ((_, _, device, (shape, _)),) = plan.variables
        return device.get_communicator(rank), shape

    def _chain(self, rank: Rank, gradient: RankCall, update: RankCall) -> Runner | None:
        """Return what does all of it in one launch, None where it can't be done."""
        engine = gradient.program.engine
        if update.program.engine is not engine or not gradient.is_active or self.gradient.variant.returns_updates:
            return None
        if self.gradient.needs_compile and gradient.program.compile_order == AT_FIRST_CALL:
            return None  # the master runs that alone: it would wait for the others in the middle of it
        return engine.fuse_step(rank, gradient.runner, self, update.runner, self.times)
