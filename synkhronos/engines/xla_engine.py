"""The engine for PyTensor's functions in JAX mode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from synkhronos.devices import JAX, Device
from synkhronos.devices.jax.scalar_log import LOG_CAPACITY
from synkhronos.engines.engine import GradientExchange, Runner
from synkhronos.engines.lazy import LazyEngine
from synkhronos.engines.xla.executable import Executable
from synkhronos.engines.xla.fused_runner import FusedRunner
from synkhronos.engines.xla.traced_exchange import ExchangeSpec
from synkhronos.graph_libraries import GraphLibrary
from synkhronos.graph_libraries.library import get_storage
from synkhronos.lowering.jax_function import JaxFunction
from synkhronos.ranks import Rank
from synkhronos.variable_types import CompiledFunction, Mode


class XlaEngine(LazyEngine):
    """Launches PyTensor's functions in JAX mode."""

    requires_static_shapes = True

    def can_launch(self, library: GraphLibrary, mode: Mode) -> bool:
        return library.is_xla_mode(mode)

    @property
    def device(self) -> Device:
        return JAX

    def make_runner(
        self, library: GraphLibrary, function: CompiledFunction, n_inputs: int, allows_opaque_outputs: bool
    ) -> Runner:
        """Make an executable, which returns scalars as log entries if outputs may be any objects."""
        return Executable([JaxFunction(function, n_inputs)], logs_scalars=allows_opaque_outputs)

    def can_fuse_steps(self, rank: Rank) -> bool:
        return rank.size == 1 or JAX.is_on_gpu

    def fuse_step(
        self, rank: Rank, gradient: Runner, exchange: GradientExchange, updates: Sequence[Runner], n_repeats: int
    ) -> Runner | None:
        """Fuse executables and NCCL's collectives into one launch.  Return None if that is impossible on this rank."""
        executables = [runner for runner in updates if isinstance(runner, Executable)]
        assert isinstance(gradient, Executable) and len(executables) == len(updates)
        if rank.size == 1:
            return gradient.fuse(others=executables, n_repeats=n_repeats)
        shared = exchange.get_reduced_variable(rank)
        storage = get_storage(shared)
        value = storage[0]
        # An unfused step moves and casts a value that the user has set.
        if not JAX.owns(value) or value.dtype != shared.type.dtype or not JAX.can_reduce_in_launch(value.dtype):
            return None
        # With a wire dtype, the program itself divides by the number of ranks.
        op = "sum" if exchange.wire_dtype else exchange.op
        shards = exchange.get_shards(rank)
        spec = ExchangeSpec(
            storage,
            wire_dtype=exchange.wire_dtype,
            n_ranks=rank.size,
            n_tail_items=exchange.n_tail_items,
            # The handlers in C++ only all-reduce; a sharded step also reduce-scatters and all-gathers.
            nccl_call_mode=JAX.nccl_call_mode if shards is None else "python",
            op=op,
            spans_hosts=rank.spans_hosts,
            shards=shards,
        )
        fused = gradient.fuse(spec, executables, n_repeats=n_repeats)
        return None if fused is None else FusedRunner(rank, fused, exchange)

    def get_max_repeats(self, dtype: np.dtype | None = None) -> int:
        """Return the log's capacity, or 1 on the CPU, where XLA computes convolutions in loops with a single thread."""
        can_repeat = JAX.is_on_gpu if dtype is None else JAX.can_reduce_in_launch(dtype)
        return LOG_CAPACITY if can_repeat else 1


ENGINE = XlaEngine()
