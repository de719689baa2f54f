"""The engine for Theano's functions on GPUs, which launch on libgpuarray's stream and return early."""

from __future__ import annotations

from typing import Any

from synkhronos.devices import PYGPU, Device
from synkhronos.engines.engine import Engine, Runner
from synkhronos.graph_libraries import GraphLibrary
from synkhronos.variable_types import CompiledFunction, Mode


class PygpuEngine(Engine):
    """Launches functions of GpuArrays, ordered after the copies of their inputs."""

    def can_launch(self, library: GraphLibrary, mode: Mode) -> bool:
        """Whether the library is Theano, and this process computes on a GPU."""
        return library.name == "theano" and PYGPU.is_on_gpu

    @property
    def device(self) -> Device:
        return PYGPU

    def make_runner(
        self, library: GraphLibrary, function: CompiledFunction, n_inputs: int, allows_opaque_outputs: bool
    ) -> Runner:
        """Wrap a function so that it waits for its inputs, and later copies wait until it has read them."""

        def run(*inputs: Any) -> Any:
            PYGPU.order_launch_after_copies()
            results = function(*inputs)
            PYGPU.finish_launch(results)
            return results

        return Runner(run)


ENGINE = PygpuEngine()
