"""User-defined sources of rows: the recipe of docs/extending.rst."""

import pickle
from functools import partial

import numpy as np
import pytest

from synkhronos.loading import LoadError
from synkhronos.loading.sources import FileArray


# sources begin
class CsvRows:
    """Rows of numbers in the lines of a CSV file, with a label in the last column."""

    def __init__(self, path):
        self._path, self._bytes = path, None
        with open(path, "rb") as file:
            self._bounds = np.cumsum([0, *map(len, file)])  # of lines, in bytes

    def __getstate__(self):
        return {**vars(self), "_bytes": None}  # a loader process maps the file itself

    def __len__(self):
        return len(self._bounds) - 1

    def __getitem__(self, row):
        if self._bytes is None:
            self._bytes = np.memmap(self._path, mode="r")
        start, stop = self._bounds[row : row + 2]
        *features, label = bytes(self._bytes[start:stop]).split(b",")
        return np.array(features, "float32"), np.int32(label)

    def describe_row(self, row):
        return f"line {row + 1} of {self._path}"


def raw(paths, n_columns):
    """Return the rows of float32 numbers in files without a header."""
    return FileArray(paths, partial(_open_raw, n_columns=n_columns))


def _open_raw(path, n_columns):
    return np.memmap(path, "float32", "r").reshape(-1, n_columns)


# sources end


X, Y = np.arange(14, dtype="float32").reshape(7, 2), np.arange(7, dtype="int32") % 3


def write_csv(path, lines):
    path.write_text("\n".join(lines))
    return CsvRows(str(path))


def test_own_source_is_read_by_loader_processes(tmp_path, load):
    source = write_csv(tmp_path / "rows.csv", [f"{a},{b},{y}" for (a, b), y in zip(X, Y, strict=True)])
    assert source[6][0].tolist() == [12, 13] and pickle.loads(pickle.dumps(source))._bytes is None
    batches = [(x.copy(), y.copy()) for x, y in load(source, shuffle=False, processes=2).arrays(0, 3)]
    np.testing.assert_array_equal(np.concatenate([x for x, _ in batches]), X)
    np.testing.assert_array_equal(np.concatenate([y for _, y in batches]), Y)


def test_own_source_names_its_rows(tmp_path, load):
    source = write_csv(tmp_path / "rows.csv", ["1,2,0", "1,none,0"])
    with pytest.raises(LoadError, match=r"line 2 of .*rows\.csv"):
        list(load(source, shuffle=False).arrays(0, 2))


def test_own_files_are_one_array(tmp_path, load):
    for name, rows in (("a.raw", X[:3]), ("b.raw", X[3:])):
        rows.tofile(tmp_path / name)
    rows = raw([str(tmp_path / "a.raw"), str(tmp_path / "b.raw")], n_columns=2)
    batches = [x.copy() for (x,) in load([rows], shuffle=False, processes=2).arrays(0, 3)]
    np.testing.assert_array_equal(np.concatenate(batches), X)
