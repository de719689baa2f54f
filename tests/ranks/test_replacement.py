"""New workers after a death inherit Data, functions and variables; nothing of the old ones is left."""

import os
import signal
import warnings
from unittest import mock

import numpy as np
import pytest
from library import DEVICE, HOSTS, fork_ranks, read_results, shared
from library import tensor as T
from trainer_model import draw_row_noise

import synkhronos as synk
from synkhronos import ranks
from synkhronos.data_objects.parts import PartsData
from synkhronos.functions.function import get_dispatcher

pytestmark = [
    pytest.mark.skipif(DEVICE != "host" or bool(HOSTS), reason="workers that are forks of this process"),
    pytest.mark.new_ranks,
    pytest.mark.usefixtures("without_compiler"),
]


@pytest.fixture
def session():
    """Fork three ranks; yield their session."""
    fork_ranks(3)
    yield ranks.get_session()
    synk.close()


def kill(session, rank=1):
    """Kill a worker, and wait until it has exited."""
    os.kill(session.worker_pids[rank], signal.SIGKILL)
    os.waitid(os.P_PID, session.worker_pids[rank], os.WEXITED | os.WNOWAIT)


def kill_and_expect_error(session, call, rank=1):
    """Kill a worker, and check that the call raises WorkerError."""
    kill(session, rank)
    with pytest.raises(synk.WorkerError, match="SIGKILL"):
        call()


def check_failed_start(death, error):
    """Check that a death is a failed start of the ranks, by this error."""
    assert death.exit_description == f"could not start: {error}" and death.is_failed_start
    assert death.rank == 0 and death.host == "" and death.pid == 0 and death.lost_ranks == ()


def make_sum():
    """Return a function that sums its rows, and rows for it."""
    x = T.dmatrix("x")
    return synk.function([x], (x.sum(), "sum")), synk.data(np.ones((6, 3)))


@pytest.mark.parametrize("spawn", [False, True])
def test_new_workers_have_data_functions_and_variables(session, spawn):
    x, w = T.dmatrix("x"), shared(np.zeros(3), "w")
    f = synk.function([x], [(x.sum(), "sum")], updates=[(w, w + x.sum(axis=0))])
    data = synk.data(np.ones((6, 3)))
    f(data)
    with session.keep_memory():
        for rank in (1, 2):
            kill_and_expect_error(session, lambda: f(data), rank)
            assert session.death.rank == rank and "SIGKILL" in session.death.exit_description
            before = w.get_value()
            session.replace_workers(spawn)
            if spawn:  # a new process gets the function, and then the variable, in the first call
                assert session.death is None and float(read_results(f(data)[0])) == 18.0
                np.testing.assert_array_equal(synk.gather(w, nd_up=1), [before + 2.0] * 3)
                continue
            assert session.death is None and len(session.worker_pids) == 2
            np.testing.assert_array_equal(synk.gather(w, nd_up=1), [before] * 3)
            assert float(read_results(f(data)[0])) == 18.0
        data.free_memory()
        more = synk.data(np.arange(6.0).reshape(3, 2))
        g = synk.function([x], [(x.sum(), "sum")])
        assert float(read_results(g(more)[0])) == 15.0


def test_fresh_workers_have_the_memory_of_the_old_ones(session, tmp_path):
    """There are more segments than fit into a message, and a file; views in the master stay valid."""
    many = [synk.data(np.full(3, float(i))) for i in range(70)]
    view, newest = many[5].data, synk.data(np.ones(3))
    np.save(tmp_path / "rows.npy", np.arange(6.0))
    file = synk.data_file(tmp_path / "rows.npy")
    parts = synk.data_parts(lambda start, stop: np.arange(float(start), float(stop)), 5)
    x = T.dvector("x")
    f = synk.function([x], (x.sum(), "sum"))
    f(newest)
    newest.free_memory()
    with session.keep_memory():
        kill_and_expect_error(session, lambda: f(many[0]))
        session.replace_workers(spawn=True)
        view[0] = 100.0
        assert [float(read_results(f(data))) for data in (many[5], many[69], file, parts)] == [110.0, 207.0, 15.0, 10.0]
        assert float(read_results(f(synk.data(np.ones(4))))) == 4.0


def test_data_parts_are_loaded_again_unless_they_were_freed(session):
    counts = []

    def load(start, stop):
        counts.append(1)
        return np.zeros((stop - start, len(counts)))

    freed, changed = (synk.data_parts(load if i else lambda start, stop: np.zeros(stop - start), 5) for i in range(2))
    session.replacement_callbacks[freed] = PartsData._reload  # as if there were several hosts
    freed.free_memory()
    f, data = make_sum()
    with session.keep_memory():
        kill_and_expect_error(session, lambda: f(data))
        session.replace_workers()
        n_segments = len(session.rank.segments)
        with pytest.raises(ValueError, match=r"load: expected shape \(5, 1\) and float64, .* got \(5, 2\) and float64"):
            changed._reload()
        f(data)  # a command sends the released keys
        assert len(session.rank.segments) < n_segments


def test_memory_freed_after_a_death_is_not_kept(session):
    parts = synk.data_parts(lambda start, stop: np.zeros(stop - start), 5)
    session.replacement_callbacks[parts] = PartsData._reload  # as if there were several hosts
    f, data = make_sum()
    with session.keep_memory():
        kill_and_expect_error(session, lambda: f(data))
        n_segments = len(session.rank.segments)
        for freed in (data, parts):
            freed.free_memory()
        assert len(session.rank.segments) == n_segments - 2
        session.replace_workers()
        assert len(session.rank.segments) == n_segments - 2 and len(data) == len(parts) == 0


def test_master_alone_closes_the_files_of_its_memory(session):
    data, x = [synk.data(np.full(3, float(i))) for i in range(5)], T.dvector("x")
    f = synk.function([x], (x.sum(), "sum"))
    f(data[0])
    with session.keep_memory():
        kill_and_expect_error(session, lambda: f(data[0]))
        files = len(os.listdir("/proc/self/fd"))
        session.replace_workers(spawn=True, excluded_ranks=(1, 2))
        assert len(os.listdir("/proc/self/fd")) <= files
        assert session.size == 1 and float(read_results(f(data[4]))) == 12.0


def test_fresh_workers_refuse_a_file_that_has_been_replaced(session, tmp_path):
    np.save(tmp_path / "rows.npy", np.arange(6.0))
    file, x = synk.data_file(tmp_path / "rows.npy"), T.dvector("x")
    f = synk.function([x], (x.sum(), "sum"))
    f(file)
    np.save(tmp_path / "new.npy", np.zeros(6))
    os.replace(tmp_path / "new.npy", tmp_path / "rows.npy")
    with session.keep_memory():
        kill_and_expect_error(session, lambda: f(file))
        with pytest.raises(OSError, match="rows.npy has changed since it was mapped"):
            session.replace_workers(spawn=True)


def test_compiled_functions_are_inherited(session):
    f, data = make_sum()
    f(data)
    with session.keep_memory():
        kill_and_expect_error(session, lambda: f(data))
        session.replace_workers()
        assert session.run(CountCompiled(get_dispatcher(f).computation_key)) == [1, 1, 1]


class CountCompiled(ranks.Command):
    """Command that returns each rank's number of a function's compiled variants."""

    def __init__(self, key):
        self.key = key

    def run(self, rank):
        return rank.all_gather(len(rank.objects[self.key]().compiled_variants))


@pytest.mark.parametrize("spawn", [False, True])
def test_streams_of_new_workers_differ(session, spawn):
    x = T.dmatrix("x")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        noise = draw_row_noise()
    f = synk.function([x], (noise + 0 * x.sum(), "gather"))
    data = synk.data(np.ones((6, 3)))
    drawn = [read_results(f(data))]
    with session.keep_memory():
        kill_and_expect_error(session, lambda: f(data))
        session.replace_workers(spawn)
        drawn.append(read_results(f(data)))
    numbers = np.concatenate(drawn)
    assert len(numbers) == 24 and len(np.unique(numbers)) == 24


def test_settings_reach_new_workers(session):
    f, data = make_sum()
    f(data)
    with session.keep_memory():
        kill_and_expect_error(session, lambda: f(data))
        with np.errstate(divide="ignore"):  # only at the fork
            session.replace_workers()
        f(data)
        assert session.run(GetNumpyErrors()) == [np.geterr()["divide"]] * 3


class GetNumpyErrors(ranks.Command):
    def run(self, rank):
        return rank.all_gather(np.geterr()["divide"])


def test_interrupted_replacement_closes_the_ranks(session):
    f, data = make_sum()

    class Interrupted:
        def raise_interrupt(self):
            raise KeyboardInterrupt

    user = Interrupted()
    session.replacement_callbacks[user] = Interrupted.raise_interrupt
    with session.keep_memory():
        kill_and_expect_error(session, lambda: f(data))
        with pytest.raises(KeyboardInterrupt):
            session.replace_workers()
    assert not session.worker_pids
    with pytest.raises(RuntimeError, match="ranks were closed"):
        ranks.get_session()
    with pytest.raises(RuntimeError, match="memory was freed"):
        data[0]


def test_ranks_stay_until_the_new_control_memory_is_created(session, monkeypatch):
    f, data = make_sum()
    f(data)
    with session.keep_memory():
        kill_and_expect_error(session, lambda: f(data))
        with monkeypatch.context() as patched, pytest.raises(MemoryError, match="not enough memory"):
            patched.setattr(ranks.session, "ProcessGroup", mock.Mock(side_effect=MemoryError("not enough memory")))
            session.replace_workers(excluded_ranks=(1,))
        assert session.size == 3 and session.has_kept_memory
        check_failed_start(session.death, "MemoryError: not enough memory")
        session.replace_workers(excluded_ranks=(1,))
        assert session.size == 2 and session.death is None and float(read_results(f(data))) == 18.0


def test_error_of_a_new_link_is_the_next_death(session, monkeypatch):
    f, data = make_sum()
    f(data)
    with session.keep_memory():
        kill_and_expect_error(session, lambda: f(data))
        with monkeypatch.context() as patched, pytest.raises(OSError, match="too many files"):
            patched.setattr(session._group.link, "reconnect", mock.Mock(side_effect=OSError("too many files")))
            session.replace_workers(excluded_ranks=(1,))
        assert session.size == 3
        check_failed_start(session.death, "OSError: too many files")
        session.replace_workers()
        assert session.size == 3 and float(read_results(f(data))) == 18.0


def test_interrupt_after_the_new_link_ends_its_agents(session, monkeypatch):
    f, data = make_sum()
    f(data)
    link = mock.Mock(shut_down=mock.Mock())
    type(link).needs_control_file = mock.PropertyMock(side_effect=KeyboardInterrupt)  # read before the deferral
    with session.keep_memory():
        kill_and_expect_error(session, lambda: f(data))
        monkeypatch.setattr(session._group.link, "reconnect", lambda excluded_ranks: link)
        with pytest.raises(KeyboardInterrupt):
            session.replace_workers()
    link.shut_down.assert_called_once()


def test_end_of_keep_memory_after_a_death_frees_all_memory(session):
    f, data = make_sum()
    with session.keep_memory():
        kill_and_expect_error(session, lambda: f(data))
    with pytest.raises(RuntimeError, match="no worker has died within"):
        session.replace_workers()
    with pytest.raises(RuntimeError, match="memory was freed"):
        data[0]
    assert not len(session.rank.segments)


def test_death_after_keep_memory_frees_all_memory(session):
    f, data = make_sum()
    with session.keep_memory():
        f(data)
    kill_and_expect_error(session, lambda: f(data))
    with pytest.raises(RuntimeError, match="memory was freed"):
        data[0]
