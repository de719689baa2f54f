"""What a loader reads.

`npy`, `npz`, `hdf5`
    Rows of arrays in files.
`Images`, `image_folder`
    Pictures, a file each.
`source_of`
    What a user passes, as a source.
`Arrays`, `Stream`
    Sources made of arrays, and of an iterable.
`row_name`
    What to call a row in an error.
"""

from __future__ import annotations

import mmap
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from synkhronos.casts import cast, check_dense
from synkhronos.checks import at_least, one_of, package
from synkhronos.data import Data

#: Files that are open at once, in each process.
_OPEN = 64
#: How names of picture files end.
_PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".webp", ".tif", ".tiff")

#: A file, or several one behind the other.
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class Rows:
    """Rows of arrays in files, those of each file behind those of the one before.

    Files are opened when rows of theirs are asked for, in each process anew: ``opened(path)`` returns the array in a
    file, whatever has ``shape``, ``dtype`` and rows; errors call it by its ``name``, if it has one there.
    """

    def __init__(self, paths: Sequence[str], opened: Callable[[str], Any], name: str | None = None):
        self.paths, self._opened, self._name = list(paths), opened, name
        self._arrays: dict[int, Any] = {}
        arrays = [self._array(i) for i in range(len(self.paths))]
        for path, array in zip(self.paths, arrays, strict=True):
            if not array.shape:
                raise ValueError(f"{self._called(path)}: expected an array with rows, got one of 0 dimensions")
            if array.dtype.kind not in "biufc":
                raise TypeError(f"{self._called(path)}: expected numbers, got an array of {array.dtype}")
            if array.shape[1:] != arrays[0].shape[1:] or array.dtype != arrays[0].dtype:
                raise ValueError(
                    f"{self._called(path)}: expected rows as in {self.paths[0]}, {arrays[0].dtype} of shape "
                    f"{arrays[0].shape[1:]}, got {array.dtype} of shape {array.shape[1:]}"
                )
        self._ends = np.cumsum([array.shape[0] for array in arrays])
        self.shape = (int(self._ends[-1]), *arrays[0].shape[1:])
        self.dtype, self.ndim = arrays[0].dtype, len(self.shape)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_arrays": {}}

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, row: int) -> np.ndarray:
        file, at = self._place(row)
        return np.asarray(self._array(file)[at])

    def name(self, row: int) -> str:
        """Say where a row is."""
        file, at = self._place(row)
        return f"row {at} of {self._called(self.paths[file])}"

    def _called(self, path: str) -> str:
        return path if self._name is None else f"{self._name!r} in {path}"

    def _place(self, row: int) -> tuple[int, int]:
        row = range(len(self))[row]  # one from the end, too
        file = int(np.searchsorted(self._ends, row, side="right"))
        return file, row - (int(self._ends[file - 1]) if file else 0)

    def _array(self, file: int) -> Any:
        array = self._arrays.get(file)
        if array is None:
            while len(self._arrays) >= _OPEN:
                del self._arrays[next(iter(self._arrays))]
            array = self._arrays[file] = self._opened(self.paths[file])
        return array


def npy(paths: Paths) -> Rows:
    """Return the rows of ``.npy`` files, as a loader reads them: mapped into memory, and read when they are needed.

    Parameters
    ----------
    paths : path, or list of paths
        Of several files the rows of each come behind those of the one before.

    Returns
    -------
    Rows
        Of a source, one array: ``Loader([npy("x.npy"), npy("y.npy")])``.

    Raises
    ------
    FileNotFoundError, ValueError, TypeError
        If a file is missing, is no such file, or has other rows than the first.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> path = tempfile.mkdtemp() + "/x.npy"
    >>> np.save(path, np.arange(6).reshape(3, 2))
    >>> rows = npy([path, path])
    >>> rows.shape, rows[4]
    ((6, 2), array([2, 3]))
    """
    return Rows(_listed(paths), _open_npy)


def npz(paths: Paths, name: str) -> Rows:
    """Return the rows of one array in ``.npz`` files, as `npy` does.

    Parameters
    ----------
    paths : path, or list of paths
    name : str
        Of the array in each file.

    Raises
    ------
    ValueError
        If a file is compressed: its rows can't be read one by one.
    """
    return Rows(_listed(paths), partial(_open_npz, name=name), name)


def hdf5(paths: Paths, name: str) -> Rows:
    """Return the rows of a data set in HDF5 files; needs h5py.

    Parameters
    ----------
    paths : path, or list of paths
    name : str
        Of the data set in each file.  Rows are read one by one: chunks of one row, or none, are fastest.
    """
    _h5py()
    return Rows(_listed(paths), partial(_open_hdf5, name=name), name)


def _listed(paths: Any) -> list[str]:
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    if not isinstance(paths, list | tuple) or not all(isinstance(path, str | os.PathLike) for path in paths):
        raise TypeError(f"paths: expected a path or a list of paths, got {paths!r:.80}")
    if not paths:
        raise ValueError("paths: expected at least one file, got none")
    return [os.path.abspath(path) for path in paths]


def _open_npy(path: str) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: expected a .npy file of numbers: {error}") from None


def _open_npz(path: str, name: str) -> np.ndarray:
    try:
        with zipfile.ZipFile(path) as archive:
            known = [member.removesuffix(".npy") for member in archive.namelist()]
            if name not in known:
                raise KeyError(f"{path}: expected an array {name!r} in it, found {', '.join(known)}")
            member = archive.getinfo(f"{name}.npy")
            if member.compress_type != zipfile.ZIP_STORED:
                raise ValueError(
                    f"{path}: it is compressed, so that rows can't be read one by one: save it with numpy.savez, or "
                    "pass the arrays themselves"
                )
            with archive.open(member) as file:
                version = np.lib.format.read_magic(file)
                read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
                shape, by_column, dtype = read[version](file)
                header = file.tell()
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path}: expected a .npz file: {error}") from None
    with open(path, "rb") as raw:  # the archive's own header of the member is as long as two numbers in it say
        raw.seek(member.header_offset + 26)
        lengths = raw.read(4)
    start = member.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    order: Any = "F" if by_column else "C"
    return np.memmap(path, dtype, "r", start + header, shape, order)


def _open_hdf5(path: str, name: str) -> Any:
    h5py = _h5py()
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise ValueError(f"{path}: expected an HDF5 file: {error}") from None
    found = file.get(name)
    if not isinstance(found, h5py.Dataset):
        raise KeyError(f"{path}: expected a data set {name!r} in it, found {', '.join(file)}")
    for source in found.virtual_sources() if found.is_virtual else ():  # HDF5 has zeros in the place of missing files
        places = [os.path.join(folder, source.file_name) for folder in (os.path.dirname(path), os.getcwd())]
        if "%" not in source.file_name and source.file_name != "." and not any(map(os.path.exists, places)):
            raise FileNotFoundError(f"{path}: {name!r} has rows of {source.file_name}, and there is no such file")
    return found


def _h5py() -> Any:
    return package("h5py", "HDF5 files need h5py", "hdf5")


class Images:
    """Pictures in files, and their labels: rows of ``(picture, label)``.  Needs Pillow.

    Parameters
    ----------
    files : list of paths
    size : int
        Each picture's shorter side is made this long, and the middle is cut out, a square.
    labels : list of int, optional
        One a file.  Without them a row is ``(picture,)``.
    mode : {"RGB", "L"}
        Colours, or shades of grey.
    folder : path, optional
        Where the files are, if their names count from there.

    Attributes
    ----------
    labels : ndarray of int32, or None
    classes : list of str
        The names behind the labels, where `image_folder` has found them.

    Notes
    -----
    A picture is an array of uint8, channels first: of shape ``(3, size, size)``, or ``(1, size, size)`` for ``"L"``.
    """

    def __init__(
        self,
        files: Sequence[str | os.PathLike[str]],
        size: int,
        labels: Sequence[int] | None = None,
        mode: str = "RGB",
        folder: str | os.PathLike[str] = "",
    ):
        _pillow()
        self.size = at_least(size, "size", 1)
        self.mode = one_of(mode, "mode", ("RGB", "L"))
        if not isinstance(files, list | tuple) or not all(isinstance(file, str | os.PathLike) for file in files):
            raise TypeError(f"files: expected a list of paths, got {files!r:.80}")
        if not files:
            raise ValueError("files: expected at least one, got none")
        check_dense(labels, "labels")
        self.labels = None if labels is None else np.asarray(labels)
        if self.labels is not None:
            if self.labels.shape != (len(files),) or self.labels.dtype.kind not in "iu":
                raise ValueError(
                    f"labels: expected {len(files)} integers, one a file, got {self.labels.dtype} of shape "
                    f"{self.labels.shape}"
                )
            self.labels = cast(self.labels, np.int32, "labels")
        self.folder = os.path.abspath(folder)
        self.classes: list[str] = []
        # A million names, which all loaders see in the same memory.
        self._files = np.array([os.fsencode(file) for file in files])

    def __len__(self) -> int:
        return len(self._files)

    def name(self, row: int) -> str:
        """Return a picture's path."""
        return os.path.join(self.folder, os.fsdecode(self._files[row]))

    def __getitem__(self, row: int) -> tuple[Any, ...]:
        picture = self._read(self.name(row))
        return (picture,) if self.labels is None else (picture, self.labels[row])

    def _read(self, path: str) -> np.ndarray:
        pillow, size = _pillow(), self.size
        with pillow.open(path) as picture:
            if _is_deep(picture):
                raise ValueError(f"expected a picture of 8 bits a channel, got one of Pillow's mode {picture.mode!r}")
            picture.draft(self.mode, (size, size))  # a JPEG file is decoded no larger than need be
            picture = picture.convert(self.mode)
        width, height = picture.size
        side = min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        if (width, height) != (size, size):
            picture = picture.resize((size, size), pillow.Resampling.BILINEAR, (left, top, left + side, top + side))
        array = np.asarray(picture)
        return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def _is_deep(picture: Any) -> bool:
    """Return whether a picture has more than 8 bits a channel, of which Pillow would drop some."""
    if picture.mode.startswith(("I", "F")):
        return True
    # Pillow calls colours of 16 bits "RGB", too: how they lie in the file tells them from others.
    return any(
        re.search(";16[BLN]", str(layout)) or codec == "ppm" and layout[1] > 255 for codec, _, _, layout in picture.tile
    )


def image_folder(folder: str | os.PathLike[str], size: int, mode: str = "RGB") -> Images:
    """Return the pictures in a folder that has a folder for each class, as ImageNet's: labels count these by name.

    Parameters
    ----------
    folder : path
    size : int
        As for `Images`.
    mode : {"RGB", "L"}

    Returns
    -------
    Images
        Its `classes` are the folders' names, in order.

    Raises
    ------
    FileNotFoundError
        If there is no such folder, or no picture in the folders in it.
    """
    root = Path(folder)
    if not root.is_dir():
        raise FileNotFoundError(f"folder: expected a folder with a folder for each class, got {root}")
    entries = [entry for entry in os.scandir(root) if _is_shown(entry)]
    for entry in entries:
        if entry.is_symlink() and not os.path.exists(entry.path):  # without a class all labels behind it would change
            raise FileNotFoundError(f"folder: expected folders, got the link {entry.path}, which leads nowhere")
    classes = sorted(entry.name for entry in entries if entry.is_dir())
    files, labels = [], []
    for label, name in enumerate(classes):
        found = [entry.name for entry in os.scandir(root / name) if _is_file(entry) and _is_shown(entry)]
        found = [file for file in found if file.lower().endswith(_PICTURES)]
        files += [os.path.join(name, file) for file in sorted(found)]
        labels += [label] * len(found)
    if not files:
        raise FileNotFoundError(
            f"folder: expected pictures ({', '.join(_PICTURES)}) in the folders of {root}, a folder for each class; "
            f"found none in {len(classes)} folders"
        )
    made = Images(files, size, labels, mode, root)
    made.classes = classes
    return made


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a file, or a link that leads nowhere: a loader names the row that it can't read."""
    return entry.is_symlink() and not os.path.exists(entry.path) or entry.is_file()


def _is_shown(entry: os.DirEntry[str]) -> bool:
    """Whether it is none of the files and folders that programs hide beside a user's."""
    return not entry.name.startswith(".")


def _pillow() -> Any:
    return package("PIL.Image", "pictures need Pillow", "images")


class Arrays:
    """Rows of several arrays, one of each."""

    def __init__(self, arrays: Sequence[Any]):
        self._arrays = [_array(array, f"source[{i}]") for i, array in enumerate(arrays)]
        if not self._arrays:
            raise ValueError("source: expected at least one array, got none")
        lengths = [len(array) for array in self._arrays]
        if len(set(lengths)) != 1:
            raise ValueError(f"source: expected arrays with equally many rows, got {lengths}")

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __getitem__(self, row: int) -> tuple[Any, ...]:
        return tuple(array[row] for array in self._arrays)

    def take(self, rows: np.ndarray) -> list[np.ndarray] | None:
        """Return many rows at once, where they are in memory; None where they are in files."""
        if any(isinstance(array, Rows) for array in self._arrays):
            return None
        return [array[rows] for array in self._arrays]

    def name(self, row: int) -> str:
        """Say where a row is."""
        places = [array.name(row) for array in self._arrays if isinstance(array, Rows)]
        return ", ".join(places) or f"row {row}"


def _array(array: Any, name: str) -> Any:
    if isinstance(array, Rows):
        return array
    base: Any = getattr(array, "base", None)
    if isinstance(array, np.memmap) and isinstance(base, mmap.mmap) and array.filename is not None:
        order: Any = "C" if array.flags.c_contiguous else "F"
        layout = {"dtype": array.dtype, "offset": array.offset, "shape": array.shape, "order": order}
        return Rows([str(array.filename)], partial(np.memmap, mode="r", **layout))  # each process maps it for itself
    check_dense(array, name)
    plain = np.asarray(array)
    if plain.dtype.kind not in "biufc":
        raise TypeError(f"{name}: expected an array of numbers, or npy(), npz() or hdf5(), got {plain.dtype}")
    if not plain.ndim:
        raise ValueError(f"{name}: expected an array with rows, got one of 0 dimensions")
    return plain


class Stream:
    """Rows of an iterable, in its own order; as many as there are."""

    def __init__(self, source: Any):
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self._source() if callable(self._source) else self._source)

    def name(self, row: int) -> str:
        """Say where a row is."""
        return f"row {row} of {type(self._source).__name__}"


def source_of(value: Any) -> Any:
    """Return what a user passes, as what has ``len()`` and ``[row]``, a tuple of arrays; or as a `Stream`."""
    if isinstance(value, list | tuple):
        value = Arrays(value)
    elif isinstance(value, np.ndarray | Data | Rows):
        value = Arrays([value])
    if hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, str | bytes | dict):
        if not len(value):
            raise ValueError("source: expected at least one row, got none")
        return value
    if hasattr(value, "__next__"):
        raise TypeError(
            f"source: expected what begins anew in each epoch, got {type(value).__name__}, which can be gone through "
            "once: pass the function that makes it"
        )
    if callable(value) or hasattr(value, "__iter__") and not isinstance(value, str | bytes | dict | set):
        return Stream(value)
    raise TypeError(
        "source: expected arrays, npy(), npz(), hdf5(), image_folder(), an object with len() and [row], an iterable, "
        f"or a function that returns one; got {type(value).__name__}"
    )


def row_name(source: Any, row: int) -> str:
    """Say where a row is: its file, where the source knows it."""
    name = getattr(source, "name", None)
    return str(name(row)) if callable(name) else f"row {row}"
