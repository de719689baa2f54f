"""State of one rank that trains a model class, and its checkpoints.

A signal may end an epoch after any batch.  The checkpoint then has the number of batches, and the states of random
generators at the start of the epoch.  Only the class can determine which rows it has used.  Therefore a resumed run
skips or repeats these batches by the methods of the class.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from synkhronos.exchange_rules import ExchangeRule, ExchangeState
from synkhronos.launcher.configuration.settings import Settings
from synkhronos.launcher.model_class.model_interface import call_by_signature, get_steps_per_batch, use_model_precision
from synkhronos.launcher.model_class.model_recorder import ModelRecorder
from synkhronos.launcher.rank_process.gradient_sum_rule import GradientSumRule
from synkhronos.programs import LocalRows, RankContext
from synkhronos.training.checkpoints import rank_state
from synkhronos.training.checkpoints.checkpoint_folder import CheckpointFolder, read_meta
from synkhronos.training.checkpoints.compatibility import check_can_resume, describe_training
from synkhronos.training.checkpoints.variables_by_role import VariablesByRole
from synkhronos.training.monitoring.best_cost import BestCost
from synkhronos.training.monitoring.recorder import filter_lines
from synkhronos.training.train_function.optimizer_state import join_shards

#: Key under which a rank stores the `ExchangeState` of the exchange rule.
STORAGE_KEY = "run"


class ModelState:
    """Instance of a model class on one rank, its position in the run, and its checkpoints.

    ``variables`` are the shared variables of the instance by role, ``shared_arrays`` those of the exchange rule.

    Attributes
    ----------
    applies_gradients : bool
        Whether ``apply_gradients()`` of the instance updates the parameters after an exchange of gradients.
    position : dict
        Position in the epoch: ``batch``, the number of batches trained on; ``generators``, their states at the start of
        the epoch; and after a resumption ``record``, the number of steps and the sums of costs and weights.
    best_cost : BestCost
        Best value of the metric so far.
    """

    def __init__(
        self,
        context: RankContext,
        settings: Settings,
        exchange_rule: ExchangeRule,
        model: Any,
        variables: VariablesByRole,
        shared_arrays: dict[str, LocalRows],
        recorder: ModelRecorder,
    ):
        self.context, self.settings, self.exchange_rule = context, settings, exchange_rule
        self.model, self.variables, self.recorder = model, variables, recorder
        self._sharded_variables = list(getattr(model, "sharded_variables", {}).values())
        self._spec = rank_state.RankStateSpec(STORAGE_KEY, variables, exchange_rule, shared_arrays, is_joint=False)
        self.folder = Path(settings.folder)
        self.applies_gradients = isinstance(exchange_rule, GradientSumRule) and callable(
            getattr(model, "apply_gradients", None)
        )
        self.n_complete_epochs = 0
        #: Difference between `n_rows_seen` and the rows of this rank's steps times the number of ranks.
        self._n_rows_offset = 0
        self.position: dict[str, Any] = {"batch": 0}
        self.best_cost = BestCost()
        context.get_persistent_dict(STORAGE_KEY)["state"] = self._spec.make_state()

    @property
    def exchange_state(self) -> ExchangeState:
        """State on which the exchange rule operates.  `restore` replaces it."""
        state: ExchangeState = self.context.get_persistent_dict(STORAGE_KEY)["state"]
        return state

    @property
    def n_rows_seen(self) -> int:
        """Number of rows trained on, if all ranks have taken as many steps as this one since the run resumed."""
        return self._n_rows_offset + self._count_rows_of_steps()

    def _count_rows_of_steps(self) -> int:
        return self.recorder.meter.total_steps * self.recorder.rows_per_step * self.context.size

    @cached_property
    def checkpoints(self) -> CheckpointFolder:
        """Folder of the run's checkpoints.  Only rank 0 may open it."""
        return CheckpointFolder(self.folder / "checkpoints", self.settings.keep, keep_best=self.settings.keep_best)

    def save(self, metrics: Mapping[str, float] | None, checkpoints: CheckpointFolder | None = None) -> None:
        """Write a checkpoint of all ranks.  All ranks must call this.

        ``metrics`` are the metrics of the epoch that has just ended; None within an epoch.  Rank 0 writes into
        ``checkpoints``, by default the run's folder of checkpoints.
        """
        is_within_epoch = metrics is None
        if isinstance(self.exchange_rule, GradientSumRule) and not self.applies_gradients:
            self.exchange_rule.save_pending(self.exchange_state)
        state = rank_state.read_state(self.context, self._spec)
        totals, total_steps = self.recorder.meter.totals, self.recorder.meter.total_steps
        record = [totals.steps, totals.weighted_loss_sum, totals.weight_sum]
        position = {**self.position, "record": record} if is_within_epoch else None
        rank_entry = state, get_global_generator_states(), total_steps, position
        if self.context.number:
            self.context.send(rank_entry, 0)
        else:
            rank_entries = [rank_entry, *map(self.context.receive, range(1, self.context.size))]
            states = [state for state, *_ in rank_entries]
            arrays, layout = rank_state.pack_states(states, self.exchange_state.shared, False)
            meta = {
                **describe_training("run", self.exchange_rule, self.variables, None),
                **layout,
                "epochs": self.n_complete_epochs,
                "model": f"{self.settings.modelfile}:{self.settings.modelclass}",
                "stop": self.best_cost.to_dict(),
                # States of the global generators of NumPy and `random`, one entry for each rank.
                "host_generators": [generators for _, generators, *_ in rank_entries],
                "totals": [steps for _, _, steps, _ in rank_entries],
                "seen": self.n_rows_seen,
                "within": [position for *_, position in rank_entries] if is_within_epoch else None,
            }
            (checkpoints or self.checkpoints).save(total_steps, arrays, meta, metrics)
        self.context.barrier("the checkpoint is written")

    def restore(self, path: str) -> None:
        """Restore variables, rule state and random generators from a checkpoint, which rank 0 reads for all ranks."""
        rank_state.restore_state(self.context, self._spec, path, 0)
        for variable in self._sharded_variables:
            variable.set_shard(self.context.number, self.context.size)

    def get_generator_states(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the states of the model's random generators, and of the global generators, on this rank."""
        return rank_state.read_generator_states(self.context, self.variables.generators), get_global_generator_states()

    def set_generator_states(self, states: list[Any], global_states: dict[str, Any]) -> None:
        """Set this rank's random generators to states from `get_generator_states`."""
        for shared, state in zip(self.variables.generators, states, strict=True):
            rank_state.set_generator_state(shared, state)
        set_global_generator_states(global_states)

    def set_params_to_consensus(self) -> None:
        """Set the parameters to the exchange rule's consensus, and the whole variables of a sharded optimizer."""
        rank_state.set_params_to_consensus(self.context, STORAGE_KEY, self.exchange_rule)
        for variable in self._sharded_variables:
            shards = self.context.all_gather(np.asarray(variable.shard.get_value()))
            variable.whole.set_value(join_shards(shards, variable.shape))

    def restore_own_params(self) -> None:
        """Set the parameters back to this rank's own, after `set_params_to_consensus`."""
        rank_state.restore_own_params(self.context, STORAGE_KEY)

    def resume(self, path: str) -> None:
        """Resume from a checkpoint, which rank 0 reads for all ranks, and remove later records."""
        context = self.context
        meta = context.broadcast(read_meta(path) if context.number == 0 else None)
        expected_meta = describe_training("run", self.exchange_rule, self.variables, None)
        check_can_resume(path, meta, expected_meta, self.exchange_rule.changeable_options)
        self.best_cost = BestCost.from_dict(meta["stop"])
        if self.settings.keep_best:
            self.best_cost.set_label(" ".join(self.settings.keep_best))
        for epoch in range(meta["epochs"]):  # repeats changes of learning rates that are not in shared variables
            call_by_signature(self.model.adjust_hyperp, epoch)
        if meta["within"]:
            self.skip_trained_batches(meta["epochs"], meta["within"])
        self.restore(path)
        if isinstance(self.exchange_rule, GradientSumRule):
            self.exchange_rule.restore_pending(self.exchange_state)
        self.recorder.meter.total_steps = meta["totals"][context.number % len(meta["totals"])]
        # Older checkpoints lack "seen".
        n_rows_seen = meta.get("seen", sum(meta["totals"]) * self.recorder.rows_per_step)
        self._n_rows_offset = n_rows_seen - self._count_rows_of_steps()
        if context.number < len(meta["host_generators"]):
            set_global_generator_states(meta["host_generators"][context.number])
        if context.number == 0:
            self._remove_later_records(meta)
        context.barrier("resumption from the checkpoint")
        self.n_complete_epochs = int(meta["epochs"])

    def _remove_later_records(self, meta: Mapping[str, Any]) -> None:
        """Remove the records of steps and reports after a checkpoint."""
        for file in self.folder.glob("*.jsonl"):
            # In lines of steps the first epoch is 0, in reports it is 1.
            first_removed = meta["epochs"] + (file.stem == "reports")
            rank = file.stem.removeprefix("rank-")
            n_steps = -1  # number of steps up to a checkpoint within an epoch
            if meta["within"] and rank.isdecimal() and int(rank) < len(meta["totals"]):
                n_steps = meta["totals"][int(rank)]

            def is_kept(line: dict[str, Any], first_removed: int = first_removed, n_steps: int = n_steps) -> bool:
                return line.get("epoch", first_removed) < first_removed or line.get("step", math.inf) <= n_steps

            filter_lines(file, is_kept)

    def skip_trained_batches(self, epoch: int, positions: list[dict[str, Any]]) -> None:
        """Advance the instance past the batches of an epoch that were trained on before the checkpoint.

        An instance without ``skip_iter`` repeats these steps, which sets its attributes.  Afterwards the checkpoint
        overwrites the parameters.  ``positions`` has the `position` of each rank at the checkpoint.  If the number of
        ranks has changed, ranks skip a proportional number of batches.
        """
        number, size = self.context.number, self.context.size
        position = positions[number % len(positions)]
        sub_batches = get_steps_per_batch(self.model)
        batches = round(position["batch"] * len(positions) / size)
        steps, loss, weight = position["record"]
        if size != len(positions):
            steps = batches * sub_batches
        self.position = {**position, "batch": batches, "record": [steps, loss, weight]}
        self.model.epoch = epoch
        set_global_generator_states(position["generators"])
        if callable(getattr(self.model, "skip_iter", None)):
            self.model.skip_iter(batches)
            return
        recorder = ModelRecorder(number, every=sys.maxsize, rows_per_step=self.recorder.rows_per_step)
        for batch in range(batches):
            for _ in range(sub_batches):
                self.context.report_progress()
                with use_model_precision():
                    self.model.train_iter(batch, recorder)


def get_global_generator_states() -> dict[str, Any]:
    """Return the states of NumPy's and Python's global random generators, in types that JSON can represent."""
    version, numbers, gauss = random.getstate()
    return {
        "numpy": rank_state.to_json_types(np.random.get_state(legacy=False)),
        "python": [version, list(numbers), gauss],
    }


def set_global_generator_states(states: dict[str, Any]) -> None:
    """Set the states of NumPy's and Python's global random generators, as from `get_global_generator_states`."""
    np.random.set_state(rank_state.from_json_types(states["numpy"]))
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
