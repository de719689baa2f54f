"""Samplers that XLA compiles return the draws of one process on all ranks."""

import importlib.util
import subprocess
import sys

import pytest
from library import HOSTS
from paths import SUPPORT

pytestmark = [
    pytest.mark.skipif(bool(HOSTS), reason="the ranks of samplers are on one host"),
    pytest.mark.timeout(600),  # on a busy machine XLA compiles a sampler for minutes
]


def run_script(*arguments, needs=()):
    for package in ("pymc", *needs):
        if not importlib.util.find_spec(package):  # an import of NumPyro starts XLA
            pytest.skip(f"{package} is not installed")
    run = subprocess.run([sys.executable, SUPPORT / "sampler_script.py", *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(("sampler", "methods"), [("numpyro", ("vectorized", "parallel")), ("blackjax", ("parallel",))])
def test_xla_sampler_draws_equal_one_process(sampler, methods):
    run_script(sampler, *methods, needs=[sampler])


def test_logp_in_other_jax_functions_calls_the_ranks():
    run_script("functions", needs=["jax"])
