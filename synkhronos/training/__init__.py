"""How does a network learn on many ranks?

`make_trainer`, `Trainer`, `Report`
    Epochs over data under an exchange rule, with validation (`trainer`).
`schedules`
    Learning rates that change.
`Recorder`, `TensorBoard`
    What is written down meanwhile (`recorder`); ``python -m synkhronos show`` draws it (`show`).
`Checkpoint`
    Where to go on after an interruption (`checkpoint`).

Not imported by ``import synkhronos``.
"""

from synkhronos.training import schedules
from synkhronos.training.checkpoint import Checkpoint, CheckpointError
from synkhronos.training.recorder import Recorder, TensorBoard
from synkhronos.training.trainer import Report, Trainer, make_trainer

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
