"""Safe casts: `synkhronos.casts.cast`, and its use by all packages."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from library import limit_examples, shared, tensor
from loading_sources import ColumnRows

import synkhronos as synk
from synkhronos import casts, loading
from synkhronos.launcher.model_class.model_recorder import ModelRecorder
from synkhronos.loading import CropMirror, Images, Loader, LoadError
from synkhronos.training import make_train_function_serial, make_trainer
from synkhronos.training.updates import sgd

DTYPES = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
DTYPES += ["bool", "float16", "float32", "float64", "complex64", "complex128"]
MASKED = np.ma.masked_array([0.0, 1.0, 0.0, 1.0], [False, False, True, False])


def is_same(value, cast, rounds):
    """Return whether a cast preserves a number, compared exactly."""
    if isinstance(value, complex) or isinstance(cast, complex):
        parts = zip((value.real, value.imag), (cast.real, cast.imag), strict=True)
        return all(is_same(before, after, rounds) for before, after in parts)
    if rounds:
        return not math.isinf(cast) or math.isinf(value)
    return cast == value or value != value and cast != cast


def find_first_change(array, dtype):
    """Return the index of the first number that a cast changes; None if there is none."""
    rounds = array.dtype.name in ("float64", "complex128") and dtype in ("float32", "complex64")
    for index in np.ndindex(array.shape):
        with np.errstate(all="ignore"):
            cast = array[index].astype(dtype)
        if not is_same(array[index].item(), cast.item(), rounds):
            return index
    return None


@given(st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.data())
def test_cast_is_refused_iff_a_value_changes(source_dtype, dtype, data):
    # Small numbers, which most dtypes can represent, and arbitrary ones.
    items = st.one_of(st.integers(0, 1), st.integers(0, 127)).map(lambda n: np.array(n).astype(source_dtype).item())
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=3, max_side=3))
    elements = data.draw(st.sampled_from([items, hnp.from_dtype(np.dtype(source_dtype))]))
    array = data.draw(hnp.arrays(source_dtype, shape, elements=elements))
    array = data.draw(st.sampled_from([array, array.T, array.astype(array.dtype.newbyteorder())]))
    if array.dtype.kind == "c" and np.dtype(dtype).kind != "c":
        with pytest.raises(
            TypeError, match=f"^y: expected {dtype}, got complex.*, whose imaginary parts would be lost"
        ):
            casts.cast(array, dtype, "y")
        return
    index = find_first_change(array, dtype)
    if index is None:
        cast = casts.cast(array, dtype, "y")
        assert cast.dtype == dtype
        np.testing.assert_array_equal(cast, array.astype(dtype))
        return
    with pytest.raises(TypeError) as caught:
        casts.cast(array, dtype, "y")
    place = f" at index {tuple(index)}" if index else ""
    assert str(caught.value).startswith(
        f"y: can't cast {source_dtype} to {dtype} without changing {array[index].item()!r}{place}: "
    )


@given(st.integers(0, 3 * casts._BLOCK_SIZE - 1), st.booleans())
@limit_examples(10)
def test_cast_error_names_the_changed_number(position, transposed):
    array = np.ones(3 * casts._BLOCK_SIZE).reshape(-1, 6)
    array = array.T if transposed else array
    index = tuple(map(int, np.unravel_index(position, array.shape)))
    array[index] = 0.5
    with pytest.raises(TypeError) as caught:
        casts.cast(array, "int8", "y")
    assert f"changing 0.5 at index {index}: " in str(caught.value)


def test_safe_cast_reads_no_values(monkeypatch):
    def refuse(values, dtype):
        raise AssertionError

    monkeypatch.setattr(casts, "_mask_changed_numbers", refuse)
    for source_dtype in DTYPES:
        array = np.ones(3, source_dtype)
        assert casts.cast(array, source_dtype, "y") is array
        for dtype in DTYPES:
            if np.can_cast(source_dtype, dtype, "safe") and not (
                source_dtype.endswith("int64") and np.dtype(dtype).kind in "fc"
            ):
                assert casts.cast(array, dtype, "y").dtype == dtype


@pytest.mark.parametrize("value", ["a", ["a"], [None], np.zeros(2, "datetime64[s]"), [[1], [1, 2]], [1 << 70], b"1"])
def test_cast_refuses_non_numbers(value):
    with pytest.raises(TypeError, match="^y: expected (numbers|an array), got"):
        casts.cast(value, "float64", "y")


@pytest.mark.parametrize("nested", [lambda x: x, lambda x: [x, x], lambda x: [[0.0] * 4, ([0.0] * 4, x)]])
def test_cast_finds_masked_arrays_in_lists(nested):
    with pytest.raises(TypeError, match="^y: expected an array, got a masked one, whose mask would be lost"):
        casts.check_dense(nested(MASKED), "y")
    casts.check_dense(nested(np.ma.masked_array(np.ones(4))), "y")  # nothing is masked


# -- trainers ----------------------------------------------------------------------------------------------------

#: Values that a bvector can't hold, and the message for each.
REFUSED = {
    "a fraction": ([0.0, 1.0, 0.7, 1.0], r"can't cast float64 to int8 without changing 0.7 at index \(2,\)"),
    "NaN": ([0.0, 1.0, np.nan, 1.0], r"can't cast float64 to int8 without changing nan at index \(2,\)"),
    "a large integer": ([0, 1, 200, 1], r"can't cast int64 to int8 without changing 200 at index \(2,\)"),
    "an imaginary part": ([0, 1, 1j, 1], "expected int8, got complex128, whose imaginary parts would be lost"),
    "a mask": (MASKED, "expected an array, got a masked one, whose mask would be lost"),
}
X = np.linspace(0.1, 0.8, 8).reshape(4, 2)


def make_mixed_dtype_trainer():
    x, y, w = tensor.fmatrix("x"), tensor.bvector("y"), shared(np.zeros(2, "float32"), "w")
    loss = (y * tensor.dot(x, w) ** 0).mean()
    return make_trainer(loss, [w], x, y, sgd, validate={"mean": y.mean() + 0 * x.sum()})


@pytest.mark.parametrize("name", REFUSED)
def test_trainer_refuses_casts_that_change_targets(fork, name):
    fork(1)
    targets, message = REFUSED[name]
    new_trainer, good = make_mixed_dtype_trainer(), np.array([0, 1, 0, 1], "int8")
    targets_data = targets if name == "a mask" else np.array(targets)
    with pytest.raises(TypeError, match=f"^x_data, y_data: 'y': {message}"):
        new_trainer.epochs(X, targets_data, 2, 1)
    with pytest.raises(TypeError, match=f"^valid: 'y': {message}"):
        new_trainer.epochs(X, good, 2, 1, valid=(X, targets_data))
    with pytest.raises(TypeError, match="^valid: 'x': can't cast float64 to float32 without changing 1e.299"):
        new_trainer.epochs(X, good, 2, 1, valid=(X * 1e300, good))


def test_trainer_accepts_targets_of_equal_value(fork):
    fork(1)
    new_trainer = make_mixed_dtype_trainer()
    for dtype in ("int64", "float64", "bool"):
        report = next(
            new_trainer.epochs(X, np.array([0, 1, 1, 1], dtype), 2, 1, valid=(X, np.array([0, 0, 0, 1], dtype)))
        )
        assert (report.loss, report.validation) == (0.75, {"mean": 0.25})
        new_trainer = new_trainer if dtype == "bool" else make_mixed_dtype_trainer()


@pytest.mark.parametrize("place", ["training", "validation"])
def test_trainer_refuses_casts_that_change_loader_rows(fork, place):
    fork(1)
    rows = ColumnRows(X, [0, 1, 200, 1])
    with pytest.raises(
        LoadError, match=r"row 2 can't be read .*array 1: can't cast int64 to int8 without changing 200"
    ):
        if place == "training":
            next(make_mixed_dtype_trainer().epochs(Loader(rows, shuffle=False), None, 2, 1))
        else:
            next(make_mixed_dtype_trainer().epochs(X, np.zeros(4, "int8"), 2, 1, valid=Loader(rows, shuffle=False)))


def test_serial_step_refuses_masked_arrays():
    x, y, w = tensor.dmatrix("x"), tensor.dvector("y"), shared(np.zeros(2), "w")
    step = make_train_function_serial(((tensor.dot(x, w) - y) ** 2).mean(), [w], x, y, sgd, learning_rate=0.1)
    with pytest.raises(TypeError, match="^x_data, y_data: expected an array, got a masked one"):
        step(X, MASKED)


# -- loaders -----------------------------------------------------------------------------------------------------


def make_source(kind, folder, y):
    """Return the rows of X and y as a source of this kind."""
    if kind == "arrays":
        return [X, y]
    if kind == "npy":
        for name, array in (("x", X), ("y", y)):
            np.save(folder / name, array)
        return [loading.npy(folder / "x.npy"), loading.npy(folder / "y.npy")]
    if kind == "npz":
        np.savez(folder / "xy.npz", x=X, y=y)
        return [loading.npz(folder / "xy.npz", "x"), loading.npz(folder / "xy.npz", "y")]
    if kind == "hdf5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(folder / "xy.h5", "w") as file:
            file["x"], file["y"] = X, y
        return [loading.hdf5(folder / "xy.h5", "x"), loading.hdf5(folder / "xy.h5", "y")]
    table = ColumnRows(X, y)
    return table if kind == "an object" else lambda: (table[i] for i in range(len(table)))


@pytest.mark.parametrize("kind", ["arrays", "npy", "npz", "hdf5", "an object", "an iterable"])
def test_loader_refuses_casts_that_change_values(tmp_path, kind):
    y = np.array([1, 0, 200, 1])
    variables = [tensor.fmatrix("x"), tensor.bvector("y")]
    loader = Loader(make_source(kind, tmp_path, y), shuffle=False, vars=variables, on_error="skip")
    try:
        rows, labels = zip(*[(x.copy(), y.copy()) for x, y in loader.arrays(0, 2)], strict=True)
        np.testing.assert_array_equal(np.concatenate(rows), X[[0, 1, 3]].astype("float32"))  # rounded
        assert np.concatenate(labels).tolist() == [1, 0, 1]
        assert (labels[0].dtype, loader.n_skipped) == ("int8", 1)
    finally:
        loader.close()


@pytest.mark.parametrize(
    ("y", "message"),
    [
        ([1, 0, -129, 1], "can't cast int64 to int8 without changing -129"),
        ([1.0, 0.0, np.nan, 1.0], "can't cast float64 to int8 without changing nan"),
        ([1, 0, np.ma.masked, 1], "expected an array, got a masked one, whose mask would be lost"),
    ],
)
def test_loader_names_the_row_that_cannot_be_cast(y, message):
    rows = ColumnRows(X, y) if y[2] is np.ma.masked else [X, np.array(y)]
    loader = Loader(rows, shuffle=False, vars=[tensor.fmatrix("x"), tensor.bvector("y")])
    try:
        with pytest.raises(LoadError, match=rf"^row 2 can't be read \(row 2, epoch 0\): TypeError: array 1: {message}"):
            list(loader.arrays(0, 2))
    finally:
        loader.close()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([X, [200, 0, 0, 0]], "vars: array 1 of a row, for 'y': can't cast int64 to int8 without changing 200:"),
        ([X, [0.5, 0, 0, 0]], "vars: array 1 of a row, for 'y': can't cast float64 to int8 without changing 0.5:"),
        (
            [X * 1e300, [0] * 4],
            "vars: array 0 of a row, for 'x': can't cast float64 to float32 without changing 1e.299",
        ),
        (ColumnRows(X, [np.ma.masked] * 4), "source: array 1 of a row: expected an array, got a masked one"),
    ],
)
def test_loader_refuses_an_uncastable_first_row(source, message):
    source = [source[0], np.array(source[1])] if isinstance(source, list) else source
    with pytest.raises(TypeError, match=f"^{message}"):
        Loader(source, vars=[tensor.fmatrix("x"), tensor.bvector("y")])


PICTURE = np.ones((1, 2, 2))


@pytest.mark.parametrize(
    ("provoke", "message"),
    [
        (lambda: CropMirror(scale=1e300), r"scale: can't cast float64 to float32 without changing 1e\+300"),
        (lambda: CropMirror(mean=[0.1, 1e300]), r"mean: can't cast float64 to float32 without changing 1e\+300"),
        (lambda: CropMirror(mean=[1j]), "mean: expected float32, got complex128, whose imaginary parts would be lost"),
        (lambda: CropMirror(mean=np.ma.masked_array([1.0], [True])), "mean: expected an array, got a masked one"),
        (
            lambda: CropMirror(mean=1, center=True)((PICTURE * 1j,), None),
            "CropMirror: expected float32, got complex128",
        ),
        (
            lambda: CropMirror(mean=1, center=True)((PICTURE * 1e300,), None),
            "CropMirror: can't cast float64 to float32",
        ),
        (lambda: CropMirror(mean=1, center=True)((PICTURE.astype(int) + 2**24,), None), "CropMirror: can't cast int64"),
        (
            lambda: CropMirror()((np.ma.masked_array(PICTURE, PICTURE > 0),), None),
            "CropMirror: expected an array, got a",
        ),
        (lambda: Images(["a.jpg"], 2, [1 << 40]), "labels: can't cast int64 to int32 without changing 1099511627776"),
        (lambda: Images(["a.jpg"], 2, np.ma.masked_array([1], [True])), "labels: expected an array, got a masked one"),
    ],
)
def test_augmentation_and_labels_refuse_changing_casts(provoke, message):
    pytest.importorskip("PIL")
    with pytest.raises(TypeError, match=f"^{message}"):
        provoke()


# -- other packages ----------------------------------------------------------------------------------------------


def test_data_setitem_refuses_changing_casts(two_ranks_per_test):
    d = synk.data(np.zeros(3, "int8"))
    for value in (300, 0.7, np.nan, 1j, [1, 2, 200], "1"):
        with pytest.raises(TypeError, match="^value: "):
            d[:] = value
    assert d.data.tolist() == [0, 0, 0]
    d[1:] = [2.0, -128]
    assert d.data.tolist() == [0, 2, -128]


def test_large_integers_are_not_cast_to_floats(two_ranks_per_test):
    large, message = np.array([0, 2**53 + 1]), r"without changing 9007199254740993 at index \(1,\)"
    x = tensor.dvector("x")
    f = synk.function([x], (x.sum(), "sum"))
    with pytest.raises(TypeError, match=f"^input 0 .*{message}"):
        f(large)
    assert float(f(np.array([0, 2**53]))) == 2.0**53
    for take in (synk.data(dtype="float64", ndim=1).set_value, lambda value: synk.data(value, dtype="float64")):
        with pytest.raises(TypeError, match=message):
            take(large)


def write(context, rows, value):
    """Return the message of the error that a write of `value` to rows raises, or None."""
    try:
        rows.write(value)
    except TypeError as error:
        return str(error)


def call(context, function, value):
    """Return the message of the error that a call with `value` raises on a rank, or None."""
    try:
        function(value)
    except TypeError as error:
        return str(error)


def test_run_programs_refuse_changing_casts(fork):
    fork(1)
    rows, x = synk.data(np.zeros(4, "int8")), tensor.dvector("x")
    f = synk.function([x], x.sum())
    assert synk.run(write, rows, np.full(4, 200))[0].startswith("value: can't cast int64 to int8 without changing 200")
    assert synk.run(write, rows, MASKED)[0].startswith("value: expected an array, got a masked one")
    assert "value: expected an array, got a masked one" in synk.run(call, f, MASKED)[0]
    assert rows.data.tolist() == [0] * 4


def test_launcher_class_refuses_changing_casts():
    from types import SimpleNamespace

    from synkhronos.launcher import Model

    class Labels(Model):
        batch_size = 2

        def build(self):
            self.inputs, self.params = [SimpleNamespace(name="y", type=SimpleNamespace(dtype="int8", ndim=1))], []

        def load(self):
            return [np.array([0, 200, 0, 200])], []

    model = Labels({"rank": 0, "size": 1, "seed": 0})
    with pytest.raises(TypeError, match="^Labels, data of 'y': can't cast int64 to int8 without changing 200"):
        for _ in range(2):
            model.next_batch(ModelRecorder(0))
