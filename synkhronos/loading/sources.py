"""Sources of rows.

A `Source` reads rows by number.  An `IterableSource` has its own length and order.  Both are pickled for the loader
processes.  A source of files therefore holds their paths, and each process opens the files itself when it reads from
them.  A source may have a method ``describe_row(row)``, whose result names a row in errors.
"""

from __future__ import annotations

import mmap
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from synkhronos.casts import cast, check_dense
from synkhronos.checks import check_at_least, check_choice, import_package, suggest_keywords
from synkhronos.data_objects import Data
from synkhronos.data_objects.file import read_npy_header

#: Maximal number of open files of one array, in each process.
_MAX_OPEN_FILES = 64
#: Suffixes of picture files, in lower case.
_PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".webp", ".tif", ".tiff")

#: One file, or several whose rows are concatenated.
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class Source(Protocol):
    """Rows that are read by number.  The source is pickled for the loader processes."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, row: int, /) -> Any:
        """Return a row: an array, or a tuple of arrays."""


#: Argument for a source: arrays, rows by number, rows in their own order, or a function that returns an iterable.
SourceArgument = npt.ArrayLike | Sequence[npt.ArrayLike] | Source | Iterable[Any] | Callable[[], Iterable[Any]]


class FileArray:
    """Array that is the concatenation of arrays in files, along the first axis.  `npy`, `npz` and `hdf5` make it.

    ``open_file`` takes a path and returns an array, or another object with ``shape``, ``dtype`` and ``[row]``.
    ``name`` is the array's name in its files, for errors.
    """

    def __init__(self, paths: Sequence[str], open_file: Callable[[str], Any], name: str | None = None):
        self.paths, self._open_file, self._name = list(paths), open_file, name
        self._arrays: dict[int, Any] = {}
        lengths = []
        # One file after another, so that no more of them are open than `_open` keeps.
        for i, path in enumerate(self.paths):
            array = self._open(i)
            if not array.shape:
                raise ValueError(f"{self._describe_file(path)}: expected an array with rows, got one of 0 dimensions")
            if array.dtype.kind not in "biufc":
                raise TypeError(f"{self._describe_file(path)}: expected numbers, got an array of {array.dtype}")
            if not i:
                row_shape, self.dtype = array.shape[1:], array.dtype
            if array.shape[1:] != row_shape or array.dtype != self.dtype:
                raise ValueError(
                    f"{self._describe_file(path)}: expected rows as in {self.paths[0]}, {self.dtype} of shape "
                    f"{row_shape}, got {array.dtype} of shape {array.shape[1:]}"
                )
            lengths.append(array.shape[0])
        self._ends = np.cumsum(lengths)
        self.shape = (int(self._ends[-1]), *row_shape)
        self.ndim = len(self.shape)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_arrays": {}}

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, row: int) -> np.ndarray:
        file, index = self._locate(row)
        return np.asarray(self._open(file)[index])

    def describe_row(self, row: int) -> str:
        """Return the file of a row and its number there, for errors."""
        file, index = self._locate(row)
        return f"row {index} of {self._describe_file(self.paths[file])}"

    def _describe_file(self, path: str) -> str:
        return path if self._name is None else f"{self._name!r} in {path}"

    def _locate(self, row: int) -> tuple[int, int]:
        """Return the index of a row's file, and the row's index in it."""
        row = range(len(self))[row]  # negative numbers count from the end
        file = int(np.searchsorted(self._ends, row, side="right"))
        return file, row - (int(self._ends[file - 1]) if file else 0)

    def _open(self, index: int) -> Any:
        """Return the array in the file of an index.  If too many are open, close the one that was opened first."""
        array = self._arrays.get(index)
        if array is None:
            while len(self._arrays) >= _MAX_OPEN_FILES:
                del self._arrays[next(iter(self._arrays))]
            array = self._arrays[index] = self._open_file(self.paths[index])
        return array


def npy(paths: Paths) -> FileArray:
    """Return the array in ``.npy`` files, for a `Loader`.  Rows are read from the memory-mapped files on demand.

    Parameters
    ----------
    paths : path, or list of paths
        The arrays of several files are concatenated along the first axis.

    Returns
    -------
    FileArray
        One of a source's arrays: ``Loader([npy("x.npy"), npy("y.npy")])``.

    Raises
    ------
    ValueError, TypeError
        If a file is not a ``.npy`` file of numbers, or its rows differ from the first file's in shape or dtype.

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
    return FileArray(_as_paths(paths), _open_npy)


def npz(paths: Paths, name: str) -> FileArray:
    """Return one array in ``.npz`` files, as `npy` does.

    Parameters
    ----------
    paths : path, or list of paths
    name : str
        Name of the array in each file.

    Raises
    ------
    KeyError
        If a file has no array of this name.
    ValueError
        If a file is not an ``.npz`` file, or is compressed: single rows of it can't be read.
    TypeError
        If the array does not consist of numbers.
    """
    return FileArray(_as_paths(paths), partial(_open_npz, name=name), name)


def hdf5(paths: Paths, name: str) -> FileArray:
    """Return a data set in HDF5 files, as `npy` does; needs h5py.

    Rows are read one by one.  Contiguous data sets, and chunks of one row, are fastest.

    Parameters
    ----------
    paths : path, or list of paths
    name : str
        Name of the data set in each file, such as ``"group/x"``.

    Raises
    ------
    FileNotFoundError
        If a file is missing, or one to which a virtual data set refers.
    KeyError
        If a file has no data set of this name.
    """
    _import_h5py()
    return FileArray(_as_paths(paths), partial(_open_hdf5, name=name), name)


def _as_paths(paths: object) -> list[str]:
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
            names = [member.removesuffix(".npy") for member in archive.namelist() if member.endswith(".npy")]
            if name not in names:
                raise KeyError(f"{path}: expected an array {name!r}, found {', '.join(names)}")
            member = archive.getinfo(f"{name}.npy")
            if member.compress_type != zipfile.ZIP_STORED:
                raise ValueError(
                    f"{path}: single rows of a compressed file can't be read: save it with numpy.savez, or pass its "
                    "arrays"
                )
            with archive.open(member) as file:
                try:
                    shape, is_fortran, dtype = read_npy_header(file)
                except ValueError as error:
                    raise ValueError(f"{path}: expected {name!r} as numpy.savez writes it: {error}") from None
                header = file.tell()
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path}: expected a .npz file: {error}") from None
    with open(path, "rb") as raw:  # the lengths of name and extra field are in the member's local header
        raw.seek(member.header_offset + 26)
        lengths = raw.read(4)
    start = member.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    order: Any = "F" if is_fortran else "C"
    return np.memmap(path, dtype, "r", start + header, shape, order)


def _open_hdf5(path: str, name: str) -> Any:
    h5py = _import_h5py()
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such file")
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise ValueError(f"{path}: expected an HDF5 file: {error}") from None
    dataset = file.get(name)
    if not isinstance(dataset, h5py.Dataset):
        raise KeyError(f"{path}: expected a data set {name!r}, found {', '.join(file)}")
    for source in dataset.virtual_sources() if dataset.is_virtual else ():  # HDF5 reads missing files as zeros
        candidates = [os.path.join(folder, source.file_name) for folder in (os.path.dirname(path), os.getcwd())]
        if "%" not in source.file_name and source.file_name != "." and not any(map(os.path.exists, candidates)):
            raise FileNotFoundError(f"{path}: {name!r} refers to {source.file_name}: no such file")
    return dataset


def _import_h5py() -> Any:
    return import_package("h5py", "HDF5 files need h5py", "hdf5")


class Images:
    """Source of picture files and their labels: rows of ``(picture, label)``.  Needs Pillow.

    Files are opened when their rows are read.

    A picture is a uint8 array of shape ``(3, size, size)``, or ``(1, size, size)`` for mode ``"L"``.

    Parameters
    ----------
    files : list of paths
    size : int
        Height and width in pixels: each picture's shorter side is resized to it, and the centre is cropped.
    labels : list of int, optional
        One per file.  Without them a row is ``(picture,)``.
    mode : {"RGB", "L"}
        Colour, or greyscale.
    folder : path, optional
        Folder to which the paths are relative.

    Attributes
    ----------
    labels : ndarray of int32, or None
    classes : list of str
        Name of each label's class, if the source was made by `image_folder`; else empty.

    Examples
    --------
    .. code-block:: python

        loader = Loader(Images(["cat.jpg", "dog.jpg"], size=224, labels=[0, 1], folder="photos"))
    """

    @suggest_keywords
    def __init__(
        self,
        files: Sequence[str | os.PathLike[str]],
        size: int,
        labels: Sequence[int] | None = None,
        mode: str = "RGB",
        folder: str | os.PathLike[str] = "",
    ):
        _import_pillow()
        self.size = check_at_least(size, "size", 1)
        self.mode = check_choice(mode, "mode", ("RGB", "L"))
        if not isinstance(files, list | tuple) or not all(isinstance(file, str | os.PathLike) for file in files):
            raise TypeError(f"files: expected a list of paths, got {files!r:.80}")
        if not files:
            raise ValueError("files: expected at least one, got none")
        check_dense(labels, "labels")
        self.labels = None if labels is None else np.asarray(labels)
        if self.labels is not None:
            if self.labels.shape != (len(files),) or self.labels.dtype.kind not in "iu":
                raise ValueError(
                    f"labels: expected {len(files)} integers, one per file, got {self.labels.dtype} of shape "
                    f"{self.labels.shape}"
                )
            self.labels = cast(self.labels, np.int32, "labels")
        self.folder = os.path.abspath(folder)
        self.classes: list[str] = []
        # One array: all loader processes map it, even with a million names.
        self._files = np.array([os.fsencode(file) for file in files])

    def __len__(self) -> int:
        return len(self._files)

    def describe_row(self, row: int) -> str:
        """Return the path of a row's picture, for errors."""
        return self._get_path(row)

    def _get_path(self, row: int) -> str:
        return os.path.join(self.folder, os.fsdecode(self._files[row]))

    def __getitem__(self, row: int) -> tuple[Any, ...]:
        picture = self._read(self._get_path(row))
        return (picture,) if self.labels is None else (picture, self.labels[row])

    def _read(self, path: str) -> np.ndarray:
        pillow, size = _import_pillow(), self.size
        with pillow.open(path) as picture:
            if _has_deep_channels(picture):
                raise ValueError(f"expected a picture of 8 bits per channel, got Pillow's mode {picture.mode!r}")
            picture.draft(self.mode, (size, size))  # decodes a JPEG file at a reduced size
            picture = picture.convert(self.mode)
        width, height = picture.size
        side = min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        if (width, height) != (size, size):
            picture = picture.resize((size, size), pillow.Resampling.BILINEAR, (left, top, left + side, top + side))
        array = np.asarray(picture)
        return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def _has_deep_channels(picture: Any) -> bool:
    """Whether a picture has more than 8 bits per channel.  Pillow would drop the others."""
    if picture.mode.startswith(("I", "F")):
        return True
    # 16-bit colours also have the mode "RGB", but another layout in the file.
    return any(
        re.search(";16[BLN]", str(layout)) or codec == "ppm" and layout[1] > 255 for codec, _, _, layout in picture.tile
    )


def image_folder(folder: str | os.PathLike[str], size: int, mode: str = "RGB") -> Images:
    """Return a source of the pictures in a folder with one subfolder per class, as ImageNet has.

    Hidden files and folders are ignored.  The `classes` of the source are the sorted names of the subfolders, and a
    label is an index into them.

    Parameters
    ----------
    folder : path
    size, mode
        As for `Images`.

    Raises
    ------
    FileNotFoundError
        If the folder is missing, a subfolder is a broken link, or no subfolder has a picture.

    Examples
    --------
    .. code-block:: python

        loader = Loader(image_folder("imagenet/train", size=256), augment=CropMirror(224, mirror=True))
    """
    root = Path(folder)
    if not root.is_dir():
        raise FileNotFoundError(f"folder: expected a folder with one subfolder per class, got {root}")
    entries = [entry for entry in os.scandir(root) if _is_visible(entry)]
    for entry in entries:
        if entry.is_symlink() and not os.path.exists(entry.path):  # ignoring it would change the labels after it
            raise FileNotFoundError(f"folder: expected subfolders, got the broken link {entry.path}")
    classes = sorted(entry.name for entry in entries if entry.is_dir())
    files, labels = [], []
    for label, class_name in enumerate(classes):
        names = [
            entry.name
            for entry in os.scandir(root / class_name)
            if _is_file_or_broken_link(entry) and _is_visible(entry)
        ]
        names = [file for file in names if file.lower().endswith(_PICTURE_SUFFIXES)]
        files += [os.path.join(class_name, file) for file in sorted(names)]
        labels += [label] * len(names)
    if not files:
        raise FileNotFoundError(
            f"folder: expected pictures ({', '.join(_PICTURE_SUFFIXES)}) in {root}, in one subfolder per class; found "
            f"none in {len(classes)} subfolders"
        )
    images = Images(files, size, labels, mode, root)
    images.classes = classes
    return images


def _is_file_or_broken_link(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a row: a broken link is one, so that reading it is an error."""
    return entry.is_symlink() and not os.path.exists(entry.path) or entry.is_file()


def _is_visible(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is not a hidden file or folder."""
    return not entry.name.startswith(".")


def _import_pillow() -> Any:
    return import_package("PIL.Image", "pictures need Pillow", "images")


class ArraySource:
    """Source of several arrays of equal length: a row has one element of each."""

    def __init__(self, arrays: Sequence[Any]):
        self._arrays = [_as_array(array, f"source[{i}]") for i, array in enumerate(arrays)]
        if not self._arrays:
            raise ValueError("source: expected at least one array, got none")
        lengths = [len(array) for array in self._arrays]
        if len(set(lengths)) != 1:
            raise ValueError(f"source: expected arrays of equal length, got lengths {lengths}")

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __getitem__(self, row: int) -> tuple[Any, ...]:
        return tuple(array[row] for array in self._arrays)

    def read_rows(self, rows: np.ndarray) -> list[np.ndarray] | None:
        """Return several rows of each array by one indexing, or None if an array is in files."""
        if any(isinstance(array, FileArray) for array in self._arrays):
            return None
        return [array[rows] for array in self._arrays]

    def describe_row(self, row: int) -> str:
        """Return a row's files and its number in them, for errors."""
        names = [array.describe_row(row) for array in self._arrays if isinstance(array, FileArray)]
        return ", ".join(names) or f"row {row}"


def _as_array(array: Any, name: str) -> Any:
    """Convert a user's array to an ndarray, or to a `FileArray` if it is in a file.  ``name`` is that in errors."""
    if isinstance(array, FileArray):
        return array
    if _has_values_of_file(array):
        order: Any = "C" if array.flags.c_contiguous else "F"
        layout = {"dtype": array.dtype, "offset": array.offset, "shape": array.shape, "order": order}
        # Not pickled: each process maps the file.
        return FileArray([str(array.filename)], partial(np.memmap, mode="r", **layout))
    check_dense(array, name)
    rows = np.asarray(array)
    if rows.dtype.kind not in "biufc":
        raise TypeError(f"{name}: expected an array of numbers, or npy(), npz() or hdf5(), got {rows.dtype}")
    if not rows.ndim:
        raise ValueError(f"{name}: expected an array with rows, got one of 0 dimensions")
    return rows


def _has_values_of_file(array: Any) -> bool:
    """Whether an array maps a named file, and its values are always the file's.

    A view of a memmap may have another layout.  A change of a copy-on-write memmap is not in the file.  A memmap keeps
    a file that has been replaced since by another one of its name.
    """
    base: Any = getattr(array, "base", None)
    is_whole_map = isinstance(array, np.memmap) and isinstance(base, mmap.mmap)
    if not is_whole_map or array.filename is None or array.mode == "c":
        return False
    try:
        current = np.memmap(array.filename, "uint8", "r", shape=(1,))
    except (OSError, ValueError):  # it has been removed, or replaced by an empty one
        return False
    return _find_mapped_file(array) == _find_mapped_file(current)


def _find_mapped_file(array: np.memmap[Any, Any]) -> list[str]:
    """Return the device and inode of the file that an array maps; on some file systems `os.stat` has others."""
    address = array.ctypes.data
    with open("/proc/self/maps") as lines:
        for line in lines:
            bounds, _, _, *device_and_inode = line.split(maxsplit=5)[:5]
            start, stop = (int(bound, 16) for bound in bounds.split("-"))
            if start <= address < stop:
                return device_and_inode
    return []


class IterableSource:
    """Source whose rows an iterable yields, in its own order and number."""

    def __init__(self, source: Iterable[Any] | Callable[[], Iterable[Any]]):
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self._source() if callable(self._source) else self._source)

    def describe_row(self, row: int) -> str:
        """Return a row's number and the iterable's class, for errors."""
        return f"row {row} of {type(self._source).__name__}"


def as_source(value: Any) -> Any:
    """Return the source for a user's argument, as for `Loader`.  Raise TypeError or ValueError."""
    if isinstance(value, list | tuple):
        value = ArraySource(value)
    elif isinstance(value, np.ndarray | Data | FileArray):
        value = ArraySource([value])
    if hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, str | bytes | dict):
        if not len(value):
            raise ValueError("source: expected at least one row, got none")
        return value
    if hasattr(value, "__next__"):
        raise TypeError(
            f"source: expected an iterable that can be iterated in each epoch, got {type(value).__name__}, which can "
            "be iterated only once: pass the function that makes it"
        )
    if callable(value) or hasattr(value, "__iter__") and not isinstance(value, str | bytes | dict | set):
        return IterableSource(value)
    raise TypeError(
        "source: expected arrays, npy(), npz(), hdf5(), image_folder(), an object with len() and [row], an iterable, "
        f"or a function that returns one; got {type(value).__name__}"
    )


def describe_row(source: object, row: int) -> str:
    """Return a name of a row for errors: its file, if the source has a method ``describe_row``."""
    describe = getattr(source, "describe_row", None)
    return str(describe(row)) if callable(describe) else f"row {row}"
