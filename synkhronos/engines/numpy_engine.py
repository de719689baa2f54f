"""The engine for functions of NumPy arrays, which return when they have computed.

If SYNKHRONOS_DEVICE selects a device, each call copies inputs and shared variables from that device to host memory, and
shared variables back.
"""

from __future__ import annotations

from typing import Any

from synkhronos.devices import NUMPY, Device, read_environment_device
from synkhronos.engines.engine import Engine, Runner
from synkhronos.graph_libraries import GraphLibrary
from synkhronos.variable_types import CompiledFunction, Mode


class NumpyEngine(Engine):
    """Launches functions that no other engine can run."""

    def can_launch(self, library: GraphLibrary, mode: Mode) -> bool:
        """Return True: this engine is tried last."""
        return True

    @property
    def device(self) -> Device:
        """`NUMPY`, or the device that SYNKHRONOS_DEVICE names."""
        return read_environment_device() or NUMPY

    def make_runner(
        self, library: GraphLibrary, function: CompiledFunction, n_inputs: int, allows_opaque_outputs: bool
    ) -> Runner:
        """Wrap a compiled function, with copies to host memory and back for another device."""
        device = self.device
        if device is NUMPY:
            return Runner(function)
        shareds = [shared for shared in function.get_shared() if library.is_array(shared)]

        def run(*inputs: Any) -> Any:
            try:
                for shared in shareds:
                    library.store_value(shared, *device.to_numpy_many([library.borrow_value(shared)]))
                return function(*device.to_numpy_many(inputs))
            finally:
                for shared in shareds:
                    library.store_value(shared, device.as_array(library.borrow_value(shared)))

        return Runner(run)


ENGINE = NumpyEngine()
