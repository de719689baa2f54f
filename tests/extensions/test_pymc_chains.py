"""Concurrent chains of PyMC, each with its own ranks, equal PyMC's own chains."""

import _thread
import functools
import itertools
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ArviZ announces its next version
    pm = pytest.importorskip("pymc", reason="the extra `pymc` is not installed")
from library import HOSTS, INTERPRETED, XLA  # noqa: E402
from pymc.sampling import mcmc  # noqa: E402
from pymc_sampling import CallbackAfterDraws, build_small_model  # noqa: E402
from system import wait_until_ended  # noqa: E402

import synkhronos as synk  # noqa: E402
from synkhronos.extensions import chains as chains_module  # noqa: E402
from synkhronos.extensions import distributed_rows  # noqa: E402
from synkhronos.extensions.pymc import chain_servers, data_parallel  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.skipif(XLA, reason="PyMC forks beside JAX's threads"),
    pytest.mark.skipif(bool(HOSTS), reason="chains use the ranks of one host"),
]
X = np.random.default_rng(3).normal(size=(60, 3))


def build_model():
    with pm.Model() as model:
        b = pm.Normal("b", shape=3)
        pm.Normal("y", X @ b, 1, observed=X[:, 0])
        pm.Poisson("z", pm.math.exp(b[0] * pm.Data("longer", X[:, 1])[10:]), observed=np.arange(50) % 4)
    return model


def sample(model, **kwargs):
    """Sample chains of five draws."""
    settings = {"draws": 5, "tune": 5, "random_seed": 5, "progressbar": False, "compute_convergence_checks": False}
    with model:
        return pm.sample(**{**settings, **kwargs}, compile_kwargs={"mode": INTERPRETED})


@pytest.fixture
def list_started(monkeypatch):
    """Give a function that returns the worker process IDs of each chain so far."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    start_chain_ranks = chains_module.fork

    def start(*args, **kwargs):
        start_chain_ranks(*args, **kwargs)
        pids = list(synk.ranks.get_session().worker_pids.values())
        os.write(write, (" ".join(map(str, [os.getpid(), *pids])) + "\n").encode())

    sessions = []

    def get():
        try:
            text = os.read(read, 1 << 16).decode()
        except BlockingIOError:
            text = ""
        sessions.extend([list(map(int, line.split())) for line in text.splitlines()])
        return sessions

    # The tests start the master's ranks by another function.
    monkeypatch.setattr(chains_module, "fork", start)
    yield get
    os.close(read)
    os.close(write)


@pytest.mark.parametrize(
    ("ranks", "chains", "cores", "expected"),
    [(5, 2, 2, [2, 3]), (3, 3, 2, [1, 2, 2]), (1, 2, 4, [1, 1])],
    ids=["remainder", "more chains than cores", "more chains than ranks"],
)
def test_concurrent_chains_divide_the_ranks(fork, list_started, ranks, chains, cores, expected):
    fork(ranks)
    model = build_model()
    parallel_draws = sample(data_parallel(model), chains=chains, cores=cores)
    serial_draws = sample(model, chains=chains, cores=1)
    np.testing.assert_allclose(parallel_draws.posterior["b"].values, serial_draws.posterior["b"].values, rtol=1e-6)
    assert sorted(map(len, list_started())) == expected
    wait_until_ended(sum(list_started(), []))


@pytest.mark.parametrize("settings", [{"chains": 1, "cores": 4}, {"chains": 2, "cores": 1}], ids=["chain", "core"])
def test_chains_of_the_master_use_all_ranks(fork, list_started, settings):
    fork(2)
    assert sample(data_parallel(build_model()), **settings).posterior.sizes["chain"] == settings["chains"]
    assert not list_started()


def test_concurrent_chains_inherit_the_rows(fork, monkeypatch):
    """The ranks of each chain read the model's arrays, without copies."""
    fork(2)
    parallel = data_parallel(build_model())
    parallel.compile_logp(mode=INTERPRETED)(parallel.initial_point())

    def scatter(*args):
        raise AssertionError("the rows were copied")

    monkeypatch.setattr(distributed_rows, "scatter", scatter)
    parallel_draws = sample(parallel, chains=2, cores=2)
    np.testing.assert_allclose(
        parallel_draws.posterior["b"].values, sample(build_model(), chains=2, cores=1).posterior["b"].values, rtol=1e-6
    )


def test_set_data_reaches_the_next_chains(fork):
    fork(2)
    with pm.Model() as model:
        observed = pm.Data("observed", np.arange(6.0))
        pm.Normal("y", pm.Normal("center"), pm.math.exp(observed / 9), observed=observed)
    parallel = data_parallel(model)
    for values in (np.arange(6.0), np.arange(4.0) - 3):
        with model:
            pm.set_data({"observed": values})
        parallel_draws, serial_draws = sample(parallel, chains=2, cores=2), sample(model, chains=2, cores=1)
        np.testing.assert_allclose(
            parallel_draws.posterior["center"].values, serial_draws.posterior["center"].values, rtol=1e-6
        )


def test_population_chains_have_their_own_ranks(fork, list_started):
    """The chains of a population step together, each in its own process, for any number of cores."""
    fork(4)
    model = build_model()
    drawn = []
    for variant, cores in [(data_parallel(model), 2), (model, 1)]:
        with variant:
            step = pm.DEMetropolis(compile_kwargs={"mode": INTERPRETED})
        drawn.append(sample(variant, step=step, chains=3, cores=cores).posterior["b"].values)
    np.testing.assert_allclose(*drawn, rtol=1e-9)
    assert sorted(map(len, list_started())) == [1, 1, 2]


def test_metropolis_and_smc_chains_have_their_own_ranks(fork, list_started):
    fork(2)
    model = build_model()
    parallel = data_parallel(model)
    with parallel:
        steps = pm.Metropolis(compile_kwargs={"mode": INTERPRETED})
    parallel_draws = sample(parallel, step=steps, chains=2, cores=2)
    with model:
        steps = pm.Metropolis(compile_kwargs={"mode": INTERPRETED})
    serial_draws = sample(model, step=steps, chains=2, cores=1)
    np.testing.assert_allclose(parallel_draws.posterior["b"].values, serial_draws.posterior["b"].values, rtol=1e-9)
    assert len(list_started()) == 2

    def draw(model, cores):
        with model:
            drawn = pm.sample_smc(
                8, chains=2, cores=cores, random_seed=1, progressbar=False, compute_convergence_checks=False,
                compile_kwargs={"mode": INTERPRETED},
            )  # fmt: skip
        return drawn.posterior["b"].values

    np.testing.assert_allclose(draw(parallel, 2), draw(model, 1), rtol=1e-6)
    assert len(list_started()) == 4


def test_death_in_a_chain_ends_all_chains(fork, list_started):
    fork(4)
    model = build_model()
    parallel = data_parallel(model)
    kill = CallbackAfterDraws(30, lambda: os.kill(list_started()[0][1], signal.SIGKILL))
    with pytest.raises(Exception, match="Chain .* rank 1 .* was killed by SIGKILL"):
        sample(parallel, chains=2, cores=2, draws=100_000, callback=kill)
    assert len(list_started()) == 2
    wait_until_ended(sum(list_started(), []))
    point = model.initial_point()
    expected = model.compile_logp(mode=INTERPRETED)(point)
    np.testing.assert_allclose(parallel.compile_logp(mode=INTERPRETED)(point), expected)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_of_a_chain_end_with_it(fork, list_started, signal_number):
    fork(4)
    kill = CallbackAfterDraws(30, lambda: os.kill(list_started()[0][0], signal_number))
    with pytest.raises((EOFError, ConnectionError, RuntimeError)):
        sample(data_parallel(build_model()), chains=2, cores=2, draws=100_000, callback=kill)
    wait_until_ended(sum(list_started(), []))


def test_interrupted_chains_return_their_draws(tmp_path):
    """The interrupt goes to all processes, as a terminal sends it."""
    script = """
        import os, signal, sys, warnings
        import numpy as np
        import synkhronos as synk
        from synkhronos.extensions.pymc import data_parallel
        from pymc_sampling import CallbackAfterDraws
        from test_pymc_chains import build_model, sample
        synk.fork(4, use_gpu=False)
        interrupt = CallbackAfterDraws(30, lambda: os.killpg(0, signal.SIGINT))
        drawn = sample(data_parallel(build_model()), chains=2, cores=2, draws=100_000, callback=interrupt)
        print("drawn", 1 <= drawn.posterior.sizes["draw"] < 100_000)
        print("again", sample(data_parallel(build_model()), chains=2, cores=2).posterior.sizes["draw"])
        synk.close()
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])},
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.stdout.split() == ["drawn", "True", "again", "5"], ended.stderr
    assert "Traceback" not in ended.stderr


# -- chains that are threads, as nutpie's ----------------------------------------------------------------------------


class ThreadSampler:
    """Fake of PyMC's function that calls nutpie: chains are threads that Python has not started."""

    def __init__(self, sums, monkeypatch):
        self.sums, self.monkeypatch = sums, monkeypatch
        monkeypatch.setattr(mcmc, "_sample_external_nuts", self.sample)
        chain_servers.patch_external_sampler()

    def sample(self, *, chains, **kwargs):
        def refuse(*args):
            raise AssertionError("evaluated by the ranks of the master")

        def evaluate(number):
            try:
                results.put(
                    [rows_sum.evaluate([np.full(3, 0.1 * number)], with_gradients=True) for rows_sum in self.sums]
                )
            except BaseException as error:
                results.put(error)

        results = queue.SimpleQueue()
        self.monkeypatch.setattr(
            type(self.sums[0]), "_evaluate_in_this_process", refuse
        )  # not in the servers, which run already
        for number in range(chains):
            _thread.start_new_thread(evaluate, (number,))
        return [results.get(timeout=100) for _ in range(chains)]


def test_threads_of_a_sampler_have_their_share_of_the_ranks(fork, list_started, monkeypatch):
    fork(5)
    parallel = data_parallel(build_small_model(X))
    sums = parallel.distributed_sums
    expected = [sums[0].evaluate([np.full(3, 0.1 * number)], with_gradients=True) for number in range(2)]
    ThreadSampler(sums, monkeypatch)
    arguments = {"sampler": "nutpie", "model": parallel, "chains": 2, "cores": 2}
    chains = sorted(mcmc._sample_external_nuts(**arguments), key=lambda chain: -chain[0][0])
    for (parallel_chain,), expected_chain in zip(chains, sorted(expected, key=lambda chain: -chain[0]), strict=True):
        for actual, desired in zip(parallel_chain, expected_chain, strict=True):
            np.testing.assert_allclose(actual, desired, rtol=1e-9)
    assert sorted(map(len, list_started())) == [2, 3]
    wait_until_ended(sum(list_started(), []))


@pytest.mark.parametrize("index", [0, 1], ids=["server", "rank"])
def test_evaluate_after_an_exit_raises_a_worker_error(fork, list_started, index):
    fork(4)
    (rows,) = data_parallel(build_small_model(X)).distributed_sums
    servers = chain_servers.ChainServers(1)
    try:
        value = servers.evaluate(rows, [np.zeros(3)], False)
        np.testing.assert_allclose(value[0], rows.compute_value([np.zeros(3)]))
        (group,) = list_started()
        os.kill(group[index], signal.SIGKILL)
        wait_until_ended([group[index]])
        with pytest.raises(synk.WorkerError):
            servers.evaluate(rows, [np.ones(3)], False)
    finally:
        servers.close()
    wait_until_ended(group)


def test_evaluate_after_an_interrupt_reads_no_late_result():
    pipe, server_pipe = multiprocessing.Pipe()

    class InterruptedPipe:
        """Pipe whose first result arrives after an interrupt."""

        is_first = True
        send_bytes = pipe.send_bytes

        def recv(self):
            if self.is_first:
                self.is_first = False
                raise KeyboardInterrupt
            return pipe.recv()

    servers = chain_servers.ChainServers(0)
    servers._idle.put(InterruptedPipe())
    server_pipe.send([np.float64(1)])
    with pytest.raises(KeyboardInterrupt):
        servers.evaluate(None, [], False)
    for _ in range(2):
        with pytest.raises(synk.WorkerError, match=r"^another chain stopped: KeyboardInterrupt\(\)$"):
            servers.evaluate(None, [], False)
    server_pipe.close()


class FailingSum:
    """Sum whose evaluation raises an error."""

    def __init__(self, error_class):
        self.error_class = error_class

    def evaluate(self, params, with_gradients):
        raise self.error_class(lambda: None)


class ErrorOfTwoArguments(Exception):
    """Can be pickled, but not unpickled: pickle calls the class with the message alone."""

    def __init__(self, first, second="second"):
        super().__init__()

    def __reduce__(self):
        return type(self), ()


@pytest.mark.parametrize("error_class", [ValueError, ErrorOfTwoArguments])
def test_errors_that_cannot_be_pickled_leave_a_server_usable(fork, error_class):
    """An evaluation that can't be sent does too."""
    fork(1)
    (rows,) = data_parallel(build_small_model(X)).distributed_sums
    servers = chain_servers.ChainServers(1)
    try:
        with pytest.raises(RuntimeError, match=rf"^{error_class.__name__}\("):
            servers.evaluate(FailingSum(error_class), [], False)
        with pytest.raises((AttributeError, pickle.PicklingError)):
            servers.evaluate(lambda: None, [], False)
        value = servers.evaluate(rows, [np.zeros(3)], False)
        np.testing.assert_allclose(value[0], rows.compute_value([np.zeros(3)]))
    finally:
        servers.close()


def test_patch_external_sampler_wraps_a_function_that_another_library_wrapped(monkeypatch):
    original = mcmc._sample_external_nuts

    @functools.wraps(getattr(original, "__wrapped__", original))
    def wrapper(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr(mcmc, "_sample_external_nuts", wrapper)
    chain_servers.patch_external_sampler()
    patched = mcmc._sample_external_nuts
    assert patched is not wrapper
    chain_servers.patch_external_sampler()
    assert mcmc._sample_external_nuts is patched


# -- ranks="auto" ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rates", "expected"), [([10, 20, 30], [2, 3]), ([10, 30, 20], [1, 1])], ids=["all", "one"])
def test_ranks_auto_takes_the_fastest_number_of_ranks(fork, list_started, monkeypatch, caplog, rates, expected):
    """The rates are those of PyMC alone, of one rank, and of two ranks of five."""
    fork(5)
    monkeypatch.setattr(
        "synkhronos.extensions.pymc.data_parallel_model.measure_evaluation_rate", lambda evaluate, chains: rates.pop(0)
    )
    with caplog.at_level("INFO"):
        parallel = data_parallel(build_model(), ranks="auto", chains=2)
    (message,) = [record.getMessage() for record in caplog.records if record.name == "pymc.synkhronos"]
    assert message.endswith("Times of a gradient: PyMC alone 200 ms, 1 rank 100 ms, 2 ranks 66.7 ms") or expected == [
        1,
        1,
    ]
    sample(parallel, chains=2, cores=2)
    assert sorted(map(len, list_started())) == expected


@pytest.mark.parametrize("chains", [1, 2])
def test_ranks_auto_avoids_ranks_without_gain(fork, monkeypatch, chains):
    """All evaluations take equally long by a clock that advances by a second at each reading."""
    fork(2)
    model = build_model()
    monkeypatch.setattr(chains_module, "perf_counter", itertools.count().__next__)
    parallel = data_parallel(model, ranks="auto", chains=chains)
    assert not parallel.split_RVs and "PyMC alone is as quick" in parallel.reasons["y"]
    point = model.initial_point()
    assert parallel.compile_logp(mode=INTERPRETED)(point) == model.compile_logp(mode=INTERPRETED)(point)


def test_ranks_auto_raises_errors_of_the_measurement():
    with pytest.raises(ZeroDivisionError):
        chains_module.measure_evaluation_rate(lambda: 1 / 0, 2)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"ranks": 2}, ValueError),
        ({"chains": 0}, ValueError),
        ({"chains": "two"}, TypeError),
        ({"chains": 2}, ValueError),  # without ranks="auto" it would have no effect
    ],
)
def test_concurrent_refuses_wrong_settings(settings, error):
    with pytest.raises(error, match=f"^{next(iter(settings))}: "):
        data_parallel(build_model(), **settings)
