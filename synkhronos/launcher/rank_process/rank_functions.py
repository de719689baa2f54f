"""The program of each rank: three functions, which the master runs on all ranks one after another.

Each rank stores its instance of the model class between `build_model` and `train_model`::

    prepare_rank()  redirect output, print device and cores
    build_model()   make and check the instance, compile its functions, make parameters equal on all ranks
    train_model()   train the instance: a ModelReportLoop loops over epochs, its ModelBatchLoop over batches
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from synkhronos.exchange_rules import ExchangeRule
from synkhronos.exchange_rules.state import FlatVariables
from synkhronos.graph_libraries import get_library, register_loaded_libraries
from synkhronos.launcher import core_binding
from synkhronos.launcher.configuration.settings import Settings
from synkhronos.launcher.model_class.model_compilation import ExchangedQuantity, compile_model, set_model_options
from synkhronos.launcher.model_class.model_interface import (
    ModelInterfaceError,
    check_interface,
    get_batch_size,
    import_model_class,
    make_config,
    make_instance,
)
from synkhronos.launcher.model_class.model_recorder import ModelRecorder
from synkhronos.launcher.model_class.model_variables import group_variables, track_generators
from synkhronos.launcher.rank_process.gradient_sum_rule import GradientSumRule
from synkhronos.launcher.rank_process.model_report_loop import ModelReportLoop
from synkhronos.launcher.rank_process.model_state import ModelState
from synkhronos.launcher.rank_process.remote_output import RemoteRecorder, redirect_output_to_supervisor
from synkhronos.launcher.supervision.master_arguments import MasterArguments
from synkhronos.programs import LocalRows, RankContext
from synkhronos.programs.rank_context import get_rank
from synkhronos.training.checkpoints.variables_by_role import VariablesByRole
from synkhronos.training.monitoring.recorder import Recorder

#: Descriptions of the exchange under BSP, by the values that ranks exchange.
_EXCHANGE_DESCRIPTIONS = {
    "gradient": "after each step vels2 is set to the sum of vels over all ranks (cdd)",
    "params": "after each step parameters are averaged over all ranks (avg)",
}


@dataclass
class RankModel:
    """A rank's instance of the user's class, and other objects that later functions need."""

    model: Any = None
    variables: VariablesByRole | None = None
    #: Quantity that ranks exchange after each step; None without such an exchange.
    exchanged_quantity: ExchangedQuantity | None = None
    #: Recorder of a rank on another host.
    remote_recorder: RemoteRecorder | None = None

    @staticmethod
    def get_or_create(context: RankContext) -> RankModel:
        """Return this rank's `RankModel`.  The first call creates it."""
        return get_rank(context).registry.get_or_create(RankModel)


def prepare_rank(context: RankContext, settings: Settings, arguments: MasterArguments) -> int:
    """Redirect this rank's output to its own pipe, print its device and cores, and return its process ID."""
    import synkhronos.compat  # noqa: F401 - it enables ``import theano``

    sys.stdout.flush()
    sys.stderr.flush()
    if context.number < len(arguments.output_pipes):
        for file in (1, 2):
            os.dup2(arguments.output_pipes[context.number], file)
        for pipe in arguments.output_pipes:
            os.close(pipe)
        cores = arguments.rank_cores[context.number] if arguments.rank_cores else None
        placement = f"on {settings.devices[context.number]}, {core_binding.describe_binding(cores)}"
    else:
        RankModel.get_or_create(context).remote_recorder = redirect_output_to_supervisor(context.number)
        device = f"cuda{context.number - get_rank(context).local_ranks.start}" if settings.uses_gpus else "cpu"
        placement = f"on {device} of host {platform.node()}, {core_binding.describe_binding(None)}"
    for stream in (sys.stdout, sys.stderr):  # the supervisor reads UTF-8, whatever the locale
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    sys.stdout.write(f"process {os.getpid()} {placement}\n")
    return os.getpid()


def build_model(context: RankContext, settings: Settings, exchange_rule: ExchangeRule) -> tuple[int, str]:
    """Make, check and compile this rank's instance.  Return the size and dtype of the vector that ranks exchange.

    The parameters of rank 0 are copied to all ranks, and the random streams of each rank are made different.
    """
    model_class = import_model_class(settings.pythonpath, settings.modelfile, settings.modelclass)
    register_loaded_libraries()  # must precede the class's functions, which all ranks compile at once
    check_interface(model_class, settings.modelclass)
    config = make_config(settings, context.number, context.size)
    model = make_instance(model_class, config)
    for name in ("rank", "size", "verbose", "seed"):
        if not hasattr(model, name):
            setattr(model, name, config[name])
    context.report_progress()
    set_model_options(model, settings.model_options, exchange_rule, settings.modelclass)
    exchanged_quantity = compile_model(model, settings, exchange_rule, context.size)
    if exchanged_quantity is not None and context.number == 0:
        sys.stdout.write(f"{_EXCHANGE_DESCRIPTIONS[exchanged_quantity]}\n")
    check_interface(model, settings.modelclass)
    if settings.scale_lr:
        if not callable(getattr(model, "scale_lr", None)):
            raise ModelInterfaceError(f"{settings.modelclass} lacks:\n  method scale_lr(size), for scale_lr = true")
        model.scale_lr(context.size)
    vector = FlatVariables(list(model.params))
    shapes = [list(shape) for shape in vector.shapes]
    all_shapes = context.all_gather(shapes)
    for r, rank_shapes in enumerate(all_shapes):
        if rank_shapes != all_shapes[0]:
            raise ModelInterfaceError(f"params: of shapes {all_shapes[0]} on rank 0, and of {rank_shapes} on rank {r}")
    vector.set(context.broadcast(np.asarray(vector.get()) if context.number == 0 else None))
    track_generators(model)
    variables = group_variables(model, exclude_normalization=exchanged_quantity == "params")
    if variables.excluded_params and context.number == 0:
        count = f"{len(variables.excluded_params)} of {len(model.params)} parameters"
        sys.stdout.write(f"{count}, which are named gamma or beta, are not exchanged: each rank trains its own\n")
    # The class may seed all ranks equally, but their random numbers have to differ.
    for variable in variables.generators:
        library = get_library(variable)
        generator = library.copy_generator(variable)
        if context.number:
            generator = library.jump_generator(generator, context.number)
        library.set_generator(variable, generator)
    rank_model = RankModel.get_or_create(context)
    rank_model.model, rank_model.variables, rank_model.exchanged_quantity = model, variables, exchanged_quantity
    exchange_vector = FlatVariables(variables.exchanged_variables)
    return exchange_vector.size, exchange_vector.dtype.name


def train_model(
    context: RankContext,
    settings: Settings,
    exchange_rule: ExchangeRule,
    shared_arrays: dict[str, LocalRows],
    arguments: MasterArguments,
    stop_flag: LocalRows,
) -> bool:
    """Train the instance from `build_model`, and call its ``cleanup``.  Return False if a signal stopped it."""
    rank_model = RankModel.get_or_create(context)
    model, variables = rank_model.model, rank_model.variables
    assert variables is not None
    if rank_model.exchanged_quantity == "gradient":
        exchange_rule = GradientSumRule(model, exchange_rule.precision)
    is_on_first_host = context.number < len(settings.devices)
    metrics_recorder = Recorder(settings.folder) if is_on_first_host else rank_model.remote_recorder
    folder = Path(settings.folder) if is_on_first_host else None
    recorder = ModelRecorder(context.number, metrics_recorder, settings.every, get_batch_size(model), folder)
    state = ModelState(context, settings, exchange_rule, model, variables, shared_arrays, recorder)
    try:
        return ModelReportLoop(state, arguments, stop_flag).train_all_epochs()
    finally:
        model.cleanup()
