"""Where to go on after an interruption.

`Checkpoint`
    A folder of checkpoints, of which the newest few are kept.
`Stored`
    One of them, read.
`CheckpointError`
    One can't be used.

A checkpoint is a folder: ``state.safetensors`` has the arrays, ``meta.json`` all else.  It is written under another
name and renamed when everything is on the disk, so that one whose name is right is whole.  Nothing in it is a pickle.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from synkhronos.checks import at_least, package

#: One that is about to be replaced by another of the same rows has the second name.
_NAME, _OLD = re.compile(r"rows-\d{12}(\.old)?$"), ".old"
_STATE, _META = "state.safetensors", "meta.json"


class CheckpointError(ValueError):
    """A checkpoint can't be used: it is damaged, or of something else."""


class Stored(NamedTuple):
    """A checkpoint.

    Attributes
    ----------
    path : Path
    arrays : dict of str to ndarray
    meta : dict
        What JSON can say.
    """

    path: Path
    arrays: dict[str, np.ndarray]
    meta: dict[str, Any]


class Checkpoint:
    """A folder of checkpoints.

    Parameters
    ----------
    folder : path
        Made if it is not there.
    keep : int
        How many are kept: the newest.
    every : int
        The reports between two checkpoints.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> checkpoint = Checkpoint(tempfile.mkdtemp())
    >>> path = checkpoint.save(1000, {"w": np.ones(2)}, {"epoch": 1})
    >>> path.name
    'rows-000000001000'
    >>> checkpoint.load().arrays["w"]
    array([1., 1.])
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3, every: int = 1):
        for name, value in (("keep", keep), ("every", every)):
            at_least(value, name, 1)
        _safetensors()
        self.folder, self.keep, self.every = Path(folder), keep, every
        self.folder.mkdir(parents=True, exist_ok=True)

    def save(self, seen: int, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> Path:
        """Write a checkpoint after so many rows, and remove those that are too old, and those of more rows.

        Raises
        ------
        OSError
            If the disk is full, say; what was there stays.
        """
        content = _safetensors().save({name: np.asarray(array, order="C") for name, array in arrays.items()})
        path = self._path(seen)
        aside = self.folder / "unfinished"
        shutil.rmtree(aside, ignore_errors=True)
        os.mkdir(aside)
        try:
            _write(aside / _STATE, content)
            _write(aside / _META, json.dumps(dict(meta)).encode())
            _sync(aside)
            if path.exists():  # of a run before: it stays until the new one can take its place
                shutil.rmtree(f"{path}{_OLD}", ignore_errors=True)
                os.rename(path, f"{path}{_OLD}")
            os.rename(aside, path)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        _sync(self.folder)
        shutil.rmtree(f"{path}{_OLD}", ignore_errors=True)
        known = self.paths()
        at = known.index(path) + 1
        # Later ones are of a training that has been left: this one went on from before them.
        for other in (*known[: max(0, at - self.keep)], *known[at:]):
            shutil.rmtree(other, ignore_errors=True)
        return path

    def _path(self, seen: int) -> Path:
        return self.folder / f"rows-{seen:012d}"

    def paths(self) -> list[Path]:
        """Return the checkpoints that there are, the oldest first."""
        return paths_in(self.folder)

    def refuse_others(self, seen: int) -> None:
        """Refuse to begin a training after so many rows where there are checkpoints of more: another's.

        Raises
        ------
        CheckpointError
        """
        for later in self.paths()[-1:]:
            if later.name.removesuffix(_OLD) > self._path(seen).name:
                raise CheckpointError(
                    f"checkpoint: {later} is of another training: go on from there with resume='latest', or name "
                    "another folder"
                )

    def load(self, path: str | os.PathLike[str] | None = None) -> Stored:
        """Return a checkpoint: the newest, or that of a path.

        Raises
        ------
        FileNotFoundError
            If there is none.
        CheckpointError
            If it is damaged.
        """
        if path is None:
            known = self.paths()
            if not known:
                raise FileNotFoundError(f"{self.folder}: expected a checkpoint, found none")
            path = known[-1]
        return load(path)


def paths_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, which need not be there, the oldest first."""
    found = [path for path in folder.glob("*") if _NAME.match(path.name)]
    return sorted(found, key=lambda path: (path.name.removesuffix(_OLD), not path.name.endswith(_OLD)))


def load(path: str | os.PathLike[str]) -> Stored:
    """Return a checkpoint."""
    path = Path(path)
    return Stored(path, _read(path, _STATE, _safetensors().load), load_meta(path))


def load_meta(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a checkpoint has besides arrays."""
    meta: dict[str, Any] = _read(Path(path), _META, json.loads)
    return meta


def _read(path: Path, name: str, parse: Callable[[bytes], Any]) -> Any:
    try:
        return parse((path / name).read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: expected a checkpoint, with {_STATE} and {_META} in it: {error}") from error
    except Exception as error:  # safetensors has an exception of its own
        raise CheckpointError(
            f"{path} is damaged: {error}; take an older one, resume='{path.parent}/rows-...'"
        ) from error


def _safetensors() -> Any:
    return package("safetensors.numpy", "checkpoints need safetensors", "training")


def _write(path: Path, content: bytes) -> None:
    """Write a file, and wait until it is on the disk."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(file, view[: 1 << 24]) :]
        os.fsync(file)
    finally:
        os.close(file)


def _sync(folder: Path) -> None:
    """Wait until a folder's entries are on the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
