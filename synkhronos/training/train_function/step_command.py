"""The command of a training step.

A step is two compiled functions with an all-reduce between them::

    gradient(rows) --> all-reduce of grad_shared --> update()

Three commands would return to the master in between.  One command runs all of it on each rank, and an engine that can
fuse the three parts runs it in one launch, several times over if asked to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from synkhronos.collectives.commands import AllReduceValues
from synkhronos.engines import Runner, StepAllReduce
from synkhronos.function.call import Call, RankCall
from synkhronos.graphs.library import AT_FIRST_CALL
from synkhronos.ranks import Command, Rank


class _StepCommandFields(NamedTuple):
    """Fields of `StepCommand`; a named tuple cannot have a second base class."""

    gradient: Call
    reduce: AllReduceValues
    update: Call
    wire_dtype: str | None
    n_tail: int = 1
    n_steps: int = 1
    every_rank_has_rows: bool = True


class StepCommand(_StepCommandFields, Command):
    """Take a training step, or several in one launch, on all ranks.

    Implements `synkhronos.engines.engine.StepAllReduce`, by which an engine fuses the step.

    Attributes
    ----------
    gradient, reduce, update
        Call that writes this rank's gradient into a shared variable, its all-reduce, and the call that updates from it.
    wire_dtype : str or None
        Dtype in which a fused launch sends the gradients; None for their own.
    n_tail : int
        Number of items at the vector's end that are sent in their own dtype in any case: they are not gradients.
    n_steps : int
        Number of steps in one launch.  The rows of each rank are ordered by steps.
    every_rank_has_rows : bool
        If not, no rank fuses the step: a fused one may send the gradient in other chunks, or in another dtype.
    """

    __slots__ = ()

    @property
    def effect(self) -> str | None:
        """Effect of the command in an error's message; a gradient alone changes no parameter."""
        return self.update.effect if self.n_steps == 1 else "Steps were taken"

    @property
    def partial_effect(self) -> str | None:
        """Effect in the message of an error in the middle of a launch of several steps; None for a single step."""
        if self.n_steps == 1:
            return None
        return "Some steps may have been taken, on some ranks more than on others: broadcast() makes them equal again."

    def run(self, rank: Rank) -> tuple[Any, Any] | None:
        """Take the steps on this rank; return the outputs of the gradient and of the update.

        Return None, without a step, if ``n_steps`` is above 1 and a rank cannot fuse the steps into one launch.
        """
        gradient, update = self.gradient.make_rank_call(rank), self.update.make_rank_call(rank)
        fused_step = None
        if self.every_rank_has_rows:
            fused_step = fuse_calls(rank, self, self.gradient, gradient, [update], self.n_steps)
        if self.n_steps > 1 and not all(rank.all_gather_cached(fused_step is not None)):
            return None
        return self._run_in_parts(rank, gradient, update) if fused_step is None else (gradient.run(fused_step), [])

    def _run_in_parts(self, rank: Rank, gradient: RankCall, update: RankCall) -> tuple[Any, Any]:
        """Run the gradient, the all-reduce and the update one after another; return both functions' outputs."""
        is_second = rank.number == (rank.master_rank + 1) % rank.size
        if self.update.needs_compile and is_second and update.computation.compile_order == AT_FIRST_CALL:
            # The master compiles the gradient meanwhile, so the two compilations run in parallel.
            update.computation.library.compile_now(update.compiled.function)
        with rank.suspend_commits():
            loss = gradient.run()
            self.reduce.run(rank)
        return loss, update.run()

    @property
    def op(self) -> str:
        """Name of the reduction of the gradient."""
        return self.reduce.op

    def get_shared(self, rank: Rank) -> Any:
        """Return this rank's copy of the gradient's variable."""
        (key,) = self.reduce.keys
        return rank.get_object(key)

    def get_shards(self, rank: Rank) -> None:
        """Return None: every rank updates all parameters."""

    def prepare_all_reduce(self, rank: Rank) -> tuple[Any, tuple[int, ...]]:
        """Return the communicator of the all-reduce, and the gradient's shape, once all ranks have compared theirs."""
        (gradient,) = self.reduce.get_plan(rank).variables
        return gradient.transport.get_communicator(rank), gradient.layout[0]


def fuse_calls(
    rank: Rank,
    step: StepAllReduce,
    gradient: Call,
    gradient_call: RankCall,
    updates: Sequence[RankCall],
    n_steps: int = 1,
) -> Runner | None:
    """Return the fused launch of a gradient, its all-reduce and updates; None if this rank cannot fuse them."""
    if gradient_call.compiled.n_rank_means:
        return None  # the host takes part within the launch, and has to wait for its end
    computation = gradient_call.computation
    if any(update.computation.engine is not computation.engine for update in updates):
        return None
    if not gradient_call.has_rows or gradient.variant.returns_updates:
        return None
    if gradient.needs_compile and computation.compile_order == AT_FIRST_CALL:
        return None  # the master makes this call first, alone: in a fused launch it would wait for the others
    runners = [update.compiled.runner for update in updates]
    return computation.engine.fuse_step(rank, gradient_call.compiled.runner, step, runners, n_steps)
