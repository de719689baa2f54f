"""Training on all ranks: update rules, training functions, and a trainer with reports, validation and checkpoints.

Each package imports only from those below it::

    trainer           Trainer: epochs under an exchange rule, and recovery from deaths of workers
    loops             loops over epochs and batches that trainers and the launcher share; signals that stop them
    checkpoints       folders of checkpoints, and the state of every rank in them
    monitoring        validation metrics, reports and records
    train_function    one or several steps as a callable, on all ranks or in one process
    updates           update rules, such as Adam: new parameters from a gradient

``schedules`` has learning rates.  Users import names from `synkhronos.training`, `synkhronos.training.updates` and
`synkhronos.training.schedules`.  ``import synkhronos`` does not import this package.
"""

from synkhronos.training import schedules, updates
from synkhronos.training.checkpoints.checkpoint_folder import CheckpointError, CheckpointFolder
from synkhronos.training.monitoring.recorder import Recorder, TensorBoard
from synkhronos.training.monitoring.report import Report
from synkhronos.training.train_function import (
    SerialTrainFunction,
    TrainFunction,
    make_train_function,
    make_train_function_serial,
)
from synkhronos.training.trainer import Trainer, make_trainer

__all__ = [
    "CheckpointFolder",
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
