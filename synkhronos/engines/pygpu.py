"""Theano's functions on GPUs: they compute on libgpuarray's stream, and may return before they have computed.

`Pygpu`
    The engine.
"""

from __future__ import annotations

from typing import Any

from synkhronos.devices import PYGPU, Device
from synkhronos.engines.base import Engine, Runner
from synkhronos.graphs import GraphLibrary


class Pygpu(Engine):
    """Runs functions that wait for their inputs to arrive on the GPU."""

    def runs(self, library: GraphLibrary, mode: Any) -> bool:
        """Theano's, where this process has opened a GPU."""
        return library.name == "theano" and PYGPU.on_gpu

    @property
    def device(self) -> Device:
        """GpuArrays."""
        return PYGPU

    def runner(self, library: GraphLibrary, function: Any, n_inputs: int, fetched: bool) -> Runner:
        """Return a function that waits for its inputs, and says when they may be overwritten."""

        def run(*inputs: Any) -> Any:
            PYGPU.launching()
            results = function(*inputs)
            PYGPU.launched(results)
            return results

        return Runner(run)


ENGINE = Pygpu()
