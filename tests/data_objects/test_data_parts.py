"""`data_parts`: each rank loads its own rows, on one host and on several."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
from hosts import run
from hypothesis import given, settings
from hypothesis import strategies as st
from library import HOSTS, limit_examples, tensor
from messages import raises

import synkhronos as synk
from synkhronos import ranks
from synkhronos.data_objects.parts import PartsData, iterate_shuffled_batches, redistribute_rows
from synkhronos.data_objects.rows import get_share_slice

pytestmark = [
    pytest.mark.skipif(bool(HOSTS), reason="has hosts of its own"),
    pytest.mark.timeout(300),  # programs compile on all ranks
]


def make_rows(start, stop):
    return np.arange(3.0 * start, 3.0 * stop).reshape(-1, 3)


def make_double():
    x = tensor.dmatrix("x")
    return synk.function([x], [(x * 2, "gather"), (x.sum(), "sum")])


def test_data_parts_reads_few_of_many_rows():
    """An array of row numbers would take 8 TB here, as on the first of several hosts."""
    x = PartsData.__new__(PartsData)
    x._session, x._ndim, x._source, x.local_rows = SimpleNamespace(close_reason=None), 1, "x", range(10)
    x._array = np.broadcast_to(7.0, 10**12)
    assert x[5:8].tolist() == [7, 7, 7] and not len(x[5:5])
    with raises(IndexError, "x"):
        x[5:11]
    assert x[5] == x[5 - 10**12] == 7 and x[[3, 0, 5 - 10**12]].tolist() == [7, 7, 7] and not len(x[[]])
    for key in (10, -1, [3, 10], (), ..., None):
        with raises(IndexError):
            x[key]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_data_parts_holds_the_loaded_rows(fork, n):
    fork(n)
    f = make_double()

    @limit_examples(20)
    @given(st.integers(1, 40), st.data())
    def check(length, data):
        requests = []

        def load(start, stop):
            requests.append((start, stop))
            return make_rows(start, stop)

        parts, whole = synk.data_parts(load, length), make_rows(0, length)
        share = get_share_slice(length, n, 0)
        assert requests == [(share.start, share.stop)]  # the other ranks have their own lists
        assert parts.shape == (length, 3) and parts.local_rows == range(length) and parts.dtype == float
        assert np.array_equal(parts, whole) and np.array_equal(parts[-1], whole[-1])
        chosen = data.draw(st.one_of(st.none(), st.lists(st.integers(0, length - 1), min_size=1)))
        double, total = f(parts, batch=chosen)
        picked = whole if chosen is None else whole[chosen]
        np.testing.assert_array_equal(np.asarray(double), 2 * picked)
        assert float(total) == picked.sum()

    check()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_data_parts_batches_are_local(counts, data):
    n = sum(counts)
    ranks_by_host = [range(sum(counts[:h]), sum(counts[: h + 1])) for h in range(len(counts))]
    length = data.draw(st.integers(n, 200))
    size = data.draw(st.integers(n, length))
    batches = list(iterate_shuffled_batches(length, size, ranks_by_host, seed=3))
    rows = np.concatenate(batches) if batches else np.empty(0, int)
    assert len(rows) == len(set(rows.tolist())) == size * len(batches)
    for batch in batches:
        for host_ranks in ranks_by_host:
            host_rows = range(
                get_share_slice(length, n, host_ranks[0]).start, get_share_slice(length, n, host_ranks[-1]).stop
            )
            for r in host_ranks:
                assert set(batch[get_share_slice(size, n, r)].tolist()) <= set(host_rows)
    if len(counts) == 1:  # only the rows that leave ranks unequal are dropped
        assert len(batches) == length // size
    assert all(
        np.array_equal(a, b)
        for a, b in zip(batches, iterate_shuffled_batches(length, size, ranks_by_host, seed=3), strict=True)
    )


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 4), st.data())
def test_rows_are_redistributed_each_once_to_ranks_that_load_them(counts, batch_size, data):
    n = sum(counts)
    ranks_by_host = [range(sum(counts[:h]), sum(counts[: h + 1])) for h in range(len(counts))]
    length = data.draw(st.integers(batch_size * n, 200))
    rows = np.array(data.draw(st.permutations(range(length)))[: data.draw(st.integers(batch_size * n, length))])
    order, parts = redistribute_rows(rows, batch_size, length, ranks_by_host)
    step = batch_size * n
    assert sorted(order) == sorted(rows[: len(rows) // step * step])  # the others do not fill a step
    for host_ranks in ranks_by_host:
        loaded = [row for r in host_ranks for row in parts[r]]
        assert loaded == list(range(loaded[0], loaded[-1] + 1)) if loaded else True
        own = order.reshape(-1, step)[:, host_ranks.start * batch_size : host_ranks.stop * batch_size].ravel()
        assert set(own.tolist()) <= set(loaded)
        assert own.tolist() == [row for row in rows[: len(order)] if row in set(own.tolist())]  # in the epoch's order
        for r in host_ranks:
            assert set(range(length)[get_share_slice(length, n, r)]) <= set(parts[r])


def test_data_parts_is_read_only_and_can_be_freed(two_ranks_per_test):
    f, data = make_double(), synk.data_parts(make_rows, 9, name="points")
    for change in (lambda: data.set_value(np.ones((2, 3))), lambda: data.set_length(5), lambda: data.__setitem__(0, 1)):
        with raises(ValueError, "points"):
            change()
    with raises(ValueError):
        data.data[0] = 1
    with pytest.raises(TypeError, match="^seed: "):
        data.batches(2, seed="abc")
    data.free_memory()
    assert repr(data) == "<synkhronos.PartsData 'points': float64, shape (0, 0), rows 0:0>"
    with raises(ValueError):
        f(data)
    with raises(ValueError):
        data.batches(2)
    synk.close()
    for call in (lambda: data[0], lambda: data.batches(2)):
        with raises(RuntimeError):
            call()


def test_data_parts_takes_any_byte_order(two_ranks_per_test):
    data = synk.data_parts(lambda start, stop: make_rows(start, stop).astype(">f8"), 5)
    assert data.dtype.isnative and float(make_double()(data)[1]) == make_rows(0, 5).sum()


def test_data_parts_loads_relative_to_the_masters_folder(fork, tmp_path, monkeypatch):
    fork(2)
    np.save(tmp_path / "rows.npy", make_rows(0, 6))
    monkeypatch.chdir(tmp_path)
    data = synk.data_parts(lambda start, stop: np.load("rows.npy")[start:stop], 6)
    np.testing.assert_array_equal(data, make_rows(0, 6))


def test_data_parts_are_loaded_where_the_masters_folder_is_missing(two_ranks_per_test, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getcwd", lambda: str(tmp_path / "missing"))  # as on another host
    np.testing.assert_array_equal(synk.data_parts(make_rows, 6), make_rows(0, 6))


def test_mask_of_items_may_select_local_rows_alone(two_ranks_per_test):
    data = synk.data_parts(make_rows, 5)
    data.local_rows = range(2)  # as on the first of several hosts
    mask = np.zeros((5, 3), bool)
    mask[1, 2] = True
    assert data[mask].tolist() == [5.0]
    mask[3, 0] = True
    with pytest.raises(IndexError, match="rows 0 to 1 of 5"):
        data[mask]


def make_other_shapes(start, stop):
    return np.ones((stop - start, 2 + (start > 0)))


def make_other_dtypes(start, stop):
    return np.ones(stop - start, "f4" if start else "f8")


def make_too_few_rows(start, stop):
    return np.ones(1) if start else np.ones(stop)


def make_text_rows(start, stop):
    return ["a"] * (stop - start)


def raise_missing_file(start, stop):
    if start == 0:
        raise FileNotFoundError("no such part")
    return np.ones(stop - start)


@pytest.mark.parametrize(
    ("load", "length", "error", "words"),
    [
        (make_other_shapes, 8, ValueError, r"got \(2,\) of float64 on rank 0, and \(3,\) of float64 on rank 1"),
        (make_other_dtypes, 8, ValueError, r"float64 on rank 0, and \(\) of float32 on rank 1"),
        (make_too_few_rows, 8, synk.WorkerError, r"rank 1 .*load\(4, 8\), for rank 1: ValueError: expected 4 rows"),
        (make_text_rows, 8, RuntimeError, r"load\(0, 4\), for rank 0: TypeError: load: expected numbers"),
        (raise_missing_file, 8, RuntimeError, r"load\(0, 4\), for rank 0: FileNotFoundError: no such part"),
        (make_rows, 0, ValueError, "length"),
        ("rows", 8, TypeError, "load: expected a function"),
    ],
)
def test_data_parts_names_wrong_loads(load, length, error, words, two_ranks_per_test):
    with pytest.raises(error, match=words):
        synk.data_parts(load, length)
    data = synk.data_parts(make_rows, 5)
    assert np.array_equal(data, make_rows(0, 5))
    assert len(ranks.get_session().rank.segments) <= 2  # no segment of the failed calls


def test_data_parts_leaves_no_open_files(two_ranks_per_test):
    synk.data_parts(make_rows, 5)
    before = os.listdir("/proc/self/fd")
    synk.data_parts(make_rows, 5)
    assert os.listdir("/proc/self/fd") == before


#: Pytest runs all tests on the first hosts, then all on the next.
TWO_HOSTS = [["a:2", "b:2"], ["a:3", "b:1"]]


@pytest.fixture(scope="module", params=[*TWO_HOSTS, ["a:4"]], ids="+".join)
def hosts(request):
    """Give hosts with ranks that the tests of this module share."""
    return request.param


@pytest.mark.hosts
def test_data_parts_loads_each_hosts_rows(hosts):
    output = run(hosts, "use_local_parts")
    assert output.splitlines()[-1] == "passed", output


@pytest.mark.hosts
def test_data_parts_work_in_spmd_programs(hosts):
    assert run(hosts, "pass_parts_to_programs") == "passed 4\n"


@pytest.mark.hosts
@pytest.mark.timeout(600)
@pytest.mark.parametrize("hosts", TWO_HOSTS, indirect=True, ids="+".join)
def test_data_parts_work_in_trainers(hosts):
    pytest.importorskip("safetensors")
    counts = "+".join(host.partition(":")[2] for host in hosts)
    one_host = run(["a:4"], "train_on_parts", counts)
    assert one_host
    assert run(hosts, "train_on_parts", counts) == one_host


@pytest.mark.hosts
def test_data_parts_allocates_only_local_rows():
    used = [int(line) for line in run(["a:1", "b:1"], "measure_parts_memory").split()]
    assert 15 << 20 < used[0] < 18 << 20  # half of 32 MB
