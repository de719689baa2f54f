"""How does a network learn on many ranks?

One step, on all ranks together (users know these two by the names in `synkhronos.extensions`):

`updates`
    Update rules: how parameters move by a gradient.
`train_function`
    Functions that take a step: `step` is the command behind one, `batches` has the rows of several, `model` checks what
    is trained, and `serial` does the same in one process.

Epochs of them:

`make_trainer`, `Trainer`, `Report`
    Epochs over data under an exchange rule, with validation.  `trainer` goes from report to report; `course` has the
    data and their order, `interval` says what to do until the next report, `loop` does it, `meter` counts, `report` is
    what comes of it.
`schedules`
    Learning rates that change.
`Recorder`, `TensorBoard`
    What is written down meanwhile (`recorder`); ``python -m synkhronos show`` draws it (`show`).
`Checkpoint`
    Where to go on after an interruption (`checkpoint`; `resume` says what is in one, `storing` what of each rank).

Not imported by ``import synkhronos``.
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
