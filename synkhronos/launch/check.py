"""Is a class what a run asks for?

    python -m synkhronos check MODEL:CLASS

`check`
    Says what it lacks, and runs it for three iterations in this process.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np

from synkhronos.launch import contract, modelfile
from synkhronos.launch.recorder import ClassRecorder
from synkhronos.launch.settings import SettingsError, resolve

#: Iterations that it is run for.
_ITERATIONS = 3


def check(model: str, asked: Mapping[str, Any] | None = None) -> int:
    """Print what a class lacks, and what running it shows; return 0 if that is nothing, 1 if something.

    ``model`` is ``FILE:CLASS``, and ``asked`` are settings of its runs, such as ``config``.
    """
    try:
        settings = resolve([{"model": model, "devices": "cpu"}, asked or {}])
    except SettingsError as error:
        return _say(f"{error}\n", 2)
    import synkhronos.compat  # noqa: F401 - classes import theano

    np.random.seed(0)
    random.seed(0)
    step = "its module is imported"
    try:
        kind = modelfile.load(settings.root, settings.modelfile, settings.modelclass)
        if lines := contract.lacking(kind):
            return _lacks(settings.modelclass, lines)
        step = "an instance is made"
        instance = contract.make(kind, {"rank": 0, "size": 1, "verbose": True, "seed": 0, **settings.config})
        step = "compile_iter_fns() runs"
        contract.compile_functions(instance)
        if lines := contract.lacking(instance):
            return _lacks(settings.modelclass, lines)
        words = []
        recorder = ClassRecorder(0, rows=contract.rows(instance))
        before = [np.array(param.get_value()) for param in instance.params]
        instance.epoch = 0
        for name, run, count in (
            ("train_iter", instance.train_iter, min(_ITERATIONS, int(instance.data.n_batch_train))),
            ("val_iter", instance.val_iter, min(_ITERATIONS, int(instance.data.n_batch_val))),
        ):
            step = f"{name}() runs"
            if callable(getattr(instance, "reset_iter", None)):
                contract.called(instance.reset_iter, name.removesuffix("_iter"))
            for i in range(count):
                run(i + 1, recorder)
                recorder.stepped()
            if name == "train_iter":
                recorder.write()
                words += _judged(instance, recorder, before)
        if instance.data.n_batch_val and not recorder.validation_sums()[0]:
            words.append("val_iter() has not called recorder.val_error(count, cost, error): nothing will be validated")
        step = "adjust_hyperp(0) runs"
        contract.called(instance.adjust_hyperp, 0)
        step = "cleanup() runs"
        instance.cleanup()
    except Exception as error:
        sys.stdout.write("".join(traceback.format_exception(error)))
        return _say(f"{settings.modelclass} fails when {step}: {type(error).__name__}: {error}\n", 1)
    if settings.epochs is None and getattr(instance, "n_epochs", None) is None:
        words.append("it has no n_epochs: give --set epochs=N")
    for line in words:
        sys.stdout.write(f"{settings.modelclass}: {line}\n")
    if words:
        return 1
    return _say(f"{settings.modelclass} has all that a run asks for\n", 0)


def _judged(instance: Any, recorder: ClassRecorder, before: list[np.ndarray]) -> list[str]:
    """Return what is wrong with what iterations have done."""
    words = []
    loss = recorder.mean_loss()
    if loss is None:
        words.append("train_iter() has not called recorder.train_error(count, cost, error): no cost will be recorded")
    elif not np.isfinite(loss):
        words.append(f"the cost is {loss} after {recorder.total} iterations")
    after = [np.array(param.get_value()) for param in instance.params]
    if all(map(np.array_equal, before, after)):
        words.append("train_iter() changes none of params")
    return words


def _lacks(name: str, lines: list[str]) -> int:
    return _say(f"{name} lacks:\n" + "".join(f"  {line}\n" for line in lines), 1)


def _say(text: str, status: int) -> int:
    sys.stdout.write(text)
    return status
