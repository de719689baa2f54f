"""Counterpart of a function on one rank, in a program that `synkhronos.run` runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos.devices import NUMPY, find_device
from synkhronos.engines import Runner
from synkhronos.functions.computation import DEFAULT_VARIANT, Computation
from synkhronos.functions.rank_mean_context import make_own_pace_error
from synkhronos.programs.local_rows import LocalRows
from synkhronos.ranks import Rank
from synkhronos.ranks.program_peers import ProgramPeers


class LocalFunction:
    """A compiled function on one rank: the counterpart of a `synkhronos.Function` in a program.

    It updates this rank's copies of shared variables.  Nothing is scattered or reduced.
    """

    def __init__(self, rank: Rank, peers: ProgramPeers, computation: Computation):
        self._rank, self._peers, self._computation = rank, peers, computation

    def __repr__(self) -> str:
        return f"<synkhronos.LocalFunction {self._computation.name}>"

    def __call__(self, *inputs: Any) -> Any:
        """Run on this rank and return the outputs.

        Parameters
        ----------
        *inputs : LocalRows or array_like
            Values in the order of ``inputs`` and then ``bcast_inputs``.

        Returns
        -------
        ndarray, or list of ndarray
            The output if there is exactly one, else a list.
        """
        outputs = self.wait_for_outputs(self.launch(*inputs))
        return outputs[0] if len(outputs) == 1 else outputs

    def launch(self, *inputs: Any) -> list[Any]:
        """Launch the function on this rank and return pending outputs; `wait_for_outputs` waits for them."""
        self._peers.report_progress()
        return self._launch(self._get_or_compile_runner(), inputs)

    def launch_many(self, n_repeats: int, *inputs: Any) -> list[Any] | None:
        """Run the function ``n_repeats`` times in one launch, each time on another of equal blocks of the inputs' rows.

        Return pending outputs for `wait_for_outputs`: the first output in all runs, then the second, and so on.  Return
        None if the function is not compiled by XLA, or if an output is not a scalar.
        """
        self._peers.report_progress()
        repeated = self._get_or_compile_runner().get_repeated(n_repeats)
        return None if repeated is None else self._launch(repeated, inputs)

    @property
    def max_repeats(self) -> int:
        """Maximal ``n_repeats`` of `launch_many`."""
        return self._computation.engine.get_max_repeats()

    def wait_for_outputs(self, pending_outputs: Sequence[Any]) -> list[np.ndarray]:
        """Wait for outputs of `launch` or `launch_many`, and return them as NumPy arrays."""
        outputs = self._computation.engine.fetch_outputs(pending_outputs)
        return [find_device(output).to_numpy(output) for output in outputs]

    def _get_or_compile_runner(self) -> Runner:
        """Return the function's runner; raise RuntimeError if the graph has means over ranks."""
        compiled = self._computation.get_or_compile(DEFAULT_VARIANT)
        if compiled.n_rank_means:
            # Raised before the launch: after an error in a callback, JAX on a GPU fails in all later launches.
            raise make_own_pace_error()
        return compiled.runner

    def _launch(self, runner: Runner, inputs: Sequence[Any]) -> list[Any]:
        computation = self._computation
        if len(inputs) != len(computation.inputs):
            raise TypeError(f"{computation.name} takes {len(computation.inputs)} inputs, got {len(inputs)}")
        devices, values = computation.choose_input_devices(runner), []
        for position, (spec, device, value) in enumerate(zip(computation.inputs, devices, inputs, strict=True)):
            variable_type = spec.variable.type
            if isinstance(value, LocalRows) and (value.dtype, value.ndim) == (variable_type.dtype, variable_type.ndim):
                loaded = value.stage_input(device, computation.buffers[position], spec.mutable)
            else:
                value = np.asarray(value) if isinstance(value, LocalRows) else value
                loaded = computation.library.filter(variable_type, value, spec.strict, spec.allow_downcast)
                loaded = loaded if device is NUMPY else device.from_numpy(loaded)
            values.append(loaded)
        outputs = runner(*values)
        for device in set(devices):
            device.transfers.wait_for_copies()  # the program may write into the rows now
        return outputs
