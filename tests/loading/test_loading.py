"""Loaders: the order and content of rows, for any number of ranks and loaders."""

import contextlib
import os
import resource
import struct
import subprocess
import tempfile
import threading
import time
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from library import limit_examples
from loading_sources import (
    BlockedPicture,
    DamagedPictures,
    DeepErrorPictures,
    MixedDtypeRows,
    NumberedPictures,
    OwnArrays,
    PictureIterable,
    SlowPictures,
    add_noise,
    add_one_in_place,
    make_order,
    make_picture,
)
from system import wait_for_state

from synkhronos import loading
from synkhronos.loading import CropMirror, Loader
from synkhronos.loading.augment import augment_row
from synkhronos.loading.ring import ReadPlan, has_exited


def crop_row(row, seed, epoch, crop, mirror, mean, size=6):
    """Return the row that `CropMirror` returns, computed step by step."""
    random = np.random.default_rng((seed, epoch, row, 1))
    top, left = random.integers(size - crop + 1, size=2)
    cut = make_picture(row, size).astype("float32")[:, top : top + crop, left : left + crop] - np.float32(mean)
    return cut[:, :, ::-1] if mirror and random.integers(2) else cut


def check_and_read_labels(batches):
    """Check the pictures, and return the labels of each batch."""
    labels = []
    for pictures, numbers in batches:
        for image, number in zip(pictures, numbers, strict=True):
            np.testing.assert_array_equal(image, make_picture(number))
        labels.append(numbers.tolist())
    return labels


@pytest.mark.usefixtures("forked_loaders")
@pytest.mark.parametrize("kind", ["contiguous", "strided", "an object", "an iterable"])
def test_augmentation_may_overwrite_its_row(kind):
    rows = np.zeros((3, 4))[:, ::2] if kind == "strided" else np.zeros((3, 2))
    source = {"an object": OwnArrays(rows), "an iterable": list(rows).copy}.get(kind, [rows])
    loader = Loader(source, augment=add_one_in_place, shuffle=False)
    try:
        for epoch in range(2):
            assert [batch[0].tolist() for batch in loader.arrays(epoch, 3)] == [[[1, 1]] * 3]
    finally:
        loader.close()
    assert not rows.any()


def test_crop_reads_only_the_window_of_a_picture():
    picture = np.zeros((1, 4, 4))
    (window,) = augment_row(picture, CropMirror(2, center=True), 0, 0, 0)
    assert np.shares_memory(window, picture)  # a copy of each whole picture would slow a loader down


# -- order ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("forked_loaders")
@limit_examples(8)
@given(
    count=st.integers(1, 30),
    batch=st.integers(1, 12),
    processes=st.integers(1, 3),
    size=st.integers(1, 3),
    depth=st.integers(2, 4),
    seed=st.integers(0, 2**40),
    first=st.integers(0, 5),
    row=st.integers(0, 30),
)
def test_loader_order_follows_seed_and_epoch(count, batch, processes, size, depth, seed, first, row):
    row = min(row, count)
    loader = Loader(NumberedPictures(count), processes=processes, depth=depth)
    try:
        for epoch in range(first, first + 3):
            start_row = row if epoch == first else 0
            orders = [
                check_and_read_labels(loader.arrays(epoch, batch, seed, start_row, rank=rank, size=size))
                for rank in range(size)
            ]
            turns = [batches[turn] for turn in range(len(orders[0])) for batches in orders if turn < len(batches)]
            expected = make_order(count, seed, epoch)[start_row:].tolist()
            assert turns == [expected[i : i + batch] for i in range(0, len(expected), batch)]
    finally:
        loader.close()


@pytest.mark.usefixtures("forked_loaders")
@pytest.mark.parametrize("held", [10, 11, 12])
def test_loader_process_that_is_late_overwrites_no_row_of_a_new_plan(held, tmp_path):
    """The last unit of an epoch is shorter than the unit of the next plan in its slot."""
    loader = Loader(BlockedPicture(13, held, str(tmp_path)), shuffle=False, processes=3, depth=2)
    try:
        batches = loader.arrays(0, 5)
        next(batches), next(batches)  # the first unit is freed, and its slot filled with rows 10 to 12
        while not (tmp_path / "held").exists():
            time.sleep(0.01)
        threading.Timer(0.3, (tmp_path / "go").touch).start()
        assert check_and_read_labels(loader.arrays(1, 5)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12]]
    finally:
        loader.close()


def test_interrupted_start_of_an_epoch_does_not_mix_epochs(monkeypatch):
    loader = Loader(NumberedPictures(10), processes=1)
    try:
        list(loader.arrays(0, 5))  # the loader processes continue with epoch 1

        def interrupt(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(loader._pool.ring, "_wake", interrupt)
            next(loader.arrays(5, 5))
        labels = check_and_read_labels(loader.arrays(1, 5))
        assert np.concatenate(labels).tolist() == make_order(10, 0, 1).tolist()
    finally:
        loader.close()


@pytest.mark.usefixtures("forked_loaders")
@limit_examples(6)
@given(
    processes=st.integers(1, 3),
    crop=st.integers(1, 6),
    mirror=st.booleans(),
    mean=st.sampled_from([0.5, "channels", "picture"]),
    seed=st.integers(0, 100),
)
def test_augmentation_follows_seed_epoch_and_row(processes, crop, mirror, mean, seed):
    means = {"channels": np.array([1.0, 2.0]), "picture": np.arange(72.0).reshape(2, 6, 6)}
    value = means.get(mean, mean)
    loader = Loader(NumberedPictures(13), augment=CropMirror(crop, mirror, value), processes=processes)
    try:
        for epoch in range(2):
            n_rows = 0
            for pictures, numbers in loader.arrays(epoch, 5, seed):
                assert pictures.dtype == np.float32
                for image, row in zip(pictures, numbers, strict=True):
                    top, left = np.random.default_rng((seed, epoch, row, 1)).integers(6 - crop + 1, size=2)
                    here = {
                        "channels": means["channels"][:, None, None],
                        "picture": means["picture"][:, top : top + crop, left : left + crop],
                    }.get(mean, mean)
                    np.testing.assert_array_equal(image, crop_row(row, seed, epoch, crop, mirror, here))
                    n_rows += 1
            assert n_rows == 13
    finally:
        loader.close()


def test_loader_accepts_the_users_augmentation(load):
    processed_rows = [
        [p.tolist() for p, _ in load(NumberedPictures(9), augment=add_noise, processes=n).arrays(4, 4, 7)]
        for n in (1, 2, 3)
    ]
    assert processed_rows[0] == processed_rows[1] == processed_rows[2]
    first = make_order(9, 7, 4)[0]
    noise = np.random.default_rng((7, 4, first, 1)).integers(1000, size=(2, 6, 6))
    np.testing.assert_array_equal(processed_rows[0][0][0], make_picture(first) + noise)


def test_augmentation_draws_differ_from_the_order():
    order_generator, augment_generator = np.random.default_rng((3, 1)), loading.augment.make_row_generator(3, 1, 0)
    assert order_generator.integers(1 << 60) != augment_generator.integers(1 << 60)


def test_loader_without_shuffle_keeps_order(load):
    assert check_and_read_labels(load(NumberedPictures(5), shuffle=False).arrays(3, 2)) == [[0, 1], [2, 3], [4]]


def test_loader_arrays_returns_whole_batches(load):
    loader = load(NumberedPictures(11))
    assert [len(labels) for labels in check_and_read_labels(loader.arrays(0, 4, drop_last=True))] == [4, 4]
    turns = [check_and_read_labels(loader.arrays(0, 2, drop_last=True, rank=rank, size=3)) for rank in range(3)]
    assert [len(turn) for turn in turns] == [1, 1, 1]


@given(
    count=st.integers(1, 200),
    unit=st.integers(1, 20),
    size=st.integers(1, 5),
    row=st.integers(0, 200),
    drop_last=st.booleans(),
)
def test_loader_plan_assigns_each_position_to_one_rank(count, unit, size, row, drop_last):
    row = min(row, count)
    plans = [ReadPlan(0, row, 0, rank, size, int(drop_last)) for rank in range(size)]
    places = sorted(
        place
        for plan in plans
        for start in plan.list_unit_starts(count, unit)
        for place in range(start, min(count, start + unit))
    )
    if drop_last:
        assert len({len(plan.list_unit_starts(count, unit)) for plan in plans}) == 1
        assert count - row - len(places) < size * unit
    assert places == list(range(row, row + len(places) if drop_last else count))


# -- going on ------------------------------------------------------------------------------------------------


def test_loader_prefetches_the_next_epoch(load):
    loader = load(NumberedPictures(10), processes=2)
    for epoch in range(5):
        assert sum(check_and_read_labels(loader.arrays(epoch, 3)), []) == make_order(10, 0, epoch).tolist()
    assert loader._pool.ring.plan_number == 1


def test_loader_continues_after_a_break_at_the_last_batch(load):
    loader = load(NumberedPictures(10), processes=2)
    for epoch in range(4):  # as a class of the launcher does, which counts its batches
        batches = loader.arrays(epoch, 3, drop_last=True)
        assert (
            sum((check_and_read_labels([next(batches)])[0] for _ in range(3)), [])
            == make_order(10, 0, epoch)[:9].tolist()
        )
    for epoch in (4, 5):
        _, numbers = next(loader.arrays(epoch, 3, drop_last=True))
        assert numbers.tolist() == make_order(10, 0, epoch)[:3].tolist()
        assert (
            sum(check_and_read_labels(loader.arrays(epoch, 3, start_row=3, drop_last=True)), [])
            == make_order(10, 0, epoch)[3:9].tolist()
        )
    assert loader._pool.ring.plan_number == 1


def test_loader_resumes_at_a_batch(load):
    loader = load(NumberedPictures(20), processes=2)
    for i, (_, numbers) in enumerate(loader.arrays(1, 4)):
        if i == 2:
            assert numbers.tolist() == make_order(20, 0, 1)[8:12].tolist()
            break
    assert sum(check_and_read_labels(loader.arrays(1, 4, start_row=12)), []) == make_order(20, 0, 1)[12:].tolist()
    assert (
        sum(check_and_read_labels(loader.arrays(2, 5, seed=9)), []) == make_order(20, 9, 2).tolist()
    )  # batches of another size, too
    assert len(loader._pool.pids) == 2


@pytest.mark.usefixtures("forked_loaders")
def test_loader_discards_rows_of_an_old_plan(load):
    loader = load(SlowPictures(40, 0.002), processes=3, depth=3)
    for epoch in range(12):
        for _ in loader.arrays(epoch, 6):
            break  # while the loaders keep reading
        assert (
            next(iter(check_and_read_labels(loader.arrays(epoch, 6, start_row=epoch))))
            == make_order(40, 0, epoch)[epoch : epoch + 6].tolist()
        )


def test_loader_iterator_ends_when_replaced(load):
    loader = load(NumberedPictures(40), depth=8)
    first = loader.arrays(0, 4)
    next(first)
    second = loader.arrays(0, 4, start_row=20)
    assert check_and_read_labels([next(second)]) == [make_order(40, 0, 0)[20:24].tolist()]
    with pytest.raises(RuntimeError, match="can't continue: another one has started"):
        next(first)
    assert sum(check_and_read_labels(second), []) == make_order(40, 0, 0)[24:].tolist()  # it has not been disturbed


@pytest.mark.parametrize("rows", [6, 600])  # rows that are loaded already are not returned
def test_loader_iterator_ends_when_closed(load, rows):
    loader = load(NumberedPictures(rows))
    batches = loader.arrays(0, 4)
    next(batches)
    loader.close()
    with pytest.raises(RuntimeError, match="can't continue: .* the loader or the ranks were closed"):
        next(batches)


# -- their lives ----------------------------------------------------------------------------------------------


def test_loader_processes_end_when_dropped(load):
    loader = Loader(NumberedPictures(5))
    next(loader.arrays(0, 2))
    (pid,) = loader._pool.pids
    del loader
    wait_for_state(pid, "Z")
    next(load(NumberedPictures(5)).arrays(0, 2))  # a process waits for the ones it starts
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_forked_process_leaves_loaders_to_its_parent(load):
    loader = load(NumberedPictures(12))
    next(loader.arrays(0, 3))
    pid = os.fork()
    if not pid:
        code = 1
        with contextlib.suppress(BaseException):
            code = int(
                check_and_read_labels(loader.arrays(0, 3, start_row=3))
                != [make_order(12, 0, 0)[i : i + 3].tolist() for i in (3, 6, 9)]
            )
            loader.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert sum(check_and_read_labels(loader.arrays(0, 3, start_row=3)), []) == make_order(12, 0, 0)[3:].tolist()
    assert loader._pool.ring.plan_number == 1


def test_loader_counts_waiting_time(load):
    loader = load(SlowPictures(6, 0.05))
    check_and_read_labels(loader.arrays(0, 2))
    assert 0.1 < loader.wait_seconds < 30


# -- contents of rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first, others, words",
    [
        (np.uint8([1, 2]), np.float32([1, 300]), r"cast float32 to uint8 without changing 300.0 at index \(1,\)"),
        (0, 0.5, "cast float64 to int64 without changing 0.5"),
        (np.int8(1), 300, "cast int64 to int8 without changing 300"),  # once 44
        (np.float32(1), 1e300, r"cast float64 to float32 without changing 1e\+300"),  # once infinite
        (1.0, 1j, "expected float64, got complex128, whose imaginary parts would be lost"),
        (1.0, np.ma.masked, "expected an array, got a masked one"),  # once 0
    ],
)
def test_loader_refuses_rows_that_do_not_fit_the_dtype(load, first, others, words):
    with pytest.raises(loading.LoadError, match=f"row 1 can't be read .*array 0: (can't )?{words}"):
        list(load(MixedDtypeRows(first, others), shuffle=False).arrays(0, 3))


def test_loader_casts_rows_up_to_the_first_rows_dtype(load):
    ((rows,),) = load(MixedDtypeRows(np.float64(1.5), np.float32(2.5)), shuffle=False).arrays(0, 3)
    assert rows.dtype == np.float64 and rows.tolist() == [1.5, 2.5, 2.5]


def test_loader_converts_byte_order(load):
    x = np.arange(4, dtype=">f4").reshape(2, 2)
    ((rows,),) = load([x], shuffle=False).arrays(0, 2)
    assert rows.dtype.isnative and rows.tolist() == [[0, 1], [2, 3]]


def test_process_exit_is_detected_without_pidfd(monkeypatch):
    """Python built on an old system, such as conda's, has no pidfd."""
    monkeypatch.delattr(os, "pidfd_open")
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not has_exited(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert has_exited(process.pid)  # a zombie, as its exit status has not been read
    assert has_exited(process.pid)


# -- rows that can't be read ---------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_loader_skips_unreadable_rows(load, processes, capfd):
    bad = (3, 4, 5, 11)
    loader = load(DamagedPictures(16, bad, odd=(7,)), processes=processes, on_error="skip")
    for epoch in range(2):
        numbers = make_order(16, 0, epoch)
        expected = [[r for r in numbers[i : i + 5].tolist() if r not in (*bad, 7)] for i in range(0, 16, 5)]
        assert check_and_read_labels(loader.arrays(epoch, 5)) == [labels for labels in expected if labels]
        assert loader.n_skipped == 5 * (epoch + 1)
    loader.close()
    assert loader.n_skipped == 10
    errors = capfd.readouterr().err
    assert "/pictures/4.jpg is skipped" in errors and "image file is truncated" in errors
    assert "/pictures/7.jpg is skipped, as it can't be read: ValueError: array 0: expected shape (2, 6, 6)" in errors


@pytest.mark.usefixtures("forked_loaders")
@pytest.mark.parametrize("processes", [1, 3])
def test_loader_names_an_unreadable_row(load, processes, tmp_path):
    position = make_order(20, 0, 0).tolist().index(4)
    loader = load(DamagedPictures(20, (4,)), processes=processes)
    labels = []
    with pytest.raises(
        loading.LoadError, match=r"/pictures/4\.jpg can't be read \(row 4, epoch 0\): OSError"
    ) as caught:
        for _, numbers in loader.arrays(0, 3):
            labels += numbers.tolist()
    assert len(labels) == position // 3 * 3  # all batches before it were handed out
    assert (caught.value.epoch, caught.value.row) == (0, len(labels))
    loader.source.bad = ()
    loader.close()
    labels += sum(check_and_read_labels(loader.arrays(0, 3, start_row=caught.value.row)), [])
    assert labels == make_order(20, 0, 0).tolist()


def test_loader_error_shows_the_end_of_a_long_traceback(load):
    with pytest.raises(loading.LoadError) as caught:
        list(load(DeepErrorPictures(2)).arrays(0, 2))
    assert str(caught.value).startswith("/pictures/1.jpg can't be read")
    assert 'raise OSError("the bottom")' in str(caught.value)


def test_loader_continues_after_a_damaged_row(load):
    loader = load(DamagedPictures(12, (make_order(12, 0, 0)[0],)))
    with pytest.raises(loading.LoadError):
        next(loader.arrays(0, 4))
    pids = list(loader._pool.pids)
    assert sum(check_and_read_labels(loader.arrays(0, 4, start_row=4)), []) == make_order(12, 0, 0)[4:].tolist()
    assert loader._pool.pids == pids  # the loader processes continue


# -- sources -------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    """Write the same rows to several kinds of files; return the source argument of each."""
    x = np.random.default_rng(0).normal(size=(17, 2, 3)).astype("float32")
    y = np.arange(17, dtype="int32")
    parts = [slice(0, 6), slice(6, 7), slice(7, 17)]
    for i, part in enumerate(parts):
        np.save(tmp_path / f"x{i}.npy", np.asfortranarray(x[part]) if i == 2 else x[part])
        np.save(tmp_path / f"y{i}.npy", y[part])
        np.savez(tmp_path / f"{i}.npz", images=x[part], labels=y[part])
    names = [tmp_path / f"x{i}.npy" for i in range(3)], [tmp_path / f"y{i}.npy" for i in range(3)]
    archives = [tmp_path / f"{i}.npz" for i in range(3)]
    h5py = pytest.importorskip("h5py", reason="the extra `hdf5` is not installed")
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["group/x"], file["y"] = x, y
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    return (x, y), {
        "arrays": [x, y],
        "npy": [loading.npy(names[0]), loading.npy(names[1])],
        "npz": [loading.npz(archives, "images"), loading.npz(archives, "labels")],
        "hdf5": [loading.hdf5(tmp_path / "d.h5", "group/x"), loading.hdf5(str(tmp_path / "d.h5"), "y")],
        "memmap": [mapped, y],
        "part of a memmap": [mapped[:], y],
    }


@pytest.mark.parametrize("kind", ["arrays", "npy", "npz", "hdf5", "memmap", "part of a memmap"])
def test_loader_reads_files_of_each_kind(files, load, kind):
    (x, y), sources = files
    loader = load(sources[kind], processes=2)
    rows = [(a.copy(), b.copy()) for a, b in loader.arrays(1, 4, seed=5)]
    expected = make_order(17, 5, 1)
    np.testing.assert_array_equal(np.concatenate([a for a, _ in rows]), x[expected])
    np.testing.assert_array_equal(np.concatenate([b for _, b in rows]), y[expected])


def test_loader_of_files_accepts_negative_rows(tmp_path):
    for i in range(2):
        np.save(tmp_path / f"{i}.npy", np.arange(4) + 4 * i)
    rows = loading.npy([tmp_path / "0.npy", tmp_path / "1.npy"])
    assert [int(rows[i]) for i in range(-8, 8)] == 2 * list(range(8))
    for beyond in (-9, 8):
        with pytest.raises(IndexError):
            rows[beyond]


def test_loader_does_not_copy_a_memmap(tmp_path, load):
    array = np.lib.format.open_memmap(tmp_path / "big.npy", "w+", "uint8", (1 << 12, 1 << 20))  # a sparse file of 4 GiB
    array[7, :3] = 1, 2, 3
    loader = load([np.load(tmp_path / "big.npy", mmap_mode="r")], shuffle=False)
    (first,) = next(loader.arrays(0, 8))
    assert first[7, :4].tolist() == [1, 2, 3, 0]


def test_loader_copies_changes_of_a_copy_on_write_memmap(tmp_path, load):
    np.save(tmp_path / "x.npy", np.full(4, 255.0))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="c")
    mapped /= 255
    assert [rows.tolist() for (rows,) in load([mapped], shuffle=False).arrays(0, 4)] == [[1, 1, 1, 1]]


def test_loader_copies_a_memmap_whose_file_is_another_now(tmp_path, load):
    path = tmp_path / "x.npy"
    for i in range(2):
        np.save(tmp_path / "new.npy", np.full(4, i))
        (tmp_path / "new.npy").rename(path)
        if not i:
            mapped = np.load(path, mmap_mode="r")
    assert [rows.tolist() for (rows,) in load([mapped], shuffle=False).arrays(0, 4)] == [[0, 0, 0, 0]]
    path.unlink()
    assert [rows.tolist() for (rows,) in load([mapped], shuffle=False).arrays(0, 4)] == [[0, 0, 0, 0]]


def test_loader_copies_an_unnamed_memmap(load):
    with tempfile.TemporaryFile() as file:
        mapped = np.memmap(file, "i4", "w+", shape=(4,))
        mapped[:] = range(4)
        assert [rows.tolist() for (rows,) in load([mapped], shuffle=False).arrays(0, 4)] == [[0, 1, 2, 3]]


def test_loader_limits_open_files(tmp_path, load):
    names = []
    for i in range(100):
        names.append(tmp_path / f"{i}.npy")
        np.save(names[-1], np.full((2, 3), i))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 70, limits[1]))
    try:
        rows = loading.npy(names)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    (batch,) = next(load(rows).arrays(0, 200))
    np.testing.assert_array_equal(batch[:, 0], make_order(200, 0, 0) // 2)


def test_image_folder_has_rows_and_labels(tmp_path, load):
    image = pytest.importorskip("PIL.Image")
    for name, colour in (("cat", (250, 10, 10)), ("dog", (10, 250, 10)), ("eel", (10, 10, 250))):
        (tmp_path / name).mkdir()
        for i in range(3):
            picture = image.new("RGB", (40 + 7 * i, 30), colour)
            picture.save(tmp_path / name / f"{i}.{'JPEG' if i else 'png'}")
    (tmp_path / "dog" / "notes.txt").write_text("no picture")
    (tmp_path / "dog" / "._0.png").write_text("what another system knows of a picture")
    (tmp_path / "dog" / "more.png").mkdir()
    (tmp_path / ".thumbnails").mkdir()
    image.new("RGB", (4, 4)).save(tmp_path / ".thumbnails" / "0.png")
    pictures = loading.image_folder(tmp_path, size=16)
    assert pictures.classes == ["cat", "dog", "eel"] and len(pictures) == 9
    assert pictures.describe_row(3).endswith("dog/0.png")
    names = []
    for batch, labels in load(pictures, processes=2).arrays(0, 4):
        assert batch.dtype == np.uint8 and batch.shape[1:] == (3, 16, 16) and labels.dtype == np.int32
        for image, label in zip(batch, labels, strict=True):
            assert image.mean(axis=(1, 2)).argmax() == label and np.ptp(image[label]) < 4
            names.append(int(label))
    assert sorted(names) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    grey = loading.Images([pictures.describe_row(0)], 8, mode="L")
    (image,) = grey[0]
    assert image.shape == (1, 8, 8)


@pytest.mark.parametrize("target", ["nowhere.png", "1.png"])
def test_image_folder_broken_link_is_an_unreadable_row(tmp_path, load, target):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "cat").mkdir()
    for i in (0, 2):
        image.new("RGB", (4, 4)).save(tmp_path / "cat" / f"{i}.png")
    (tmp_path / "cat" / "1.png").symlink_to(target)  # "1.png" is a link to itself
    pictures = loading.image_folder(tmp_path, size=4)
    with pytest.raises(loading.LoadError, match="cat/1.png can't be read"):
        list(load(pictures, shuffle=False).arrays(0, 3))
    loader = load(pictures, shuffle=False, on_error="skip")
    assert [len(labels) for _, labels in loader.arrays(0, 3)] == [2]
    assert loader.n_skipped == 1


def test_image_folder_refuses_a_broken_class_link(tmp_path):
    pytest.importorskip("PIL.Image")
    (tmp_path / "dog").mkdir()
    (tmp_path / "dog" / "0.png").write_text("")
    (tmp_path / "cat").symlink_to("nowhere")  # otherwise dogs would be class 0
    with pytest.raises(FileNotFoundError, match="^folder: expected subfolders, got the broken link .*/cat$"):
        loading.image_folder(tmp_path, size=4)


def test_image_is_cropped_at_its_center(tmp_path):
    image = pytest.importorskip("PIL.Image")
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 10:20] = 200
    image.fromarray(wide).save(tmp_path / "wide.png")
    picture, label = loading.Images(["wide.png"], 10, [5], folder=tmp_path)[0]
    assert (picture == 200).all() and label == 5
    image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(tmp_path / "small.png")
    same_size, _ = loading.Images(["small.png"], 4, [0], folder=tmp_path)[0]
    np.testing.assert_array_equal(same_size, np.arange(48).reshape(4, 4, 3).transpose(2, 0, 1))


def test_image_of_more_than_8_bits_is_refused(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name, pixels in (("deep.png", np.uint16([[0, 255], [256, 65535]])), ("real.tif", np.float32([[0, 0.5]]))):
        image.fromarray(pixels).save(tmp_path / name)
        with pytest.raises(ValueError, match="expected a picture of 8 bits per channel"):
            loading.Images([tmp_path / name], 2)[0]
    pixels = np.full((2, 2, 3), 300, ">u2")  # Pillow converts these to "RGB" and keeps their upper byte, 1
    (tmp_path / "deep.ppm").write_bytes(b"P6 2 2 65535\n" + pixels.tobytes())
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in pixels))),
        (b"IEND", b""),
    ]
    chunks = [struct.pack(">I", len(d)) + name + d + struct.pack(">I", zlib.crc32(name + d)) for name, d in parts]
    (tmp_path / "colours.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    for name in ("deep.ppm", "colours.png"):
        with pytest.raises(ValueError, match="expected a picture of 8 bits per channel"):
            loading.Images([tmp_path / name], 2)[0]


def test_damaged_image_is_named(tmp_path, load):
    image = pytest.importorskip("PIL.Image")
    for i in range(4):
        image.fromarray(np.random.default_rng(i).integers(255, size=(50, 50, 3), dtype=np.uint8)).save(
            tmp_path / f"{i}.jpg"
        )
    whole = (tmp_path / "2.jpg").read_bytes()
    (tmp_path / "2.jpg").write_bytes(whole[: len(whole) // 2])
    loader = load(loading.Images([tmp_path / f"{i}.jpg" for i in range(4)], 20), processes=2)
    with pytest.raises(loading.LoadError, match=rf"{tmp_path}/2.jpg can't be read .* truncated"):
        for _ in loader.arrays(0, 2):
            pass


@pytest.mark.usefixtures("forked_loaders")
@pytest.mark.parametrize("count", [1, 6, 7, 12])
def test_loader_of_an_iterable_keeps_its_order(load, count):
    loader = load(PictureIterable(count), processes=3)
    for epoch in range(3):
        assert sum(check_and_read_labels(loader.arrays(epoch, 3)), []) == list(range(count))
    assert sum(check_and_read_labels(loader.arrays(0, 3, start_row=2)), []) == list(range(2, count))
    for size in (2, 3):
        turns = [check_and_read_labels(loader.arrays(0, 3, rank=rank, size=size)) for rank in range(size)]
        assert sorted(sum(sum(turns, []), [])) == list(range(count))
        whole = [
            check_and_read_labels(loader.arrays(0, 3, rank=rank, size=size, drop_last=True)) for rank in range(size)
        ]
        assert all(len(labels) == 3 for epoch in whole for labels in epoch)
        assert len({len(epoch) for epoch in whole}) == 1


def test_loader_accepts_a_function_that_returns_an_iterable(load):
    assert check_and_read_labels(load(lambda: iter(PictureIterable(5))).arrays(0, 2)) == [[0, 1], [2, 3], [4]]
    assert sum(len(x) for (x,) in load(lambda: (np.ones(3) for _ in range(4))).arrays(0, 3)) == 4


def test_loader_names_an_iterable_that_raises(load):
    loader = load(PictureIterable(10, fails_at=7), on_error="skip")
    labels = []
    with pytest.raises(
        loading.LoadError, match="row 7 of PictureIterable can't be read .*: OSError: the archive ends here"
    ):
        for _, numbers in loader.arrays(0, 2):
            labels += numbers.tolist()
    assert labels == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("how", [{"drop_last": True}, {"start_row": 9}])
def test_loader_with_skip_reports_an_iterable_that_raises(load, how):
    with pytest.raises(
        loading.LoadError, match="row 7 of PictureIterable can't be read .*: OSError: the archive ends here"
    ):
        list(load(PictureIterable(10, fails_at=7)).arrays(0, 3, **how))


def test_loader_processes_share_arrays(load):
    x = np.random.default_rng(0).normal(size=(64, 1 << 14))
    loader = load([x, np.arange(64)], processes=3)
    for rows, numbers in loader.arrays(0, 16):
        np.testing.assert_array_equal(rows, x[numbers])
    for pid in loader._pool.pids:
        with open(f"/proc/{pid}/status") as status:
            private = next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
        assert private < 60_000  # kilobytes; the array is 8 megabytes
