"""The commands of a training step, with an unsharded and with a sharded optimizer (see `updates.sharded_updates`).

A step is two compiled functions with an all-reduce between them::

    gradient(rows) --> all-reduce of grad_shared --> update()

Three commands would return to the master in between.  One command instead runs all of it on each rank.  If an engine
can fuse the three parts, it runs them in one launch, which may repeat them.

A fused step has other barriers than an unfused one.  So it is fused on all ranks or on none:

=================================  ==================================================================================
Step                               Barriers
=================================  ==================================================================================
Fused: the first, or the first     `fuse_calls` compares whether each rank can fuse the step, `prepare_exchange`
after a failure or a new plan      compares plans, and the ranks wait until all of them have launched.
Fused: a later one                 The ranks wait until all of them have launched.
Not fused, by an engine that can   `fuse_calls` compares as above.  The rest is as below.
Not fused                          Those of `AllReduce.reduce_and_run`.
=================================  ==================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from synkhronos.collectives.all_reduce_command import AllReduce, AllReducePlan
from synkhronos.collectives.commands import VariableReplica, prepare_replicas
from synkhronos.containers import BoundedCache, WeakKeyDict
from synkhronos.devices import NUMPY, get_array_device
from synkhronos.devices.communicator import Communicator
from synkhronos.engines import GradientExchange, Runner, StepShards
from synkhronos.functions.call import Call, RankCall
from synkhronos.functions.computation import CompiledVariant, Computation
from synkhronos.graph_libraries import get_library
from synkhronos.graph_libraries.library import CompileOrder
from synkhronos.ranks import Command, Rank
from synkhronos.variable_types import Array, SharedVariable


class _StepCommandFields(NamedTuple):
    """Fields of `StepCommand`; a named tuple cannot have a second base class."""

    #: Call that writes this rank's gradient into a shared variable.
    gradient_call: Call
    #: All-reduce of this variable.
    all_reduce_command: AllReduce
    #: Call that updates the parameters from this variable.
    update_call: Call
    #: Dtype in which a fused launch sends the gradients; None for their own.
    wire_dtype: str | None
    #: Number of items at the vector's end that are not gradients; they are sent in their own dtype.
    n_tail_items: int = 1
    #: Number of steps in one launch.  The rows of each rank are ordered by steps.
    n_steps: int = 1
    #: Whether the ranks try to fuse the step; see `fuse_calls`.
    can_fuse: bool = False
    #: Whether the ranks launch the fused step without the two comparisons: of their plans, and of whether each rank can
    #: fuse it; see `can_skip_comparisons`.
    skips_comparisons: bool = False


class StepCommand(_StepCommandFields, Command):
    """Take a training step, or several in one launch, on all ranks.

    Implements `synkhronos.engines.engine.GradientExchange`, by which an engine fuses the step.
    """

    __slots__ = ()

    @property
    def effect_sentence(self) -> str | None:
        """Effect of the command in an error's message.  A gradient alone changes no parameter."""
        return self.update_call.effect_sentence if self.n_steps == 1 else "Steps were taken"

    @property
    def partial_effect_sentence(self) -> str | None:
        """Effect in the message of an error in the middle of a launch of several steps, or None for a single step."""
        if self.n_steps == 1:
            return None
        return "Some steps may have been taken, on some ranks more than on others: broadcast() makes them equal again."

    def run(self, rank: Rank) -> tuple[Any, Any] | None:
        """Take the steps.  Return the outputs of both functions, or None if some rank can't fuse several steps."""
        gradient_rank_call = self.gradient_call.compile_and_bind(rank)
        fused_runner = self._find_last_runner(rank, gradient_rank_call) if self.can_fuse else None
        if fused_runner is not None:
            return gradient_rank_call.run(fused_runner), []
        update_rank_call = self.update_call.compile_and_bind(rank)
        if self.can_fuse:
            fused_runner = fuse_calls(
                rank, self, gradient_rank_call, [update_rank_call], self.n_steps, self.skips_comparisons
            )
        if fused_runner is not None:
            if self.skips_comparisons or rank.size == 1:
                last_steps = rank.registry.get_or_create(_LastFusedStepByRunner)
                last_step = _LastFusedStep(self, update_rank_call.compiled, fused_runner)
                last_steps[gradient_rank_call.compiled.runner] = last_step
            return gradient_rank_call.run(fused_runner), []
        if self.n_steps > 1:
            return None
        return self._run_in_parts(rank, gradient_rank_call, update_rank_call)

    def _find_last_runner(self, rank: Rank, gradient_rank_call: RankCall) -> Runner | None:
        """Return the fused runner of the last step, if it was one of this very command and can be repeated, or None.

        `prepare_exchange` finds out whether the gradient's variable has changed.
        """
        last = rank.registry.get_or_create(_LastFusedStepByRunner).get(gradient_rank_call.compiled.runner)
        if last is None or last.command is not self:
            return None
        computation: Computation = rank.get_object(self.update_call.computation_key)
        is_same = computation.compiled_variants.get(self.update_call.variant) is last.update_variant
        return last.runner if is_same else None

    def _run_in_parts(self, rank: Rank, gradient_rank_call: RankCall, update_rank_call: RankCall) -> tuple[Any, Any]:
        """Run the gradient, the all-reduce and the update one after another.  Return both functions' outputs."""
        is_first_worker = rank.number == (rank.master_rank + 1) % rank.size
        may_need_compile, computation = self.update_call.may_need_compile, update_rank_call.computation
        if may_need_compile and is_first_worker and computation.compile_order == CompileOrder.AT_FIRST_CALL:
            # The master compiles the gradient meanwhile, so the two compilations run in parallel.
            computation.library.compile_now(update_rank_call.compiled.function)
        loss = gradient_rank_call.run(records_effect=False)
        if rank.size == 1:
            return loss, update_rank_call.run()
        # A compilation is collective: ranks wait for each other in it.
        return loss, self.all_reduce_command.reduce_and_run(rank, update_rank_call.run, is_collective=may_need_compile)

    @property
    def op(self) -> str:
        """Name of the reduction of the gradient."""
        return self.all_reduce_command.op

    def get_reduced_variable(self, rank: Rank) -> SharedVariable:
        """Return this rank's copy of the gradient's variable."""
        (key,) = self.all_reduce_command.variable_keys
        return rank.get_object(key)

    def get_shards(self, rank: Rank) -> None:
        """Return None: every rank updates all parameters."""

    def prepare_exchange(self, rank: Rank) -> tuple[Communicator, tuple[int, ...]]:
        """Return the communicator of the all-reduce, and the gradient's shape, which is the same on all ranks."""
        plans = rank.registry.get_or_create(_FusedStepPlanByAllReduce)
        last = plans.get(self.all_reduce_command)
        if not self.skips_comparisons:
            plan = self.all_reduce_command.agree_on_plan(rank)
            plans[self.all_reduce_command] = _FusedStepPlan(plan, rank.command_number)
        elif last is not None and last.plan.is_valid(rank):
            plan, last.command_number = last.plan, rank.command_number
        else:
            raise RuntimeError(f"rank {rank.number} has another gradient or connection than in the last step")
        (variable,) = plan.variables
        shape, _ = variable.layout
        return variable.communicator, shape


class _LastFusedStep(NamedTuple):
    """The last step of a gradient's runner: the command, the compiled update, and the fused runner."""

    command: StepCommand
    update_variant: CompiledVariant
    runner: Runner


class _LastFusedStepByRunner(WeakKeyDict[Runner, _LastFusedStep]):
    """Last fused step of each gradient's runner.  It is repeated without fusing anew, as in a training loop."""


@dataclass(slots=True)
class _FusedStepPlan:
    """Plan of the last fused step of an all-reduce, and the number of the step's command."""

    plan: AllReducePlan
    command_number: int


class _FusedStepPlanByAllReduce(BoundedCache[AllReduce, _FusedStepPlan]):
    """Plan of the last fused step of each all-reduce.

    If no command has failed since, all ranks have this plan and have fused the step.  So the next step may skip both
    comparisons, of digests and of whether each rank can fuse the step.  The plans that `AllReduce.agree_on_plan`
    caches are always compared: a rank may have made its plan in a command that failed on others, or in an all-reduce
    without a fused step.
    """


def can_skip_comparisons(rank: Rank, all_reduce_command: AllReduce) -> bool:
    """Whether all ranks can fuse the step, with the plan of the last fused one, as far as the master knows.

    A rank's plan changes with the master's, or after a failed command.  If it has changed on a worker alone, the
    worker fails before its launch, and the watchdog aborts the others' launches.  No rank's parameters change.
    """
    last = rank.registry.get_or_create(_FusedStepPlanByAllReduce).get(all_reduce_command)
    return last is not None and last.command_number > rank.barriers.last_failed_command and last.plan.is_valid(rank)


def fuse_calls(
    rank: Rank,
    exchange: GradientExchange,
    gradient_rank_call: RankCall,
    update_rank_calls: Sequence[RankCall],
    n_steps: int = 1,
    skips_comparison: bool = False,
) -> Runner | None:
    """Return the fused launch of a gradient, its exchange and updates; None on all ranks if some rank cannot fuse them.

    The master has found that `Engine.can_fuse_steps`, and that each rank has rows, in one slice.

    A fused step has other barriers than an unfused one, and may send the gradient in other chunks or in another dtype.
    A rank may be the only one that cannot fuse it, such as the master after ``grad_shared.set_value``.  So the ranks
    compare whether they can, by a barrier.  With ``skips_comparison``, RuntimeError is raised on a rank that cannot.
    """
    # These conditions are the same on all ranks.
    if gradient_rank_call.compiled.n_rank_means:
        return None  # Python exchanges the means within the launch, and waits for its end
    call, computation = gradient_rank_call.call, gradient_rank_call.computation
    engine = computation.engine
    if call.may_need_compile and computation.compile_order == CompileOrder.AT_FIRST_CALL:
        return None  # the master makes this call first, alone: in a fused launch it would wait for the others
    if any(update_rank_call.computation.engine is not engine for update_rank_call in update_rank_calls):
        return None
    updates = [update_rank_call.compiled.runner for update_rank_call in update_rank_calls]
    fused_runner = engine.fuse_step(rank, gradient_rank_call.compiled.runner, exchange, updates, n_steps)
    if skips_comparison:
        if fused_runner is None:
            raise RuntimeError(f"rank {rank.number} cannot fuse the step, although it has fused the last one")
    elif rank.size > 1 and not all(rank.all_gather_if_different(fused_runner is not None)):
        return None
    return fused_runner


class _ShardedStepCommandFields(NamedTuple):
    """Fields of `ShardedStepCommand`; a named tuple cannot have a second base class."""

    #: Call that writes the gradients of all ranks' shards into a matrix.
    gradient_call: Call
    #: Call that replaces the gradient in this rank's row by new parameters.
    shard_update_call: Call
    #: Call that sets the parameters to those in the matrix.
    parameter_update_call: Call
    #: Keys of variables: the matrix, this rank's row of it, this rank's number, its shards of the optimizer's state.
    matrix_key: Any
    row_key: Any
    rank_number_key: Any
    state_keys: tuple[Any, ...]
    #: Whether ``shard_update_call`` reads the reduced gradient of all rows from the matrix.
    gathers_gradient: bool
    #: Number of steps.  The rows of each rank are ordered by steps.
    n_steps: int = 1
    #: Whether the ranks try to fuse the step; see `fuse_calls`.
    can_fuse: bool = False


class ShardedStepCommand(_ShardedStepCommandFields, Command):
    """Take a training step, or several, on all ranks.  Each rank updates its part of the parameters."""

    __slots__ = ()

    @property
    def effect_sentence(self) -> str | None:
        return "The step was taken" if self.n_steps == 1 else "Steps were taken"

    @property
    def partial_effect_sentence(self) -> str | None:
        """Effect in the message of an error after the update of some rank's part."""
        return (
            "Some ranks may have updated their parts of the parameters or of the optimizer's state, and others not: "
            "broadcast() and set_optimizer_state() make them consistent again."
        )

    def run(self, rank: Rank) -> tuple[Any, list[Any]] | None:
        """Take the steps.  Return the gradient's outputs, or None if a single step has to be taken instead."""
        gradient_rank_call, shard_rank_call, parameter_rank_call = (
            call.compile_and_bind(rank)
            for call in (self.gradient_call, self.shard_update_call, self.parameter_update_call)
        )
        # At its first call a rank may have to wait until another rank has compiled the function.  Means over ranks are
        # exchanged between the launches of a single step.
        if self.n_steps > 1 and (self.gradient_call.may_need_compile or gradient_rank_call.compiled.n_rank_means):
            return None
        self._store_rank_number(rank)
        if self.n_steps == 1 and self.can_fuse:
            fused_runner = fuse_calls(rank, self, gradient_rank_call, [shard_rank_call, parameter_rank_call])
            if fused_runner is not None:
                return gradient_rank_call.run(fused_runner), []

        variables = rank.get_object(self.matrix_key), rank.get_object(self.row_key)

        def update() -> None:
            shard_rank_call.run()
            all_gather_shards(rank, *variables)
            parameter_rank_call.run()

        def take_step(compute_gradient: Callable[[], Any]) -> Any:
            outputs = compute_gradient()
            reduce_scatter_shards(rank, *variables, self.op)
            if self.gathers_gradient:
                all_gather_shards(rank, *variables)
            rank.run_on_all_or_no_rank(update, is_collective=True)
            return outputs

        if self.n_steps == 1:
            return take_step(lambda: gradient_rank_call.run(records_effect=False)), []
        runner = gradient_rank_call.compiled.runner
        return gradient_rank_call.run(
            _UnfusedStepsRunner(
                lambda *inputs: take_step(lambda: runner(*inputs)), self.n_steps, runner.host_input_positions
            )
        ), []

    # -- GradientExchange ---------------------------------------------------------------------------------------

    wire_dtype = None
    n_tail_items = 0
    op = "avg"

    def get_reduced_variable(self, rank: Rank) -> SharedVariable:
        """Return this rank's copy of the matrix."""
        return rank.get_object(self.matrix_key)

    def get_shards(self, rank: Rank) -> StepShards:
        """Return this rank's row, and its shards of the optimizer's state."""
        state_shards = rank.get_objects(self.state_keys)
        return StepShards(rank.get_object(self.row_key), state_shards, self.gathers_gradient)

    def prepare_exchange(self, rank: Rank) -> tuple[Communicator, tuple[int, ...]]:
        """Return the communicator, and the matrix's shape, once all ranks have compared theirs."""
        matrix, _ = _prepare_matrix_and_shard(rank, self.get_reduced_variable(rank), rank.get_object(self.row_key))
        shape, _ = matrix.layouts[0]
        return matrix.communicator, shape

    # -- in parts --------------------------------------------------------------------------------------------

    def _store_rank_number(self, rank: Rank) -> None:
        """Set the variable of the rank's number at the first step on these ranks."""
        numbered, key = rank.registry.get_or_create(_RankNumberKeys), self.rank_number_key
        if key in numbered:
            return
        shared = rank.get_object(key)
        library = get_library(shared)
        library.store_value(shared, get_array_device(library.borrow_value(shared)).from_numpy(np.asarray(rank.number)))
        numbered.add(key)


def reduce_scatter_shards(rank: Rank, matrix: SharedVariable, shard: SharedVariable, op: str) -> None:
    """Reduce the matrices of all ranks, and set ``shard`` to this rank's row of the reduction.  A collective."""
    matrix_replica, shard_replica = _prepare_matrix_and_shard(rank, matrix, shard)
    (_, width), _ = matrix_replica.layouts[0]
    out = shard_replica.get_writable()
    bounds = [r * width for r in range(rank.size + 1)]
    matrix_replica.communicator.reduce_scatter(matrix_replica.get_contiguous(), op, bounds, out)
    shard_replica.store(out)


def all_gather_shards(rank: Rank, matrix: SharedVariable, shard: SharedVariable) -> None:
    """Set the rows of ``matrix`` on every rank to the shards of all ranks.  A collective."""
    matrix_replica, shard_replica = _prepare_matrix_and_shard(rank, matrix, shard)
    array, device = matrix_replica.get_writable(), matrix_replica.transport_device
    out = [device.slice_items(array, r * shape[0], shape) for r, (shape, _) in enumerate(shard_replica.layouts)]
    matrix_replica.communicator.all_gather(shard_replica.get_contiguous(), shard_replica.layouts, out)
    matrix_replica.store(array)


def _prepare_matrix_and_shard(rank: Rank, matrix: SharedVariable, shard: SharedVariable) -> list[VariableReplica]:
    """Return this rank's replicas of a matrix with a row for each rank, and of its own shard.  A collective."""
    library = get_library(shard)
    device, value = get_array_device(library.borrow_value(matrix)), library.borrow_value(shard)
    if not device.owns(value):  # no function has computed the shard yet
        library.store_value(shard, device.from_numpy(NUMPY.to_numpy(value)))
    del value  # `VariableReplica.get_writable` checks whether others refer to the array
    replicas = prepare_replicas(rank, [matrix, shard], uses_device_communicator=True)
    for replica in replicas:
        replica.check_equal_layouts("shard_optimizer")
    if replicas[0].device is not replicas[1].device:
        replicas[0].raise_common_value_error("shard_optimizer: the gradient and its reduction are on different devices")
    return replicas


class _UnfusedStepsRunner(Runner):
    """Calls a function once for each step, with the step's rows of the inputs."""

    def __init__(self, function: Callable[..., Any], n_repeats: int, host_input_positions: frozenset[int]):
        super().__init__(function)
        self.n_repeats, self.host_input_positions = n_repeats, host_input_positions

    def __call__(self, *inputs: Array) -> list[Any]:
        lengths = [len(value) // self.n_repeats for value in inputs]
        by_step = []
        for i in range(self.n_repeats):
            rows = [value[i * n : (i + 1) * n] for value, n in zip(inputs, lengths, strict=True)]
            by_step.append(super().__call__(*rows))
        return [value for values in zip(*by_step, strict=True) for value in values]


class _RankNumberKeys(set[Any]):
    """Keys of variables that hold the number of this rank."""
