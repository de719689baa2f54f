"""Launches of executables that contain collectives.

XLA calls the collectives during the launch (`devices.jax.ffi_collectives`).  `FusedRunner` passes a
`NcclLaunchCollectives`, or the NCCL communicator itself, to the program's `FfiCollectives`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from synkhronos.devices.jax.ffi_collectives import LaunchCollectives
from synkhronos.devices.jax.xla_communicator import BufferSpan, Collective, XlaCommunicator
from synkhronos.engines.engine import GradientExchange, Runner
from synkhronos.engines.xla.executable import Executable
from synkhronos.ranks import Rank


class FusedRunner(Runner):
    """An executable with collectives, which all ranks launch at the same point of a command."""

    def __init__(self, rank: Rank, executable: Executable, exchange: GradientExchange):
        self._rank, self._executable, self._exchange = rank, executable, exchange
        self.n_repeats = executable.n_repeats
        assert executable.ffi_collectives is not None
        self._ffi_collectives = executable.ffi_collectives

    def record_signature_if_new(self, inputs: Sequence[Any]) -> bool:
        return self._executable.record_signature_if_new(inputs)

    def __call__(self, *inputs: Any) -> list[Any]:
        """Launch, and wait until all ranks have launched."""
        communicator, shape = self._exchange.prepare_exchange(self._rank)
        assert isinstance(communicator, XlaCommunicator)
        launch = self._launch_python if self._ffi_collectives.nccl_call_mode == "python" else self._launch_native
        # No signal handler may raise within XLA's callbacks, nor before the other ranks have launched: the updates have
        # to be valid on all ranks, or, if one fails, on none.
        with self._rank.barriers.defer_signals_until_late() as signals:
            results = launch(inputs, communicator, shape)
            signals.restart_time_limit()
            communicator.wait_until_started()
            self._rank.record_effect()
        return results

    def _launch_python(self, inputs: Sequence[Any], communicator: XlaCommunicator, shape: tuple[int, ...]) -> list[Any]:
        """Launch the program, whose collectives call NCCL through a `NcclLaunchCollectives`."""
        op, collectives = self._ffi_collectives.op, self._executable.collectives
        launch_collectives = NcclLaunchCollectives(self._rank, communicator, op, shape, self.n_repeats > 1, collectives)
        with self._ffi_collectives.use_launch_collectives(launch_collectives, self.n_repeats * len(collectives)):
            return self._executable(*inputs)

    def _launch_native(self, inputs: Sequence[Any], communicator: XlaCommunicator, shape: tuple[int, ...]) -> list[Any]:
        """Launch the program, whose collectives call NCCL through handlers in C++."""
        with self._ffi_collectives.use_communicator(communicator, shape, self.n_repeats) as state:
            try:
                return self._executable(*inputs)
            finally:
                if self.n_repeats > 1 and state.n_finished:  # an earlier step may be valid even if a later one fails
                    self._rank.record_effect()


class NcclLaunchCollectives(LaunchCollectives):
    """Runs the collectives on the ranks' gradients, of one shape on all ranks, in a launch of one or several steps."""

    def __init__(
        self,
        rank: Rank,
        communicator: XlaCommunicator,
        op: str,
        shape: tuple[int, ...],
        is_repeated: bool,
        collectives: Sequence[Collective] = ("all_reduce",),
    ):
        self._rank, self._communicator, self._op, self._is_repeated = rank, communicator, op, is_repeated
        self._shape = shape
        self._collectives = itertools.cycle(collectives)
        self._collective = next(self._collectives)
        self._n_started_items = 0

    def start(self, spans: Sequence[BufferSpan], stream: int | None) -> None:
        """Start the collective on a chunk of the gradient, which overlaps the stream's next work."""
        self._communicator.enqueue_on_side_stream(spans, self._op, stream, self._collective)
        self._n_started_items += sum(span.n_items for span in spans)

    def finish(self, spans: Sequence[BufferSpan], valid_flag_address: int, stream: int | None) -> None:
        """Enqueue the collective on the rest of the gradient.  Raise ValueError if the ranks compared another shape."""
        if self._is_repeated:
            self._rank.record_effect()  # an earlier step may be valid even if a later one fails
        n_items, self._n_started_items = self._n_started_items + sum(span.n_items for span in spans), 0
        if self._collective == "all_gather":
            n_items *= self._rank.size
        if n_items != (n_expected := math.prod(self._shape)):
            self.join_side_stream(stream)
            raise ValueError(f"collective: expected {n_expected} items, as before the launch, got {n_items}")
        self._communicator.enqueue_on_xla_stream(spans, self._op, valid_flag_address, stream, self._collective)
        self._collective = next(self._collectives)

    def join_side_stream(self, stream: int | None) -> None:
        self._communicator.join_side_stream(stream)
