"""Errors of loaders: wrong arguments, files and rows."""

import os
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
from library import shared, tensor
from loading_sources import DamagedPictures, NumberedPictures, PictureIterable
from messages import raises

import synkhronos as synk
from synkhronos import loading
from synkhronos.loading import CropMirror, Images, Loader, LoadError
from synkhronos.training import make_trainer
from synkhronos.training.updates import sgd


@pytest.fixture
def data_files(tmp_path, monkeypatch):
    """Give a folder with files of many kinds."""
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("neither fish nor flesh")
    np.save("scalar.npy", 3.0)
    np.save("objects.npy", np.array([None, {}]), allow_pickle=True)
    np.save("x.npy", np.ones((2, 3)))
    np.save("y.npy", np.ones((2, 4)))
    np.savez("xy.npz", x=np.ones(2), y=np.ones(2))
    np.savez_compressed("compressed.npz", x=np.ones(2))
    with zipfile.ZipFile("others.npz", "w") as archive:
        archive.writestr("x", b"no array")
        archive.writestr("y.npy", b"")
    Path("empty/class").mkdir(parents=True)
    return tmp_path


def write_npz_file_of_records():
    """Write records whose field's name NumPy can write in a header of version 3.0 only."""
    with pytest.warns(UserWarning, match="format 3.0"):
        np.savez("records.npz", x=np.zeros(2, [("\N{GREEK SMALL LETTER ALPHA}", "f4")]))
    return "records.npz"


def write_hdf5_file():
    h5py = pytest.importorskip("h5py", reason="the extra `hdf5` is not installed")
    with h5py.File("d.h5", "w") as file:
        file["x"] = np.ones(3)
    return "d.h5"


def write_virtual_hdf5_file():
    """Write a data set whose rows are in another file, which is missing."""
    h5py = pytest.importorskip("h5py", reason="the extra `hdf5` is not installed")
    layout = h5py.VirtualLayout((3,), "f8")
    layout[:] = h5py.VirtualSource(write_hdf5_file(), "x", shape=(3,))
    with h5py.File("virtual.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    assert loading.hdf5("virtual.h5", "x")[2] == 1
    os.remove("d.h5")
    return "virtual.h5"


def call_without_module(module, action):
    original = sys.modules.get(module)
    sys.modules[module] = None
    try:
        action()
    finally:
        del sys.modules[module]
        if original is not None:
            sys.modules[module] = original


def request_first_batch(*args, batch_size=4, **kwargs):
    """Request a batch."""
    loader = Loader(*args, **kwargs)
    try:
        next(loader.arrays(0, batch_size))
    finally:
        loader.close()


def open_epoch(source=None, **kwargs):
    Loader(NumberedPictures(10) if source is None else source).arrays(**{"epoch": 0, "batch_size": 2, **kwargs})


def request_batch_beyond_memory():
    request_first_batch([np.broadcast_to(np.float64(1), (10, 1 << 50))], shuffle=False)


def load_from_unimportable_module():
    module = types.ModuleType("nowhere_to_be_found")
    exec("class Source:\n  def __len__(self): return 3\n  def __getitem__(self, row): return (row,)", vars(module))
    module.Source.__module__ = "nowhere_to_be_found"
    sys.modules["nowhere_to_be_found"] = module
    try:
        request_first_batch(module.Source())
    finally:
        del sys.modules["nowhere_to_be_found"]


class UnpicklableSource:
    """An object that can't be pickled."""

    def __init__(self):
        self.generator = (i for i in range(3))

    def __len__(self):
        return 3

    def __getitem__(self, row):
        return (row,)


def train_a_step(x_data, y_data):
    synk.fork(1, use_gpu=False)
    x, y = tensor.dtensor4("x"), tensor.dvector("y")
    w = shared(np.zeros(()), "w")
    trainer = make_trainer(((w - y) ** 2).mean() + 0 * x.sum(), [w], x, y, sgd, learning_rate=0.1)
    next(trainer.epochs(x_data, y_data, 2, 1))


def make_loader(**kwargs):
    return Loader(NumberedPictures(10), **kwargs)


#: Calls by name: the error's type, the argument or file that it names, and the call.
CALLS = {
    "a set of rows": (TypeError, "source", lambda: Loader({1, 2})),
    "a number": (TypeError, "source", lambda: Loader(3)),
    "a path": (TypeError, "source", lambda: Loader("x.npy")),
    "a generator": (TypeError, "source", lambda: Loader(i for i in range(3))),
    "no arrays": (ValueError, "source", lambda: Loader([])),
    "no rows": (ValueError, "source", lambda: Loader(NumberedPictures(0))),
    "arrays without rows": (ValueError, "source", lambda: Loader([np.ones((0, 2))])),
    "arrays of different lengths": (ValueError, "source", lambda: Loader([np.ones(3), np.ones(4)])),
    "an array of strings": (TypeError, "source", lambda: Loader([np.array(["a"])])),
    "an iterable of None": (TypeError, "source", lambda: Loader(lambda: [None])),
    "a number in place of an array": (ValueError, "source", lambda: Loader([3])),
    "a masked array": (TypeError, "source", lambda: Loader([np.ma.masked_array([1, 2], [0, 1])])),
    "rows that are strings": (TypeError, "source", lambda: Loader(lambda: iter(["abc"]))),
    "a source that can't be sent": (TypeError, "source", lambda: request_first_batch(UnpicklableSource())),
    "the first row is damaged": (LoadError, "/pictures/0.jpg", lambda: Loader(DamagedPictures(10, (0,)))),
    "all rows are damaged": (
        LoadError,
        "/pictures/9.jpg",
        lambda: Loader(DamagedPictures(10, range(10)), on_error="skip"),
    ),
    "no augmentation": (TypeError, "augment", lambda: make_loader(augment="mirror")),
    "processes": (ValueError, "processes", lambda: make_loader(processes=0)),
    "half a process": (TypeError, "processes", lambda: make_loader(processes=1.5)),
    "too many processes": (ValueError, "processes", lambda: make_loader(processes=2000)),
    "depth": (ValueError, "depth", lambda: make_loader(depth=1)),
    "shuffle": (TypeError, "shuffle", lambda: make_loader(shuffle="yes")),
    "on_error": (ValueError, "on_error", lambda: make_loader(on_error="ignore")),
    "vars: how many": (ValueError, "vars", lambda: make_loader(vars=[tensor.dtensor4("x")])),
    "vars: dimensions": (ValueError, "vars", lambda: make_loader(vars=[tensor.dmatrix("x"), tensor.ivector("y")])),
    "vars: dtype": (
        TypeError,
        "vars",
        lambda: make_loader(vars=[tensor.tensor4("x", dtype="bool"), tensor.ivector("y")]),
    ),
    "batch_size": (ValueError, "batch_size", lambda: open_epoch(batch_size=0)),
    "batch_size of a whole batch": (ValueError, "batch_size", lambda: open_epoch(batch_size=11, drop_last=True)),
    "epoch": (ValueError, "epoch", lambda: open_epoch(epoch=-1)),
    "seed": (ValueError, "seed", lambda: open_epoch(seed=1 << 63)),
    "start_row": (ValueError, "start_row", lambda: open_epoch(start_row=11)),
    "rank": (ValueError, "rank", lambda: open_epoch(rank=2, size=2)),
    "no ranks": (RuntimeError, "", lambda: (synk.fork(1, use_gpu=False), synk.close(), make_loader().epoch(0, 2))),
    "data outside of a loop": (RuntimeError, "data", lambda: make_loader().data),
    "the length of an iterable": (TypeError, "", lambda: len(Loader(PictureIterable(3)))),
    "a batch beyond the memory": (MemoryError, "", request_batch_beyond_memory),
    "a depth of a billion": (MemoryError, "", lambda: request_first_batch(NumberedPictures(10), depth=10**9)),
    "a batch of 2**63 rows": (MemoryError, "", lambda: request_first_batch(NumberedPictures(10), batch_size=1 << 63)),
    "a batch of 2**63 rows for ranks": (
        MemoryError,
        "",
        lambda: (synk.fork(1, use_gpu=False), next(make_loader().epoch(0, 1 << 63))),
    ),
    "a size of 2**70": (ValueError, "size", lambda: open_epoch(size=1 << 70)),
    "a module that loaders don't find": (LoadError, "", load_from_unimportable_module),
    "npy: nothing there": (FileNotFoundError, "nothing.npy", lambda: loading.npy("nothing.npy")),
    "npy: another file": (ValueError, "notes.txt", lambda: loading.npy("notes.txt")),
    "npy: objects": (ValueError, "objects.npy", lambda: loading.npy("objects.npy")),
    "npy: no rows": (ValueError, "scalar.npy", lambda: loading.npy("scalar.npy")),
    "npy: other rows": (ValueError, "", lambda: loading.npy(["x.npy", "y.npy"])),
    "npy: no files": (ValueError, "paths", lambda: loading.npy([])),
    "npy: a number": (TypeError, "paths", lambda: loading.npy(3)),
    "npz: another file": (ValueError, "notes.txt", lambda: loading.npz("notes.txt", "x")),
    "npz: compressed": (ValueError, "compressed.npz", lambda: loading.npz("compressed.npz", "x")),
    "npz: records": (TypeError, "records.npz", lambda: loading.npz(write_npz_file_of_records(), "x")),
    "npz: no array of numpy.savez": (KeyError, "others.npz", lambda: loading.npz("others.npz", "x")),
    "npz: an empty array": (ValueError, "others.npz", lambda: loading.npz("others.npz", "y")),
    "npz: another name": (KeyError, "", lambda: loading.npz("xy.npz", "z")),
    "hdf5: nothing there": (
        FileNotFoundError,
        "nothing.h5",
        lambda: (write_hdf5_file(), loading.hdf5("nothing.h5", "x")),
    ),
    "hdf5: another file": (ValueError, "notes.txt", lambda: (write_hdf5_file(), loading.hdf5("notes.txt", "x"))),
    "hdf5: another name": (KeyError, "", lambda: loading.hdf5(write_hdf5_file(), "z")),
    "hdf5: a part is missing": (FileNotFoundError, "virtual.h5", lambda: loading.hdf5(write_virtual_hdf5_file(), "x")),
    "hdf5: not installed": (ImportError, "", lambda: call_without_module("h5py", lambda: loading.hdf5("d.h5", "x"))),
    "pictures: not installed": (
        ImportError,
        "",
        lambda: call_without_module("PIL.Image", lambda: Images(["x.jpg"], 5)),
    ),
    "pictures: no list": (TypeError, "files", lambda: Images("x.jpg", 5)),
    "pictures: none": (ValueError, "files", lambda: Images([], 5)),
    "pictures: labels": (ValueError, "labels", lambda: Images(["x.jpg", "y.jpg"], 5, [1, 2, 3])),
    "pictures: mode": (ValueError, "mode", lambda: Images(["x.jpg"], 5, mode="CMYK")),
    "pictures: size": (ValueError, "size", lambda: Images(["x.jpg"], 0)),
    "pictures: a missing file": (LoadError, "missing.jpg", lambda: Loader(Images(["missing.jpg"], 5))),
    "folder: none": (FileNotFoundError, "folder", lambda: loading.image_folder("/nowhere", 5)),
    "folder: no pictures": (FileNotFoundError, "", lambda: loading.image_folder("empty", 5)),
    "crop": (LoadError, "crop", lambda: make_loader(augment=CropMirror(7))),
    "crop of a vector": (LoadError, "CropMirror", lambda: Loader([np.ones(3)], augment=CropMirror(1))),
    "mean": (ValueError, "mean", lambda: CropMirror(mean=np.ones((2, 2)))),
    "mean of other pictures": (LoadError, "mean", lambda: make_loader(augment=CropMirror(mean=[1, 2, 3]))),
    "trainer: two loaders": (TypeError, "y_data", lambda: train_a_step(make_loader(), make_loader())),
    "trainer: a loader of targets": (TypeError, "y_data", lambda: train_a_step(np.ones((10, 2, 6, 6)), make_loader())),
    "source: empty tuples": (ValueError, "source", lambda: Loader(lambda: iter([(), ()]))),
    "augment: an empty tuple": (ValueError, "source", lambda: Loader([np.ones(3)], augment=lambda row, random: ())),
    "trainer: an iterable": (TypeError, "", lambda: train_a_step(Loader(PictureIterable(9)), None)),
}


@pytest.mark.parametrize("case", CALLS)
def test_loader_error_names_the_argument(data_files, fork, case):
    error, name, call = CALLS[case]
    with raises(error, name):
        call()
