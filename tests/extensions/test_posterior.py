"""Functions of posterior draws equal PyMC's own functions in one process."""

import os
import signal
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ArviZ announces its next version
    pm = pytest.importorskip("pymc", reason="the extra `pymc` is not installed")
import xarray  # noqa: E402
from library import INTERPRETED, XLA  # noqa: E402
from pytensor.link.c.basic import CLinker  # noqa: E402
from pytensor.link.jax.linker import JAXLinker  # noqa: E402

import synkhronos as synk  # noqa: E402
from synkhronos.extensions.chains import run_forked  # noqa: E402
from synkhronos.extensions.pymc import (  # noqa: E402
    compute_log_likelihood,
    data_parallel,
    posterior,
    sample_posterior_predictive,
)
from synkhronos.lowering.linker import StaticLengthLinker  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*in the Zarr V3 spec", "ignore:.*Zarr format 3 specification"),
    pytest.mark.skipif(XLA, reason="processes are forked beside JAX's threads"),
]
N, DRAWS = 30, 40
X = np.random.default_rng(3).normal(size=(N, 3))


def build_model():
    with pm.Model(coords={"row": [f"row {i}" for i in range(N)]}) as model:
        x = pm.Data("x", X, dims=("row", "column"))
        mu = pm.Deterministic("mu", x @ pm.Normal("b", shape=3), dims="row")
        pm.Normal("y", mu, pm.HalfNormal("s"), observed=X[:, 0], dims="row", shape=mu.shape)
        pm.Poisson("z", pm.math.exp(mu[0]), observed=np.arange(50) % 4)
    return model


@pytest.fixture(scope="module")
def sampled():
    """Sample a model in one process; return the model and the draws."""
    with build_model() as model:
        steps = pm.Metropolis(compile_kwargs={"mode": INTERPRETED})
        return model, pm.sample(
            DRAWS, tune=0, step=steps, chains=2, cores=1, random_seed=1, progressbar=False,
            compute_convergence_checks=False,
        )  # fmt: skip


@pytest.fixture
def model(sampled):
    """Return the sampled model."""
    return sampled[0]


@pytest.fixture
def drawn(sampled):
    """Return a copy of the draws, which a test may extend."""
    return sampled[1].copy()


def make_settings(**kwargs):
    return {"progressbar": False, "compile_kwargs": {"mode": INTERPRETED}, **kwargs}


def predict(model, drawn, **kwargs):
    """Sample the posterior predictive distribution on all ranks."""
    with model:
        return sample_posterior_predictive(drawn, **make_settings(random_seed=2, **kwargs))


def check_equal(results, expected):
    """Compare datasets to the last bit, with dimensions, coordinates and dtypes."""
    assert set(results.data_vars) == set(expected.data_vars)
    for name in expected.data_vars:
        assert (results[name].dims, results[name].dtype) == (expected[name].dims, expected[name].dtype)
        np.testing.assert_array_equal(results[name].values, expected[name].values)
    assert set(results.coords) == set(expected.coords)
    for name in expected.coords:
        np.testing.assert_array_equal(results[name].values, expected[name].values)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("var_names", [None, ["z"]], ids=["all", "one"])
def test_log_likelihood_matches_pymc(fork, model, drawn, ranks, var_names):
    fork(ranks)
    with data_parallel(model):
        kwargs = make_settings(extend_inferencedata=False, var_names=var_names)
        results = compute_log_likelihood(drawn, **kwargs)
    with model:
        check_equal(results, pm.compute_log_likelihood(drawn, **kwargs))


def test_log_likelihood_extends_the_inference_data(fork, model, drawn):
    fork(2)
    with model:
        assert compute_log_likelihood(drawn, **make_settings()) is drawn
    assert drawn["log_likelihood"]["y"].shape == (2, DRAWS, N)


def test_predictions_do_not_depend_on_the_number_of_ranks(fork, model, drawn):
    results = []
    for ranks in (1, 2, 3):
        fork(ranks)
        results.append(predict(model, drawn)["posterior_predictive"])
        synk.close()
    for result in results[1:]:
        check_equal(result, results[0])


def test_predictions_have_pymcs_distribution_and_layout(fork, model, drawn):
    fork(2)
    predicted = predict(model, drawn)
    with model:
        expected = pm.sample_posterior_predictive(drawn, random_seed=2, **make_settings())
    group, expected_group = predicted["posterior_predictive"], expected["posterior_predictive"]
    assert {name: group[name].dims for name in group} == {name: expected_group[name].dims for name in expected_group}
    assert {name: group[name].dtype for name in group} == {name: expected_group[name].dtype for name in expected_group}
    assert [name for name in ("observed_data", "constant_data") if name not in predicted] == []
    # For each draw, z is a sample of 50 from a Poisson distribution, and y a sample of 30 from normal ones.
    posterior = drawn["posterior"]
    rate = np.exp(posterior["mu"].values[..., 0])
    z = (group["z"].values.mean(-1) - rate) / np.sqrt(rate / 50)
    y = (group["y"].values - posterior["mu"].values) / posterior["s"].values[..., None]
    for standardized in (z, y):
        assert abs(standardized.mean()) < 5 / np.sqrt(standardized.size)
        assert abs(standardized.std() - 1) < 5 / np.sqrt(2 * standardized.size)
    assert np.unique(y).size == y.size  # no two blocks have the same seed


def test_predictions_contain_variables_that_depend_on_observed_ones(fork):
    fork(2)
    with pm.Model() as model:
        mu, missing = pm.Normal("mu"), np.ma.masked_array([1.0, 3, 2], [False, True, False])
        y = pm.Normal("y", mu, 1e-3, observed=missing)
        pm.Deterministic("residual", y - mu)
        drawn = pm.sample(
            DRAWS, tune=0, step=pm.Metropolis(compile_kwargs={"mode": INTERPRETED}), chains=2, cores=1,
            progressbar=False, compute_convergence_checks=False,
        )  # fmt: skip
    predicted = predict(model, drawn)["posterior_predictive"]
    assert [variable.name for variable in model.observed_RVs] == ["y_observed"]
    with model:
        expected = pm.sample_posterior_predictive(drawn, **make_settings())["posterior_predictive"]
    assert {name: predicted[name].shape for name in predicted} == {name: expected[name].shape for name in expected}
    assert "residual" in predicted
    mu = drawn["posterior"]["mu"].values[..., None]
    np.testing.assert_allclose(predicted["y"].values - mu, predicted["residual"].values)
    assert abs(predicted["y_observed"].values - mu).max() < 0.01


def test_predictions_follow_set_data(fork, model, drawn):
    fork(2)
    with build_model() as other:
        pm.set_data({"x": X[:7] + 1}, coords={"row": [f"new {i}" for i in range(7)]})
    predicted = predict(other, drawn, predictions=True, var_names=["y"], extend_inferencedata=True)
    assert predicted is drawn
    assert predicted["predictions"]["y"].shape == (2, DRAWS, 7)
    assert predicted["predictions"]["row"].values[0] == "new 0"
    slopes = drawn["posterior"]["b"].values
    far = predicted["predictions"]["y"].values - slopes @ (X[:7] + 1).T
    assert abs(far.mean() / far.std()) < 0.5


def test_random_seed_changes_predictions(fork, model, drawn):
    fork(2)
    first, again = (predict(model, drawn, var_names=["y"])["posterior_predictive"]["y"].values for _ in range(2))
    np.testing.assert_array_equal(first, again)
    with model:
        other = sample_posterior_predictive(drawn, random_seed=7, **make_settings(var_names=["y"]))
    assert not np.array_equal(first, other["posterior_predictive"]["y"].values)
    for make_generator in (np.random.default_rng, np.random.RandomState):
        drawn_seeds = []
        for _ in range(2):
            with model:
                settings = make_settings(var_names=["y"], random_seed=make_generator(3))
                drawn_seeds.append(sample_posterior_predictive(drawn, **settings)["posterior_predictive"]["y"].values)
        np.testing.assert_array_equal(*drawn_seeds)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_results_in_a_store_equal_those_in_memory(fork, model, drawn, tmp_path, zarr_format):
    pytest.importorskip("zarr", reason="the extra `pymc-zarr` is not installed")
    fork(2)
    store = tmp_path / "drawn.zarr"
    tree = drawn.to_datatree() if hasattr(drawn, "to_datatree") else drawn
    tree.to_zarr(store, zarr_format=zarr_format)
    with model:
        lazy = compute_log_likelihood(drawn, store=store, **make_settings(extend_inferencedata=False))
        check_equal(lazy, compute_log_likelihood(drawn, **make_settings(extend_inferencedata=False)))
    lazy = predict(model, drawn, store=store)
    check_equal(lazy["posterior_predictive"], predict(model, drawn)["posterior_predictive"])
    with xarray.open_datatree(store, engine="zarr") as stored:
        assert {"posterior", "log_likelihood", "posterior_predictive"} <= set(stored.children)
        np.testing.assert_array_equal(
            stored["posterior_predictive"]["z"].values, lazy["posterior_predictive"]["z"].values
        )


def test_failed_call_leaves_no_group_in_a_new_store(fork, model, drawn, tmp_path, monkeypatch):
    zarr = pytest.importorskip("zarr", reason="the extra `pymc-zarr` is not installed")
    fork(2)
    store = str(tmp_path / "new.zarr")
    run = posterior._compute_blocks
    with model:
        monkeypatch.setattr(posterior, "_compute_blocks", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            compute_log_likelihood(drawn, store=store, **make_settings())
        monkeypatch.setattr(posterior, "_compute_blocks", run)
        assert not list(zarr.open_group(store))
        lazy = compute_log_likelihood(drawn, store=store, **make_settings(extend_inferencedata=False))
        with pytest.raises(ValueError, match="^store: .*new.zarr has a group 'log_likelihood' already"):
            compute_log_likelihood(drawn, store=store, **make_settings())
    check_equal(lazy, xarray.open_zarr(store, group="log_likelihood", consolidated=False, chunks=None))


def test_posterior_chunks_have_one_writer_each(fork, model, drawn, tmp_path, monkeypatch):
    """Blocks have all sizes, and rows several chunks."""
    zarr = pytest.importorskip("zarr", reason="the extra `pymc-zarr` is not installed")
    fork(3)
    monkeypatch.setattr(posterior, "_CHUNK_SIZE", 16)
    monkeypatch.setattr(posterior, "_MIN_BLOCKS", 3)
    store = tmp_path / "new.zarr"
    with model:
        lazy = compute_log_likelihood(drawn, store=store, **make_settings(extend_inferencedata=False))
        check_equal(lazy, pm.compute_log_likelihood(drawn, **make_settings(extend_inferencedata=False)))
    assert zarr.open_group(store)["log_likelihood"]["y"].chunks == (1, 14, 16)


def test_chunks_of_empty_rows_have_length_one():
    assert posterior._choose_chunk_shape((3, 0), block_length=5) == (1, 5, 3, 1)
    assert posterior._allocate_shared((2, 5, 3, 0), np.dtype("float64")).shape == (2, 5, 3, 0)


@pytest.mark.parametrize(("linker", "n_processes"), [(JAXLinker(), 1), (StaticLengthLinker(), 1), (CLinker(), 2)])
def test_functions_of_jax_mode_are_not_forked(fork, linker, n_processes):
    fork(2)
    assert posterior._count_processes(SimpleNamespace(maker=SimpleNamespace(linker=linker))) == n_processes


def test_posterior_functions_need_ranks(model, drawn):
    with model, pytest.raises(RuntimeError, match="fork"):
        compute_log_likelihood(drawn, **make_settings())


def test_posterior_functions_refuse_wrong_draws(fork, model, drawn):
    fork(1)
    with model:
        with pytest.raises(ValueError, match="^idata: the posterior has no dimension 'draw', but"):
            compute_log_likelihood(drawn.isel(draw=0), **make_settings())
        with pytest.raises(ValueError, match="var_names"):
            sample_posterior_predictive(drawn, **make_settings(var_names=[]))
        with pytest.raises(TypeError, match="^trace: expected .* 'posterior', got NoneType"):
            sample_posterior_predictive(None)
        with pytest.raises(TypeError, match="^idata: expected .* 'posterior', got dict"):
            compute_log_likelihood({})


def has_exited(pid):
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("event", ["error", "exit", "interrupt"])
def test_posterior_failure_ends_all_processes(event):
    def write(number):
        yield os.getpid()
        if number == 1 and event == "error":
            raise ZeroDivisionError("division")
        if number == 1 and event == "exit":
            os.kill(os.getpid(), signal.SIGKILL)
        while number == 0 or event == "interrupt":
            signal.pause()

    error, message = {
        "error": (ZeroDivisionError, "division"),
        "exit": (synk.WorkerError, "process .*, which was started for this call, was killed by SIGKILL"),
        "interrupt": (KeyboardInterrupt, None),
    }[event]
    pids = []
    counts = run_forked(write, 2)
    with pytest.raises(error, match=message):
        for pid in counts:
            pids.append(pid)
            if len(pids) == 2 and event == "interrupt":
                counts.throw(KeyboardInterrupt)
    assert pids and all(map(has_exited, pids))


def test_error_names_a_process_that_exits_after_another_has_finished():
    pid_reader, pid_writer = os.pipe()

    def write(number):
        yield number, os.getpid()
        if number == 0:
            os.write(pid_writer, str(os.getpid()).encode())
            return
        stat = Path(f"/proc/{os.read(pid_reader, 20).decode()}/stat")
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    pids = {}
    with pytest.raises(synk.WorkerError) as caught:
        for number, pid in run_forked(write, 2):
            pids[number] = pid
    os.close(pid_reader), os.close(pid_writer)
    assert str(caught.value).startswith(f"process {pids[1]}, ") and caught.value.rank == 0


class ErrorOfTwoArguments(Exception):
    """Can be pickled, but not unpickled: pickle calls the class with the message alone."""

    def __init__(self, name, value):
        super().__init__(f"{name}={value}")


@pytest.mark.parametrize(
    ("raised", "received"),
    [
        (ErrorOfTwoArguments("a", 1), (RuntimeError, "ErrorOfTwoArguments('a=1')")),
        (ValueError("wrong"), (ValueError, "wrong")),
    ],
    ids=["unpicklable", "picklable"],
)
def test_error_of_a_process_has_its_traceback(raised, received):
    def fail_in_process(_):
        yield None
        raise raised

    results = run_forked(fail_in_process, 1)
    assert next(results) is None  # a result, and not the end
    with pytest.raises(received[0]) as caught:
        next(results)
    assert str(caught.value) == received[1]
    (note,) = caught.value.__notes__
    assert "in fail_in_process" in note
