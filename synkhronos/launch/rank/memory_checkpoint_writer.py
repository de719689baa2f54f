"""Writing of checkpoints in memory: copies of the state of all ranks in the supervisor's folder."""

from __future__ import annotations

import time
from collections.abc import Mapping

from synkhronos.launch.rank.model_state import ModelState
from synkhronos.training.checkpoints.checkpoint import Checkpoint
from synkhronos.training.loops.batch_loop import choose_interval_steps

#: Approximate number of seconds between two copies, and its minimum in units of the duration of a copy.
_INTERVAL_SECONDS, _MIN_INTERVAL_RATIO = 1.0, 10.0


class MemoryCheckpointWriter:
    """Writer of copies of a run's state; all ranks write a copy together, into the supervisor's folder.

    Attributes
    ----------
    due_batch : int
        Number of batches in the epoch after which the next copy is due.
    """

    def __init__(self, folder: str, state: ModelState):
        self._folder, self._state, self._checkpoint = folder, state, None  # type: str, ModelState, Checkpoint | None
        self._every = self.due_batch = 1
        self._ended_at = time.monotonic()

    def schedule_after(self, batch: int) -> None:
        """Schedule the next copy; ``batch`` batches of the epoch are trained on."""
        self.due_batch = batch + self._every

    def write(self, metrics: Mapping[str, float] | None) -> None:
        """Copy the state of all ranks.  A collective.

        As at a report, no message between ranks is pending.

        Parameters
        ----------
        metrics : dict of str to float, or None
            Metrics of the epoch that has just ended; None within an epoch.
        """
        state, began = self._state, time.monotonic()
        state.worker.barrier("the ranks are copied")
        if state.worker.number == 0 and self._checkpoint is None:
            self._checkpoint = Checkpoint(self._folder, keep=1)
        if metrics is None:
            state.recorder.write()  # after a death, the next line starts from the copy
            state.use_consensus_params()
        try:
            state.save(metrics, self._checkpoint)
        except OSError as error:
            error.add_note("on_death = 'continue' copies the state of all ranks into /dev/shm: give it more memory")
            raise
        if metrics is None:
            state.restore_own_params()
        self._schedule_next(began, state.position["batch"])

    def _schedule_next(self, began: float, batch: int) -> None:
        """Schedule the next copy, after one at batch ``batch`` that began at time ``began``.  A collective."""
        now = time.monotonic()
        interval = max(_INTERVAL_SECONDS, _MIN_INTERVAL_RATIO * (now - began))
        steps = choose_interval_steps(self._every, began - self._ended_at, interval)
        self._every = self._state.worker.broadcast(steps)
        self.schedule_after(batch)
        self._ended_at = time.monotonic()
