"""A program that XLA compiles and all ranks run, for test_spmd_program.py; workers import it."""

import ctypes
import os
import signal
from dataclasses import dataclass, field
from unittest import mock

import numpy as np

from synkhronos.devices import get_rank_device
from synkhronos.devices.jax import xla_reducer
from synkhronos.engines.xla.spmd_program import SpmdProgram, get_jax_settings
from synkhronos.ranks import Command

#: Number of the all-reduce at which an event happens.
EVENT_SUM = 20


def overwrite(span, byte, stream):
    """Set all bytes of a reduced array."""
    n_bytes = span.n_items * np.dtype(span.dtype).itemsize
    if stream is None:
        ctypes.memset(span.target, byte, n_bytes)
    else:
        from cuda.bindings import driver

        (error,) = driver.cuMemsetD8Async(span.target, byte, n_bytes, stream)
        assert not error


def kill(spans, stream):
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt(spans, stream):
    """Send SIGINT to this process."""
    os.kill(os.getpid(), signal.SIGINT)


def raise_error(spans, stream):
    """Raise an error."""
    raise ValueError("no more memory")


def overwrite_with_nan(spans, stream):
    """Overwrite the sum with NaN, which ends the loop."""
    overwrite(spans[0], 0xFF, stream)  # NaN, at which the loop ends


def overwrite_with_number(spans, stream):
    """Overwrite the sum with another number."""
    overwrite(spans[0], 0x3F, stream)


@dataclass(frozen=True, slots=True)
class Multiply(Command):
    """Command that multiplies a matrix, one row per rank, by a vector `steps` times; returns the last vector and the sum.

    Attributes
    ----------
    steps : int
    vectorized : bool
        Whether two vectors are multiplied at the same time.
    event : str
        Name of a function of this module; "" for none.
    victim : int
        Rank that calls it.
    settings : dict
        The master's settings of JAX.
    """

    steps: int
    vectorized: bool = False
    event: str = ""
    victim: int = 1
    settings: dict = field(default_factory=get_jax_settings)

    def run(self, rank):
        import jax
        import jax.numpy as jnp

        program = SpmdProgram(rank)
        row = (np.arange(rank.size) + rank.number + 1.0) / rank.size**2
        is_own = np.arange(rank.size) == rank.number

        def multiply(vector):
            def is_short(state):
                return (state[0] < self.steps) & ~jnp.isnan(state[1][0])

            def advance(state):
                count, vector, total = state
                vector = program.all_reduce(jnp.where(is_own, (row * vector).sum(), 0.0))
                return count + 1, vector, total + vector

            return jnp.stack(jax.lax.while_loop(is_short, advance, (0, vector, 0 * vector))[1:])

        def compute():
            if self.vectorized:
                start = jnp.stack([jnp.ones(rank.size), 2 * jnp.ones(rank.size)])
                return [np.asarray(jax.jit(jax.vmap(multiply))(start))]
            return [np.asarray(jax.jit(multiply)(jnp.ones(rank.size)))]

        with self._prepare_event(rank):
            return program.run(compute, self.settings)[0]

    def _prepare_event(self, rank):
        kind = xla_reducer.GpuReducer if get_rank_device(rank).needs_gpu else xla_reducer.SharedMemoryReducer

        def finish(reducer, spans, is_valid, stream, original=kind.finish):
            original(reducer, spans, is_valid, stream)
            if self.event and reducer.n_sums == EVENT_SUM and rank.number == self.victim:
                globals()[self.event](spans, stream)

        return mock.patch.object(kind, "finish", finish)


@dataclass(frozen=True, slots=True)
class SumRankNumbers(Command):
    """Command that sums the rank numbers without a program."""

    def run(self, rank):
        return sum(rank.all_gather(rank.number))
