"""Compiled functions of a trainer's model, and the model's state on the ranks."""

from __future__ import annotations

import itertools
from typing import Any

from synkhronos.exchange_rules import ExchangeRule
from synkhronos.functions import Function, function
from synkhronos.training.checkpoints.rank_state import RankStateSpec
from synkhronos.training.checkpoints.variables_by_role import VariablesByRole
from synkhronos.training.monitoring.validation_metrics import Metric
from synkhronos.training.schedules import Schedule
from synkhronos.training.train_function.train_function import TrainFunction
from synkhronos.training.train_function.training_graph import (
    TrainingGraph,
    build_local_updates,
    replace_params,
    summarize_update_rule,
)
from synkhronos.training.trainer.death_recovery import RecoveryPolicy
from synkhronos.training.trainer.trainer_state import TrainerState
from synkhronos.variable_types import SharedVariable

_trainer_numbers = itertools.count()


class CompiledModel:
    """Compiled functions that take steps and validate, and the state that they change.

    Under BSP on gradients, all ranks take a *joint step* by one command, which exchanges gradients.  Under other
    exchange rules each rank takes a *local step* alone.  ``launch_shapes`` are the shapes of joint launches so far; see
    `Meter`.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        exchange_rule: ExchangeRule,
        learning_rate: SharedVariable,
        schedule: Schedule,
        metrics: dict[str, Metric],
    ):
        self.graph, self.exchange_rule, self.metrics = graph, exchange_rule, metrics
        self.learning_rate, self.schedule = learning_rate, schedule
        variables = VariablesByRole.from_graph(graph, exchange_rule)
        self.validation = _compile_validation(graph, metrics) if metrics else None
        self.joint_step: TrainFunction | None = None
        self.local_step: Function | None = None
        if exchange_rule.averages_gradients:
            self.joint_step = TrainFunction(graph, exchange_rule.precision)
        else:
            self.local_step = _compile_local_step(graph)
        update_rule, update_rule_options = summarize_update_rule(graph.update_rule, graph.update_rule_kwargs)
        if graph.options.ema is not None:
            update_rule_options["ema"] = graph.options.ema
        is_joint = self.joint_step is not None
        name = f"trainer {next(_trainer_numbers)}"
        spec = RankStateSpec(name, variables, exchange_rule, {}, is_joint=is_joint)
        sharded_step = self.joint_step if graph.options.shard_optimizer else None
        self.state = TrainerState(spec, (update_rule, update_rule_options), sharded_step)
        self.launch_shapes: set[Any] = set()

    @property
    def optimizer_state(self) -> list[SharedVariable]:
        """Variables of the update rule.  Those of a sharded optimizer change with the number of ranks."""
        return self.graph.optimizer_state if self.joint_step is None else self.joint_step.optimizer_state

    def make_recovery_policy(self, max_deaths: int) -> RecoveryPolicy:
        """Make the policy for ``on_death="continue"``."""
        ranks_have_own_state = bool(self.state.variables.generators) or any(
            update.may_differ and update.op != "mean" for update in self.graph.extra_updates
        )
        return RecoveryPolicy(self.state, ranks_have_own_state, max_deaths)


def _compile_local_step(graph: TrainingGraph) -> Function:
    """Compile the local step: gradient and update in one function, without an all-reduce."""
    updates = [
        *build_local_updates(graph.rule_updates).items(),
        *((u.shared, u.expression) for u in graph.extra_updates),
    ]
    return function(
        [*graph.x, *graph.y], graph.outputs, updates=[(shared, new, None) for shared, new in updates], name="train_step"
    )


def _compile_validation(graph: TrainingGraph, metrics: dict[str, Metric]) -> Function:
    """Compile the metrics of the parameters, or with ``validate_ema`` of the moving averages."""
    outputs = [output for metric in metrics.values() for output in metric.outputs]
    if graph.options.validate_ema:
        new_values = replace_params([expression for expression, _ in outputs], graph.params, graph.ema)
        outputs = [(new, op) for new, (_, op) in zip(new_values, outputs, strict=True)]
    return function([*graph.x, *graph.y], outputs, name="validation")
