"""Samplers that XLA compiles return the draws of one process on all ranks."""

import importlib.util
import multiprocessing
import warnings

import pytest
from library import HOSTS, fork_ranks
from sampler_checks import compare_functions, compare_samplers

import synkhronos as synk

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


@pytest.mark.parametrize(("sampler", "methods"), [("numpyro", ("vectorized", "parallel")), ("blackjax", ("parallel",))])
def test_xla_sampler_draws_equal_one_process(sampler, methods):
    run_in_child(compare_samplers, sampler, *methods, needs=sampler)


def test_logp_in_other_jax_functions_calls_the_ranks():
    run_in_child(compare_functions, needs="jax")
