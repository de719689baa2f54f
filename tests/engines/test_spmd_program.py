"""Programs that XLA compiles and all ranks run: their all-reduces, errors and interrupts."""

import numpy as np
import pytest
from library import HOSTS, XLA

import synkhronos as synk
from synkhronos import ranks

pytestmark = [
    pytest.mark.skipif(not XLA, reason="starts XLA"),
    pytest.mark.skipif(bool(HOSTS), reason="these programs run on one host"),
]


def run_command(command):
    session = ranks.get_session()
    with session.call_lock:
        session.wait_until_idle()
        return session.run(command)


def compute_expected_product(size, steps):
    """Return the last of the products with the matrix of `Multiply`, and their sum."""
    matrix = (np.arange(size)[:, None] + np.arange(size) + 1.0) / size**2
    vectors = [np.linalg.matrix_power(matrix, step + 1) @ np.ones(size) for step in range(steps)]
    return np.stack([vectors[-1], sum(vectors)])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_spmd_program_all_reduces_in_a_loop(fork, n):
    from xla_programs import Multiply

    fork(n)
    np.testing.assert_allclose(run_command(Multiply(30)), compute_expected_product(n, 30), rtol=1e-6)
    vectors = run_command(Multiply(30, vectorized=True))
    np.testing.assert_allclose(
        vectors, [compute_expected_product(n, 30), 2 * compute_expected_product(n, 30)], rtol=1e-6
    )


def test_spmd_program_takes_jax_settings_of_the_master(fork):
    import jax
    from xla_programs import Multiply

    fork(2)
    before = jax.config.jax_enable_x64
    try:
        for enabled in (not before, before):
            jax.config.update("jax_enable_x64", enabled)  # on rank 0 only
            assert run_command(Multiply(30)).dtype == (np.float64 if enabled else np.float32)
    finally:
        jax.config.update("jax_enable_x64", before)


def test_exit_of_a_rank_ends_an_spmd_program(fork):
    from xla_programs import Multiply

    fork(2, timeout=300)  # separate ranks
    with pytest.raises(synk.WorkerError, match="was killed"):
        run_command(Multiply(10**9, event="kill"))


@pytest.mark.parametrize(
    ("event", "victim", "error", "message"),
    [
        ("interrupt", 0, KeyboardInterrupt, ""),
        ("raise_error", 1, synk.WorkerError, "ValueError: no more memory"),
        *(
            (event, victim, (RuntimeError, synk.WorkerError), "diverged")
            for event in ("overwrite_with_number", "overwrite_with_nan")
            for victim in (0, 1)
        ),
    ],
)
def test_failed_spmd_program_leaves_ranks_usable(fork, event, victim, error, message):
    from xla_programs import Multiply, SumRankNumbers

    fork(2)
    with pytest.raises(error, match=message):
        run_command(Multiply(30 if message == "diverged" else 10**9, event=event, victim=victim))
    assert run_command(SumRankNumbers()) == 1


def test_rank_program_compiles_without_autotuning(monkeypatch):
    import jax
    from jax._src import compiler

    from synkhronos.engines.xla.spmd_program import _compile_without_autotuning

    original, overrides = compiler.get_compile_options, []

    def get_compile_options(*args, env_options_overrides=None, **kwargs):
        overrides.append(env_options_overrides)
        return original(*args, env_options_overrides=env_options_overrides, **kwargs)

    monkeypatch.setattr(compiler, "get_compile_options", get_compile_options)
    with _compile_without_autotuning():
        assert float(jax.jit(lambda x: x + 1)(2.0)) == 3
    assert overrides and all(options["xla_gpu_autotune_level"] == 0 for options in overrides)
    overrides.clear()
    assert float(jax.jit(lambda x: x + 2)(2.0)) == 4
    assert not any(overrides)
