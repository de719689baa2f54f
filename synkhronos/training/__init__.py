"""Training on all ranks: update rules, training functions, and a trainer with reports, validation and checkpoints.

::

    Trainer            epochs under an exchange rule
        │
    epoch_loop         from report to report: train, validate, save; also for the launcher's runs
        │
    loop               batches and steps until the next report, on every rank, counted by a `meter`
        │
    train_function     one or several steps; `step` is its command, `serial` its equivalent in one process
        │
    updates            rules that compute new parameters from a gradient

Users import the lower two as `synkhronos.training` and `synkhronos.training.updates`.  ``import synkhronos``
does not import this package.
"""

from synkhronos.training import schedules, updates
from synkhronos.training.checkpoint import Checkpoint, CheckpointError
from synkhronos.training.recorder import Recorder, TensorBoard
from synkhronos.training.report import Report
from synkhronos.training.train_function import (
    SerialTrainFunction,
    TrainFunction,
    make_train_function,
    make_train_function_serial,
)
from synkhronos.training.trainer import Trainer, make_trainer

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Recorder",
    "Report",
    "SerialTrainFunction",
    "TensorBoard",
    "TrainFunction",
    "Trainer",
    "make_train_function",
    "make_train_function_serial",
    "make_trainer",
    "schedules",
    "updates",
]
