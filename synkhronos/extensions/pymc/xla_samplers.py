"""Samplers that XLA compiles, on every rank: the NUTS of NumPyro and BlackJAX, as PyMC calls them.

PyMC's function that runs a sampler is wrapped.  For a data-parallel model the wrapper sends the log-density's graph to
all ranks, and each rank runs the same sampler from the same seed.  No rank waits for Python of another::

    pm.sample(nuts_sampler="numpyro")
      initial points                               in the master
      _sample_numpyro_nuts    ── RunSampler ──▶    on every rank: NUTS; each evaluation of the log-density sums the
                                                   rank's own rows and makes an all-reduce (`xla_sums`,
                                                   `engines.xla.spmd_program`)
      draws of the master's rank
      transformations, ArviZ                       in the master

PyMC's module for JAX is not imported here: it imports JAX.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from synkhronos import ranks
from synkhronos.engines.xla.spmd_program import SpmdProgram, get_jax_settings, map_sequentially
from synkhronos.extensions.pymc.xla_sums import register_lowerings, replace_sums
from synkhronos.patching import replace_attribute
from synkhronos.ranks import Command, Rank
from synkhronos.replication.replicator import Replicator

_PYMC_JAX_MODULE = "pymc.sampling.jax"
#: Samplers, and the sign of the log-density in the function that PyMC passes to each.
_LOGP_SIGNS = {"numpyro": -1, "blackjax": 1}
_key_numbers = itertools.count()


def wrap_samplers() -> None:
    """Wrap PyMC's functions that run samplers in JAX, if PyMC's module for them is imported."""
    module = sys.modules.get(_PYMC_JAX_MODULE)
    if module is None or hasattr(module, "__synkhronos__"):
        return
    register_lowerings()
    for name in _LOGP_SIGNS:
        original = getattr(module, f"_sample_{name}_nuts")
        setattr(module, f"_sample_{name}_nuts", _wrap_sampler(name, original))
    module.__dict__["__synkhronos__"] = True


def _wrap_sampler(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sample(**kwargs: Any) -> Any:
        if not getattr(kwargs["model"], "split_RVs", None):
            return original(**kwargs)
        return _sample_on_ranks(name, kwargs)

    return sample


@dataclass
class SamplerCall:
    """A sampler and its arguments, as they are sent to the ranks."""

    #: "numpyro" or "blackjax".
    name: str
    #: The model's value variables.
    inputs: list[Any]
    #: The log-density times 1 or -1, as the sampler takes it; its sums over rows are `SpmdSums`.
    signed_logp: Any
    #: Further arguments of PyMC's function.
    arguments: dict[str, Any]
    jax_settings: dict[str, Any]


def _sample_on_ranks(name: str, arguments: dict[str, Any]) -> tuple[Any, Any, ModuleType]:
    """Run PyMC's function for a sampler on all ranks.  Return the master's draws and statistics, and the library."""
    model = arguments["model"]
    session = ranks.get_session()
    (logp,) = sys.modules[_PYMC_JAX_MODULE]._replace_shared_variables([model.logp()])
    signed_logp = replace_sums(_LOGP_SIGNS[name] * logp, session)
    other_arguments = {key: value for key, value in arguments.items() if key not in ("model", "logp_fn")}
    sampler_call = SamplerCall(name, list(model.value_vars), signed_logp, other_arguments, get_jax_settings())
    key = "sampler", next(_key_numbers)
    with session.call_lock:
        session.wait_until_idle()
        try:
            session.rank.add_object(key, sampler_call)
            Replicator.get_or_create(session).send([(key, sampler_call)], [signed_logp])
            draws, stats = session.run(RunSampler(key))
        finally:
            session.memory.release("object", key)
    return draws, stats, importlib.import_module(name)


@dataclass(frozen=True, slots=True)
class RunSampler(Command):
    """Run a sampler on every rank."""

    #: Key of the `SamplerCall` among the ranks' objects.
    key: tuple[str, int]

    def run(self, rank: Rank) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        """Return draws and statistics."""
        sampler_call: SamplerCall = rank.get_object(self.key)
        names: list[str] = []

        def sample() -> list[np.ndarray]:
            draws, stats = _sample_on_this_rank(sampler_call)
            names[:] = stats
            return [np.asarray(array) for array in (*draws, *stats.values())]

        is_vectorized = sampler_call.arguments["chain_method"] == "vectorized"
        arrays = list(SpmdProgram(rank, is_vectorized).run(sample, sampler_call.jax_settings))
        count = len(sampler_call.inputs)
        return arrays[:count], dict(zip(names, arrays[count:], strict=True))


def _sample_on_this_rank(sampler_call: SamplerCall) -> tuple[Any, dict[str, Any]]:
    """Run PyMC's function on this rank.  Return draws and statistics."""
    module = importlib.import_module(_PYMC_JAX_MODULE)
    register_lowerings()
    signed_logp = module.get_jaxified_graph(inputs=sampler_call.inputs, outputs=[sampler_call.signed_logp])
    arguments = dict(sampler_call.arguments)
    changes: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if arguments["chain_method"] == "parallel":
        # PyMC would compute chains on several devices of a process, whose all-reduces would have no order.
        if sampler_call.name == "numpyro":
            arguments["chain_method"] = "sequential"
        else:
            changes = replace_attribute(module.jax, "pmap", map_sequentially)
    sample = getattr(module, f"_sample_{sampler_call.name}_nuts")
    sample = getattr(sample, "__wrapped__", sample)
    with changes:
        draws, stats, _ = sample(model=None, logp_fn=lambda x: signed_logp(*x)[0], **arguments)
    return draws, stats
