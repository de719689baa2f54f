"""Writing of memory checkpoints: checkpoints in the supervisor's folder in /dev/shm, for a start after a death."""

from __future__ import annotations

import time
from collections.abc import Mapping

from synkhronos.launcher.rank_process.model_state import ModelState
from synkhronos.training.checkpoints.checkpoint_folder import CheckpointFolder
from synkhronos.training.loops.batch_loop import adapt_interval_steps

#: Approximate number of seconds between two memory checkpoints.
_INTERVAL_SECONDS = 1.0
#: Minimum ratio of the interval between memory checkpoints to the time to write one.
_MIN_INTERVAL_RATIO = 10.0


class MemoryCheckpointWriter:
    """Writer of memory checkpoints, which all ranks write together; the next one is due after batch ``due_batch``."""

    def __init__(self, folder: str, state: ModelState):
        self._folder, self._state = folder, state
        self._checkpoints: CheckpointFolder | None = None
        self._interval_batches = self.due_batch = 1
        self._last_write_end = time.monotonic()

    def schedule_after(self, batch: int) -> None:
        """Schedule the next memory checkpoint.  So far, ``batch`` batches of the epoch are trained on."""
        self.due_batch = batch + self._interval_batches

    def write(self, epoch_metrics: Mapping[str, float] | None) -> None:
        """Write the state of all ranks.  All ranks must call this.

        ``epoch_metrics`` are those of the epoch that has just ended; None within an epoch.  No message between ranks
        may be pending.  Within an epoch the ranks have the consensus parameters while the state is written.  Before and
        afterwards each rank has its own parameters.
        """
        state, write_start = self._state, time.monotonic()
        state.context.barrier("the memory checkpoint is due")
        if state.context.number == 0 and self._checkpoints is None:
            self._checkpoints = CheckpointFolder(self._folder, keep=1)
        if epoch_metrics is None:
            state.recorder.write_line()  # after a death, the next line starts from this checkpoint
            state.set_params_to_consensus()
        try:
            state.save(epoch_metrics, self._checkpoints)
        except OSError as error:
            error.add_note("on_death = 'continue' writes the state of all ranks into /dev/shm: give it more memory")
            raise
        finally:
            if epoch_metrics is None:
                state.restore_own_params()
        self._schedule_next(write_start, state.position["batch"])

    def _schedule_next(self, write_start: float, batch: int) -> None:
        """Schedule the next memory checkpoint after one begun at ``write_start``.  All ranks must call this."""
        now = time.monotonic()
        interval = max(_INTERVAL_SECONDS, _MIN_INTERVAL_RATIO * (now - write_start))
        batches = adapt_interval_steps(self._interval_batches, write_start - self._last_write_end, interval)
        self._interval_batches = self._state.context.broadcast(batches)
        self.schedule_after(batch)
        self._last_write_end = time.monotonic()
