"""Samplers that XLA compiles return the draws of one process on all ranks."""

import importlib.util
import multiprocessing
import warnings
from types import SimpleNamespace

import pytest
from library import HOSTS, fork_ranks
from sampler_checks import compare_functions, compare_samplers

import synkhronos as synk
from synkhronos.extensions.pymc import xla_samplers

pytestmark = [
    pytest.mark.skipif(bool(HOSTS), reason="the ranks of samplers are on one host"),
    pytest.mark.timeout(600),  # on a busy machine XLA compiles a sampler for minutes
]


def run_in_child(check, *arguments, needs):
    """Run a check on two ranks of a child process, as it starts XLA; a fork has PyMC's imports already."""
    for package in ("pymc", needs):
        if not importlib.util.find_spec(package):  # an import of NumPyro starts XLA
            pytest.skip(f"{package} is not installed")

    def run():
        warnings.simplefilter("ignore")  # of ArviZ, PyMC and JAX
        fork_ranks(2)
        try:
            check(*arguments)
        finally:
            synk.close()

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join()
    assert child.exitcode == 0


@pytest.mark.parametrize(("sampler", "method"), [("numpyro", "vectorized"), ("blackjax", "parallel")])
def test_xla_sampler_draws_equal_one_process(sampler, method):
    run_in_child(compare_samplers, sampler, method, needs=sampler)


def test_parallel_chains_of_numpyro_are_sampled_one_by_one(monkeypatch):
    """On several devices of a process their all-reduces would have no order."""
    pymc_jax = SimpleNamespace(
        get_jaxified_graph=lambda inputs, outputs: None, _sample_numpyro_nuts=lambda **arguments: (arguments, {}, None)
    )
    monkeypatch.setattr(xla_samplers.importlib, "import_module", lambda name: pymc_jax)
    monkeypatch.setattr(xla_samplers, "register_lowerings", lambda: None)
    call = xla_samplers.SamplerCall("numpyro", [], None, {"chain_method": "parallel", "chains": 2}, {})
    arguments, _ = xla_samplers._sample_on_this_rank(call)
    assert arguments["chain_method"] == "sequential" and arguments["chains"] == 2


def test_logp_in_other_jax_functions_calls_the_ranks():
    run_in_child(compare_functions, needs="jax")
