"""Data in files are mapped and read-only; files that hold no array of numbers are refused."""

import numpy as np
import pytest
from library import tensor
from messages import raises

import synkhronos as synk


@pytest.fixture
def path(tmp_path):
    """Write 100 rows of 3 numbers to a .npy file; return its path."""
    path = tmp_path / "x.npy"
    np.save(path, np.arange(300.0).reshape(100, 3))
    return path


@pytest.mark.parametrize("batch", [None, 30, slice(90, 10, -7), [5, 99, 5]])
def test_data_file_selects_rows(fork, path, batch):
    fork(3)
    x = tensor.dmatrix("x")
    f = synk.function([x], [(x * 2, "gather"), (x.sum(), "sum")])
    data = synk.data_file(path)
    value = np.load(path)
    chosen = value if batch is None else value[:batch] if isinstance(batch, int) else value[batch]
    double, total = f(data, batch=batch)
    np.testing.assert_array_equal(np.asarray(double), 2 * chosen)
    assert float(total) == chosen.sum()
    assert data.shape == (100, 3) and data.dtype == float and len(data) == 100


def test_data_file_is_read_only(path, two_ranks_per_test):
    data = synk.data_file(path)
    before = path.read_bytes()
    for change in (
        lambda: data.set_value(np.ones((2, 3))),
        lambda: data.set_length(5),
        lambda: data.set_shape((1, 1)),
        lambda: data.__setitem__(0, 1),
    ):
        with raises(ValueError, "x.npy"):
            change()
    with raises(ValueError, "read-only"):
        data.data[0] = 1
    copy = synk.data(np.asarray(data))
    copy[0] = 7
    assert path.read_bytes() == before


def test_data_file_is_copied_for_mutable_inputs(path, two_ranks_per_test):
    from library import package

    x = tensor.dmatrix("x")
    f = synk.function([package.In(x, mutable=True)], (tensor.inc_subtensor(x[0], 100.0), "gather"))
    before = path.read_bytes()
    data = synk.data_file(path)
    assert float(np.asarray(f(data))[0, 0]) == 100
    assert path.read_bytes() == before and data[0, 0] == 0


def test_data_file_stays_mapped_after_its_file_is_deleted(path, two_ranks_per_test):
    x = tensor.dmatrix("x")
    f = synk.function([x], (x.sum(), "sum"))
    data = synk.data_file(path)
    assert float(f(data)) == 300 * 299 / 2
    path.unlink()
    assert float(f(data)) == 300 * 299 / 2


def test_data_file_is_refused_after_free_memory(path, two_ranks_per_test):
    x = tensor.dmatrix("x")
    f = synk.function([x], (x.sum(), "sum"))
    data = synk.data_file(path)
    data.free_memory()
    with raises(ValueError, "x.npy"):
        f(data)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.asfortranarray(np.ones((3, 4))), "C order"),
        (np.array(["a"]), "expected numbers"),
        (np.ones(3, ">f8"), "native byte order"),
        (np.array([None]), "expected numbers"),
    ],
)
def test_data_file_refuses_other_arrays(tmp_path, value, words, two_ranks_per_test):
    np.save(tmp_path / "x.npy", value)
    with pytest.raises(ValueError, match=words):
        synk.data_file(tmp_path / "x.npy")


def test_data_file_refuses_other_files(tmp_path, path, two_ranks_per_test):
    with pytest.raises(FileNotFoundError):
        synk.data_file(tmp_path / "none.npy")
    (tmp_path / "text.npy").write_text("no array, but long enough for a header" * 9)
    with raises(ValueError, "text.npy"):
        synk.data_file(tmp_path / "text.npy")
    (tmp_path / "cut.npy").write_bytes(path.read_bytes()[:-8])
    with raises(ValueError, "cut.npy"):
        synk.data_file(tmp_path / "cut.npy")
