"""Functions of NumPy arrays, which return when they have computed.

`Host`
    The engine.  With a device of one's own (SYNKHRONOS_DEVICE), what the library computes on the host comes from there
    and goes there.
"""

from __future__ import annotations

from typing import Any

from synkhronos.devices import HOST, Device, device_in_environment
from synkhronos.engines.base import Engine, Runner
from synkhronos.graphs import GraphLibrary


class Host(Engine):
    """Runs whatever no other engine does."""

    def runs(self, library: GraphLibrary, mode: Any) -> bool:
        """Whatever is left."""
        return True

    @property
    def device(self) -> Device:
        """Host memory, or what the environment names."""
        return device_in_environment() or HOST

    def runner(self, library: GraphLibrary, function: Any, n_inputs: int, fetched: bool) -> Runner:
        """Return the function itself, or one that brings a device's arrays to the host and back."""
        device = self.device
        if device is HOST:
            return Runner(function)
        shareds = [shared for shared in function.get_shared() if library.is_array(shared)]

        def run(*inputs: Any) -> Any:
            try:
                for shared in shareds:
                    library.put(shared, *device.fetch([library.get(shared)]))
                return function(*device.fetch(inputs))
            finally:
                for shared in shareds:
                    library.put(shared, device.array(library.get(shared)))

        return Runner(run)


ENGINE = Host()
