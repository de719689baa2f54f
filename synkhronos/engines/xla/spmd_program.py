"""A program of another library, compiled by XLA, that all ranks run at the same time.

All ranks run the same Python function with the same arguments.  Its computations in JAX may call
`SpmdProgram.all_reduce` any number of times, also in loops.  All ranks must get bitwise equal results: otherwise their
loops could differ, and a rank would wait for an all-reduce that others don't make.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from synkhronos.devices import JAX, NUMPY, get_rank_device
from synkhronos.devices.jax.ffi_collectives import FfiCollectives
from synkhronos.devices.jax.xla_reducer import (
    DIVERGED_MESSAGE,
    GpuReducer,
    InterruptDetector,
    SharedMemoryReducer,
    XlaReducer,
)
from synkhronos.lowering.jax_function import JaxFunction
from synkhronos.patching import replace_attribute, set_environment
from synkhronos.ranks import Rank
from synkhronos.ranks.interrupts import defer_signals
from synkhronos.variable_types import Array

#: JAX's settings that change numbers.  All ranks take them from the master.
_JAX_FLAGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable")


class SpmdProgram:
    """A program that all ranks run at the same time.  ``current`` is the one in this process.

    If it ``is_vectorized``, it applies `jax.vmap` to loops with sums.
    """

    current: SpmdProgram | None = None

    def __init__(self, rank: Rank, is_vectorized: bool = True):
        self.rank = rank
        self._is_vectorized = is_vectorized
        self._ffi_collectives = FfiCollectives(aborts_on_error=True)

    def all_reduce(self, vector: Array) -> Array:
        """Return the sum of the ranks' vectors; traced by JAX."""
        return vector if self.rank.size == 1 else self._ffi_collectives.trace_all_reduce(vector)

    def run(self, function: Callable[[], Sequence[np.ndarray]], settings: dict[str, Any]) -> Sequence[np.ndarray]:
        """Run a function on every rank, and return its sequence of arrays, which is equal on all ranks.

        ``settings`` are JAX's in the master, as `get_jax_settings` returns them.  RuntimeError is raised if the results
        differ, and NotImplementedError if this device can't all-reduce within a program.
        """
        rank, detector = self.rank, InterruptDetector()
        # No signal handler may raise within XLA's callbacks.  SIGINT ends the launch at the next all-reduce.
        with (
            defer_signals(),
            detector.watch(),
            set_environment(NPROC=str(rank.thread_limit.n_threads)),  # XLA's threads, if it is started here
            _use_jax_settings(settings),
            contextlib.nullcontext()
            if rank.size == 1 or get_rank_device(rank) is NUMPY
            else _compile_without_autotuning(),
            contextlib.nullcontext() if rank.is_master else _discard_output(),
        ):
            reducer = _make_reducer(rank, detector)
            _set_jax_settings(settings)  # again, as a rank that uses its GPU for the first time has changed them
            SpmdProgram.current = self
            try:
                with self._ffi_collectives.use_launch_collectives(reducer, n_collectives=None):
                    results = function()
            finally:
                SpmdProgram.current = None
            reducer.wait_until_ended()
        digest = hashlib.blake2b(reducer.n_sums.to_bytes(8, "little"), digest_size=16)
        for array in results:
            digest.update(np.ascontiguousarray(array).tobytes())
        if not rank.compare_digests(digest.digest()):
            raise RuntimeError(DIVERGED_MESSAGE)
        return results

    def compile_for_local_rows(
        self, compile_function: Callable[..., Any], inputs: Sequence[Any], output: Any, rows: Sequence[np.ndarray]
    ) -> Callable[..., Any]:
        """Return a function of JAX arrays that computes a variable on this rank's rows.

        ``compile_function`` compiles a graph, like ``pytensor.function``.  ``inputs`` are the parameters of the
        returned function, then a variable for each array in ``rows``.
        """
        import jax
        import jax.numpy as jnp

        if not rows[0].shape[0]:
            return lambda *params: jnp.zeros((), output.type.dtype)
        function = compile_function(inputs, output, mode="JAX", on_unused_input="ignore")
        lowered = JaxFunction(function, len(inputs))
        if lowered.length_graph is not None:
            raise NotImplementedError(
                "a sum over rows in an XLA program can't have arrays whose lengths depend on values of integers"
            )
        arrays = [jnp.asarray(array) for array in rows]
        if not self._is_vectorized:
            # References become arguments of the programs that read them.  Arrays would become constants: each program
            # would have copies, and take longer to compile.  But jax.vmap of a loop fails with references.
            arrays = [jax.new_ref(array) for array in arrays]

        def compute(*params: Any) -> Any:
            (value,) = lowered.run(*params, *(array[...] for array in arrays))
            return value

        return compute


def get_jax_settings() -> dict[str, Any]:
    """Return this process's settings of JAX that change numbers."""
    import jax

    return {name: getattr(jax.config, name) for name in _JAX_FLAGS if hasattr(jax.config, name)}


def map_sequentially(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that applies ``function`` to each item along the leading axis of its arguments, in order.

    It replaces `jax.pmap`, whose all-reduces would have no order.
    """
    import jax

    compiled = jax.jit(function)

    def run(*arguments: Any) -> Any:
        size = jax.tree.leaves(arguments)[0].shape[0]
        results = [compiled(*jax.tree.map(lambda a, i=i: a[i], arguments)) for i in range(size)]
        return jax.tree.map(lambda *arrays: np.stack(arrays), *results)

    return run


def _make_reducer(rank: Rank, detector: InterruptDetector) -> XlaReducer:
    """Return the reducer of a program, for the device with which the rank computes."""
    if get_rank_device(rank) is NUMPY:
        if rank.spans_hosts:
            raise NotImplementedError(
                "XLA's programs run on CPU ranks of one host, and these are on several: call fork() without hosts"
            )
        return SharedMemoryReducer(rank, detector)
    if not JAX.can_reduce_in_launch(np.dtype(np.float64)):
        raise NotImplementedError("this JAX does not call foreign functions in the thread that launches")
    communicator = JAX.get_communicator(rank)
    communicator.connect(rank.all_gather(communicator.generation))
    return GpuReducer(rank, detector, communicator)


@contextlib.contextmanager
def _use_jax_settings(settings: dict[str, Any]) -> Iterator[None]:
    """Set JAX's settings within the ``with`` block."""
    import jax

    old_values = {name: getattr(jax.config, name) for name in settings}
    _set_jax_settings(settings)
    try:
        yield
    finally:
        _set_jax_settings(old_values)


def _set_jax_settings(settings: dict[str, Any]) -> None:
    """Set the given settings of JAX."""
    import jax

    for name, value in settings.items():
        jax.config.update(name, value)


@contextlib.contextmanager
def _compile_without_autotuning() -> Iterator[None]:
    """Compile for GPUs without XLA's autotuning within the ``with`` block.

    Autotuning measures kernels and takes the fastest.  Each rank could take another one, whose sums are rounded in
    another way.  JAX has no public option for programs that another library compiles.
    """
    from jax._src import compiler

    original = compiler.get_compile_options

    def get_compile_options(*args: Any, env_options_overrides: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        overrides = {**(env_options_overrides or {}), "xla_gpu_autotune_level": 0}
        return original(*args, env_options_overrides=overrides, **kwargs)

    with replace_attribute(compiler, "get_compile_options", get_compile_options):
        yield


@contextlib.contextmanager
def _discard_output() -> Iterator[None]:
    """Discard output within the ``with`` block: workers run the program with the master's progress bars."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
