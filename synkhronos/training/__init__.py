"""Training on all ranks: update rules, training functions, and a trainer with reports, validation and checkpoints.

::

    Trainer            epochs under an exchange rule: from report to report, each by a `plan`
        │
    loop               batches and steps until the next report, on every rank
        │
    train_function     one or several steps; `step` is its command, `serial` its equivalent in one process
        │
    updates            rules that compute new parameters from a gradient

Users import the lower two as `synkhronos.extensions.train` and `synkhronos.extensions.updates`.  ``import synkhronos``
does not import this package.
"""

from synkhronos.training import schedules
from synkhronos.training.checkpoint import Checkpoint, CheckpointError
from synkhronos.training.recorder import Recorder, TensorBoard
from synkhronos.training.report import Report
from synkhronos.training.trainer import Trainer, make_trainer

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Recorder",
    "Report",
    "TensorBoard",
    "Trainer",
    "make_trainer",
    "schedules",
]
