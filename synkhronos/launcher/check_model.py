"""The command ``check``: checks the methods and attributes of a model class, and whether it trains.

    python -m synkhronos check MODEL:CLASS

The class runs three iterations in this process, first as the only rank, then as two ranks.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from synkhronos.compat.theano_import import import_theano_before_fork
from synkhronos.exchange_rules.state import FlatVariables, concatenate
from synkhronos.launcher.configuration.resolve import resolve_settings
from synkhronos.launcher.configuration.settings import Settings, SettingsError
from synkhronos.launcher.configuration.sources import parse_set_options
from synkhronos.launcher.model_class.model_compilation import (
    compile_model,
    requires_gradient_exchange,
    set_model_options,
)
from synkhronos.launcher.model_class.model_interface import (
    ModelInterfaceError,
    call_by_signature,
    call_optional,
    check_interface,
    get_batch_size,
    get_n_epochs,
    import_model_class,
    make_config,
    make_instance,
    parse_val_iter_result,
    use_model_precision,
)
from synkhronos.launcher.model_class.model_recorder import ModelRecorder
from synkhronos.launcher.model_class.model_variables import group_variables
from synkhronos.launcher.model_class.sanity_check import (
    EQUAL_STEPS_MESSAGE,
    find_ranks_with_equal_steps,
    hash_step,
    hash_values,
)
from synkhronos.launcher.supervision.rank_output import open_standard_streams
from synkhronos.launcher.train import add_set_option

#: Number of iterations that the class runs.
_N_ITERATIONS = 3


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status: 1 if the class has a problem, 2 if a setting is wrong."""
    open_standard_streams()
    parser = argparse.ArgumentParser(
        prog="python -m synkhronos check",
        description="List the methods and attributes that a class lacks for `train`. If it has all of them, run three "
        "iterations as one rank, then as two, in this process, and report problems.",
        epilog="Example: python -m synkhronos check models/mlp.py:MLP",
    )
    add_set_option(parser)
    parser.add_argument("model", metavar="MODEL:CLASS", help="a file or a module, and a class in it")
    options = parser.parse_args(arguments)
    try:
        return check_class(options.model, parse_set_options(options.set))
    except SettingsError as error:
        sys.stderr.write(f"synkhronos check: {error}\n")
        return 2


def check_class(model: str, overrides: Mapping[str, Any] | None = None) -> int:
    """Check the class ``FILE:CLASS`` with further settings, and print its problems; return 1 if there are any, or 0."""
    settings = resolve_settings([overrides or {}, {"model": model, "devices": "cpu"}])
    import_theano_before_fork(use_gpu=False)
    with tempfile.TemporaryDirectory() as folder:
        check, name = _ModelCheck(settings, Path(folder)), settings.modelclass
        try:
            check.run()
            problems = [f"{name}: {problem}" for problem in check.problems]
        except (ModelInterfaceError, SettingsError) as error:
            problems = [str(error)]
        except Exception as error:
            problems = [f"{name} fails when {check.stage}: {_describe_exception(error, settings)}"]
    lines = [f"{model.rpartition(':')[0]}: {problem}" for problem in problems]
    sys.stdout.write("\n".join(lines or [f"{name}: no problem found, on one rank and on two"]) + "\n")
    return int(bool(problems))


def _describe_exception(error: Exception, settings: Settings) -> str:
    """Return an exception's text and its line in the model's file.  Print the traceback if it was raised elsewhere."""
    text = f"{type(error).__name__}: {error}"
    file = Path(settings.pythonpath, *settings.modelfile.split("."))
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if Path(frame.filename) in (file.with_suffix(".py"), file / "__init__.py"):
        return f"{text} (line {frame.lineno}, in {frame.name}())"
    sys.stdout.write("".join(traceback.format_exception(error)))
    return text


class _ModelCheck:
    """Check of one model class: its ``problems``, and the present ``stage``, for the message of an exception."""

    def __init__(self, settings: Settings, folder: Path):
        self.settings, self.folder, self.exchange_rule = settings, folder, settings.make_exchange_rule()
        self.stage = "its module is imported"
        self.problems: list[str] = []

    def run(self) -> None:
        """Check the class as one rank, then as two."""
        settings = self.settings
        self.model_class = import_model_class(settings.pythonpath, settings.modelfile, settings.modelclass)
        check_interface(self.model_class, settings.modelclass)
        self.check_one_rank()
        if not self.problems:
            self.check_two_ranks()

    def make_instance(self, rank: int, size: int) -> Any:
        """Make an instance for a rank."""
        np.random.seed(rank)
        random.seed(rank)
        instance = make_instance(self.model_class, make_config(self.settings, rank, size))
        instance.epoch = 0
        set_model_options(instance, self.settings.model_options, self.exchange_rule, self.settings.modelclass)
        return instance

    def check_one_rank(self) -> None:
        """Call every method of an instance as the only rank."""
        self.stage = "an instance is made"
        instance = self.make_instance(0, 1)
        self.stage = "compile_iter_fns() runs"
        compile_model(instance, self.settings, self.exchange_rule, 1)
        check_interface(instance, self.settings.modelclass)
        get_n_epochs(instance, self.settings)
        recorder = ModelRecorder(0, rows_per_step=get_batch_size(instance), folder=self.folder)
        initial_hash = hash_values(FlatVariables(list(instance.params)))
        self.stage = "train_iter() runs"
        for i in range(min(_N_ITERATIONS, int(instance.data.n_batch_train))):
            with use_model_precision():
                instance.train_iter(i, recorder)
                if requires_gradient_exchange(instance):
                    instance.apply_gradients()
            recorder.count_iteration()
        recorder.write_line()
        totals = recorder.meter.totals
        if not totals.weight_sum:
            self.problems.append(
                "train_iter() has not called recorder.train_error(count, cost, error): no cost will be recorded"
            )
        elif not np.isfinite(loss := totals.compute_loss()):
            self.problems.append(f"the cost is {loss} after {totals.steps} iterations")
        if hash_values(FlatVariables(list(instance.params))) == initial_hash:
            self.problems.append("train_iter() changes none of params")
        self.call_optional(instance, "reset_iter", "train")
        self.stage = "val_iter() runs"
        batch = 0
        while batch < min(_N_ITERATIONS, int(instance.data.n_batch_val)):
            with use_model_precision():
                result = instance.val_iter(0, recorder)
            batch, should_stop = parse_val_iter_result(result, batch, batch + 1)
            if should_stop:
                break
        rows, sums = recorder.take_validation_sums()
        if instance.data.n_batch_val and not rows:
            self.problems.append(
                "val_iter() has not called recorder.val_error(count, cost, error): nothing will be validated"
            )
        recorder.set_validation_means(0, {name: value / rows for name, value in sums.items()})
        instance.current_info = recorder.get_latest_val_info()
        self.call_optional(instance, "reset_iter", "val")
        self.call_optional(instance, "save", f"{self.folder}{os.sep}")
        self.stage = "adjust_hyperp(0) runs"
        call_by_signature(instance.adjust_hyperp, 0)
        self.call_optional(instance, "print_info", recorder, verbose=True)
        self.call_optional(instance, "scale_lr", 2)
        self.stage = "cleanup() runs"
        instance.cleanup()

    def call_optional(self, instance: Any, name: str, *arguments: Any, **keywords: Any) -> Any:
        """Call an optional method if the class has it, and return its result."""
        self.stage = f"{name}() runs"
        return call_optional(instance, name, *arguments, **keywords)

    def apply_reduced_gradient(
        self, instances: list[Any], sources: list[FlatVariables], targets: list[FlatVariables], total: Any
    ) -> None:
        """Update two instances from the sum of their gradients, in two parts with a sharded optimizer."""
        if getattr(instances[0], "gathers_gradient", False):
            for source in sources:
                source.set(total)
        results = [self.call_optional(instance, "apply_gradients") for instance in instances]
        if True in results:
            rows = concatenate(*(target.get() for target in targets))
            for source, instance in zip(sources, instances, strict=True):
                source.set(rows)
                instance.apply_gradients()

    def check_two_ranks(self) -> None:
        """Train two instances as ranks 0 and 1 of two, with an exchange after each step."""
        self.stage = "two instances are made, with size 2"
        instances = [self.make_instance(rank, 2) for rank in range(2)]
        self.stage = "compile_iter_fns() runs with size 2"
        for instance in instances:
            exchanged_quantity = compile_model(instance, self.settings, self.exchange_rule, 2)
            check_interface(instance, self.settings.modelclass)
        params = [
            FlatVariables(group_variables(instance, exchanged_quantity == "params").exchanged_variables)
            for instance in instances
        ]
        if params[0].shapes != params[1].shapes:
            shapes = f"{[*map(list, params[0].shapes)]} on rank 0, and of {[*map(list, params[1].shapes)]} on rank 1"
            self.problems.append(f"with size 2 params are of shapes {shapes}")
            return
        params[1].set(params[0].get())
        initial_hash = hash_values(params[0])
        sources, targets = params, params
        if exchanged_quantity == "gradient":
            sources = [FlatVariables(instance.vels) for instance in instances]
            targets = [FlatVariables(instance.vels2) for instance in instances]
        recorder = ModelRecorder(0, rows_per_step=get_batch_size(instances[0]))
        self.stage = "train_iter() runs with size 2"
        step_hashes: list[list[str]] = [[], []]
        n_steps = min(_N_ITERATIONS, *(int(instance.data.n_batch_train) for instance in instances))
        for i in range(n_steps):
            for rank, instance in enumerate(instances):
                with use_model_precision():
                    instance.train_iter(i, recorder)
                step_hashes[rank].append(hash_step(sources[rank], recorder.get_last_cost()))
            total = sources[0].get() + sources[1].get()
            for rank, target in enumerate(targets):
                rows = (total if exchanged_quantity == "gradient" else total / 2).reshape(-1, target.size)
                target.set(rows[rank % len(rows)])  # with a sharded optimizer, the rank's row
            if exchanged_quantity == "gradient":
                with use_model_precision():
                    self.apply_reduced_gradient(instances, sources, targets, total)
        self.stage = "cleanup() runs with size 2"
        for instance in instances:
            instance.cleanup()
        if n_steps > 1 and hash_values(params[0]) == initial_hash:
            self.problems.append("with size 2 train_iter() changes none of params")
        elif equal_ranks := find_ranks_with_equal_steps(step_hashes):
            self.problems.append(f"with size 2 {EQUAL_STEPS_MESSAGE.format(*equal_ranks)}")
