"""Folders of checkpoints, from which interrupted training runs resume.

A checkpoint is a folder of three files::

    rows-000000001000/
        state.safetensors   arrays
        meta.json           {"format": 3, "metrics": {...}, "meta": {...}}
        SHA256SUMS          digests of both, as sha256sum writes them

A checkpoint is written under a unique name, synchronized with the disk, and then renamed to its final name.  Before it
is removed, it is renamed again.  A checkpoint under its final name is therefore complete.  Reading it compares the
digests.  Nothing in it is a pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from synkhronos.checks import check_at_least, import_package, suggest_keywords
from synkhronos.training.checkpoints import format_2
from synkhronos.training.checkpoints.folder_lock import FolderLock
from synkhronos.training.monitoring.best_cost import parse_monitored_metric, to_cost

#: Pattern of a checkpoint's name, with its number of rows.
_NAME_PATTERN = re.compile(r"rows-(\d{12,})(\.old)?")
#: Suffix of a checkpoint that is about to be replaced by another one of as many rows.
_OLD_SUFFIX = ".old"
_UNFINISHED_PREFIX = "unfinished-"
_STATE_FILE = "state.safetensors"
_META_FILE = "meta.json"
_SUMS_FILE = "SHA256SUMS"
_FORMAT_VERSION = 3


class CheckpointError(ValueError):
    """A checkpoint is damaged or belongs to another training run, or its folder is in use by another writer."""


class Checkpoint(NamedTuple):
    """Checkpoint that was read: arrays, a dict that JSON can represent, and loss and validation by name."""

    path: Path
    arrays: dict[str, np.ndarray]
    meta: dict[str, Any]
    metrics: dict[str, float]


class CheckpointFolder:
    """Folder of a training run's checkpoints: writes and reads them, and removes old ones.

    The first write locks the folder; a trainer locks it when it begins.  The lock is released by `unlock`, after the
    trainer's last report, or when the process exits.

    Parameters
    ----------
    folder : path
        The folder is created if it does not exist.
    keep : int
        Number of checkpoints to keep: the newest.
    every : int
        Number of reports between two checkpoints of a trainer.  `save` itself writes one at each call.
    keep_best : str or (str, {"min", "max"}), optional
        Metric whose best checkpoint is kept besides the newest: ``"loss"``, or a name of `validate`.  The lowest value
        is the best, or the highest with ``("accuracy", "max")``.  A trainer saves at each report that is the best so
        far, and ``patience`` counts the reports since then.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> checkpoints = CheckpointFolder(tempfile.mkdtemp(), keep=1, keep_best="mse")
    >>> for seen, mse in (1000, 0.5), (2000, 0.2), (3000, 0.3):
    ...     path = checkpoints.save(seen, {"w": np.full(2, mse)}, {"epoch": 1}, {"mse": mse})
    >>> [path.name for path in checkpoints.list_paths()]
    ['rows-000000002000', 'rows-000000003000']
    >>> checkpoints.load().arrays["w"], checkpoints.load(checkpoints.find_best()).arrays["w"]
    (array([0.3, 0.3]), array([0.2, 0.2]))
    """

    @suggest_keywords
    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: int = 3,
        every: int = 1,
        keep_best: str | Sequence[str] | None = None,
    ):
        for name, value in (("keep", keep), ("every", every)):
            check_at_least(value, name, 1)
        self.keep_best = None if keep_best is None else parse_monitored_metric(keep_best, "keep_best")
        _import_safetensors()
        self.folder, self.keep, self.every = Path(folder).absolute(), keep, every
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self.folder)

    # -- writing ---------------------------------------------------------------------------------------------------

    def save(
        self,
        n_rows_seen: int,
        arrays: Mapping[str, np.ndarray],
        meta: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> Path:
        """Write a checkpoint and return its path.  Remove checkpoints of more rows, and the oldest ones beyond `keep`.

        Parameters
        ----------
        n_rows_seen : int
            Number of rows trained on so far: the order of checkpoints.
        arrays : dict of str to array
            Booleans, integers, floats, or complex64.
        meta : dict
            Anything that JSON can represent.
        metrics : dict of str to float, optional
            Loss and validation; `keep_best` names one of them.

        Raises
        ------
        TypeError, ValueError
            If an argument is wrong, such as an array of objects.
        CheckpointError
            If another training run writes into the folder.
        OSError
            For example if the disk is full; earlier checkpoints are unchanged.
        """
        path = self.get_path(check_at_least(n_rows_seen, "n_rows_seen", 0))
        content = _serialize(arrays)
        header = {"format": _FORMAT_VERSION, "metrics": dict(metrics or {}), "meta": dict(meta)}
        files = {_STATE_FILE: content, _META_FILE: json.dumps(header).encode()}
        files[_SUMS_FILE] = "".join(f"{_format_digest_line(*file)}\n" for file in files.items()).encode()
        self.lock()
        with _make_temporary_folder(self.folder) as temporary:
            _write_files(temporary, files)
            # Checkpoints of more rows belong to an abandoned run: this run resumed from an earlier checkpoint.  They
            # are removed first, so that after a kill in between none of them can be mistaken for a checkpoint of this
            # run.
            for later_path in reversed(self.list_paths()):
                if _make_sort_key(later_path) > _make_sort_key(path):
                    self._remove(later_path)
            if path.exists():
                self._remove(Path(f"{path}{_OLD_SUFFIX}"))
                os.rename(path, f"{path}{_OLD_SUFFIX}")
            os.rename(temporary, path)
        self._remove(Path(f"{path}{_OLD_SUFFIX}"))
        best = self.find_best()
        for older_path in self.list_paths()[: -self.keep]:
            if older_path != best:
                self._remove(older_path)
        return path

    def lock(self) -> None:
        """Lock the folder for this object, and remove unfinished checkpoints of killed writers.  `save` calls this.

        Raises
        ------
        CheckpointError
            If another CheckpointFolder writes into the folder, in this process or another.
        """
        if self._lock.is_held:
            return
        try:
            self._lock.acquire()
        except BlockingIOError as error:
            raise CheckpointError(
                f"checkpoints: {self.folder} is the folder of a training run of {error.strerror}: wait for "
                "its end, or name another folder"
            ) from None
        if not self._lock.is_exclusive:
            return
        for unfinished in self.folder.glob(f"{_UNFINISHED_PREFIX}*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        for path in self.list_paths():
            if path.name.endswith(_OLD_SUFFIX) and path.with_suffix("").exists():
                self._remove(path)

    def unlock(self) -> None:
        """Unlock the folder, so that another CheckpointFolder may write into it."""
        self._lock.release()

    def get_path(self, n_rows_seen: int) -> Path:
        """Return the path of the checkpoint after ``n_rows_seen`` rows, whether or not it exists."""
        return self.folder / f"rows-{n_rows_seen:012d}"

    def _remove(self, path: Path) -> None:
        """Rename a checkpoint, then remove it: a kill in between must not leave half of it under its name."""
        temporary = _make_temporary_path(self.folder)
        with contextlib.suppress(OSError):
            os.rename(path, temporary)
            shutil.rmtree(temporary, ignore_errors=True)

    # -- reading ---------------------------------------------------------------------------------------------------

    def list_paths(self) -> list[Path]:
        """Return the checkpoints in the folder, the oldest first."""
        return list_checkpoints(self.folder)

    def find_best(self) -> Path | None:
        """Return the path of the first checkpoint with the best value of `keep_best`.

        Return None if `keep_best` is None, or if no undamaged checkpoint has a finite value.
        """
        if self.keep_best is None:
            return None
        costs: dict[Path, float] = {}
        for path in self.list_paths():
            with contextlib.suppress(CheckpointError):  # a damaged checkpoint is not the best
                costs[path] = to_cost(_read_header(path)["metrics"], self.keep_best)
        best = min(costs, key=lambda path: costs[path], default=None)
        return None if best is None or costs[best] == np.inf else best

    def check_no_newer(self, n_rows_seen: int) -> None:
        """Raise CheckpointError if the folder has checkpoints of more than ``n_rows_seen`` rows, from another run."""
        for newest_path in self.list_paths()[-1:]:
            if _make_sort_key(newest_path)[0] > n_rows_seen:
                raise CheckpointError(
                    f"checkpoints: {newest_path} is of another training run: continue it with resume='latest', or name "
                    "another folder"
                )

    def load(self, path: str | os.PathLike[str] | None = None) -> Checkpoint:
        """Read a checkpoint: the newest one, or the one at ``path``.

        Raises
        ------
        FileNotFoundError
            If the folder has no checkpoint.
        CheckpointError
            If the checkpoint is damaged.
        """
        if path is not None:
            return read_checkpoint(path)
        damaged_path = None
        while paths := self.list_paths():
            try:
                return read_checkpoint(paths[-1])
            except CheckpointError:
                if paths[-1] == damaged_path:
                    raise
                damaged_path = paths[-1]  # a writer may just have replaced it
        raise FileNotFoundError(f"{self.folder}: expected a checkpoint, found none")


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the oldest first, or an empty list if there is no such folder."""
    return sorted((path for path in folder.glob("rows-*") if _NAME_PATTERN.fullmatch(path.name)), key=_make_sort_key)


def is_in_folder(path: str | os.PathLike[str], folder: Path) -> bool:
    """Whether a checkpoint, or a link to it, is in this folder, and not in that of another run."""
    return folder.resolve() in (Path(path).parent.resolve(), Path(path).resolve().parent)


def copy_checkpoint(path: Path, folder: Path) -> Path:
    """Copy a checkpoint into another folder, unless that folder has it.  Return its path there."""
    copy = folder / path.name
    if copy.exists():
        return copy
    with _make_temporary_folder(folder) as temporary:
        _write_files(temporary, {file.name: file.read_bytes() for file in path.iterdir()})
        os.rename(temporary, copy)
    return copy


@contextlib.contextmanager
def _make_temporary_folder(folder: Path) -> Iterator[Path]:
    """Make a temporary folder for a ``with`` block, which renames it.  Then wait until the new name is on the disk."""
    temporary = _make_temporary_path(folder)
    os.makedirs(temporary)
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync_folder(folder)


def _make_temporary_path(folder: Path) -> Path:
    """Return a path that no other process uses, on this machine or another."""
    return folder / f"{_UNFINISHED_PREFIX}{secrets.token_hex(8)}"


def _make_sort_key(path: Path) -> tuple[int, bool]:
    """Return the sort key of a checkpoint: by rows.  A replaced checkpoint sorts before its replacement."""
    match = _NAME_PATTERN.fullmatch(path.name)
    assert match is not None
    return int(match[1]), match[2] is None


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint.  Raise CheckpointError if it is damaged."""
    path = Path(path)
    files = _read_and_verify(path, _STATE_FILE, _META_FILE)
    header, arrays = _parse_header(path, files[_META_FILE]), _import_safetensors().load(files[_STATE_FILE])
    if header["format"] == 2:
        arrays = format_2.convert_arrays(arrays, header["meta"])
    return Checkpoint(path, arrays, header["meta"], header["metrics"])


def read_meta(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint's ``meta`` without its arrays.  Raise CheckpointError if it is damaged."""
    meta: dict[str, Any] = _read_header(Path(path))["meta"]
    return meta


def _read_header(path: Path) -> dict[str, Any]:
    return _parse_header(path, _read_and_verify(path, _META_FILE)[_META_FILE])


def _parse_header(path: Path, content: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(content)
    if header["format"] == 2:
        header["meta"] = format_2.convert_meta(header["meta"])
    elif header["format"] != _FORMAT_VERSION:
        raise CheckpointError(f"{path} has format {header['format']}: this version reads 2 and {_FORMAT_VERSION}")
    return header


def _read_and_verify(path: Path, *names: str) -> dict[str, bytes]:
    """Read files of a checkpoint, and compare their digests."""
    try:
        # The folder is opened once: a writer may replace it in the meantime.
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            contents = {}
            for name in (*names, _SUMS_FILE):
                with open(name, "rb", opener=partial(os.open, dir_fd=folder)) as file:
                    contents[name] = file.read()
        finally:
            os.close(folder)
    except FileNotFoundError as error:
        old = f"; it has no {_SUMS_FILE} if an earlier version wrote it" if error.filename == _SUMS_FILE else ""
        expected = f"{path}: expected a checkpoint, with {_STATE_FILE}, {_META_FILE} and {_SUMS_FILE} in it"
        raise CheckpointError(f"{expected}: {error}{old}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: expected a checkpoint that can be read: {error}") from error
    sums = contents.pop(_SUMS_FILE).decode(errors="replace").splitlines()
    for name, content in contents.items():
        if _format_digest_line(name, content) not in sums:
            raise CheckpointError(
                f"{path} is damaged: {name} has another digest than {_SUMS_FILE} says; take an older one, "
                f"resume='{path.parent}/rows-...'"
            )
    return contents


def _format_digest_line(name: str, content: bytes) -> str:
    return f"{hashlib.sha256(content).hexdigest()}  {name}"


def _serialize(arrays: Mapping[str, np.ndarray]) -> bytes:
    plain = {}
    for name, array in arrays.items():
        is_masked, array = isinstance(array, np.ma.MaskedArray), np.asarray(array, order="C")
        is_number = array.dtype.kind in "biuf" and array.dtype.itemsize <= 8
        if is_masked or not is_number and array.dtype.name not in ("bfloat16", "complex64"):
            got = "a masked array" if is_masked else str(array.dtype)
            raise TypeError(f"arrays: expected booleans, integers, floats or complex64, got {got} for {name!r}")
        plain[name] = array
    content: bytes = _import_safetensors().save(plain)
    return content


def _import_safetensors() -> Any:
    return import_package("safetensors.numpy", "checkpoints need safetensors", "training")


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder, and wait until they are on the disk."""
    for name, content in files.items():
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(file, view[: 1 << 24]) :]
            os.fsync(file)
        finally:
            os.close(file)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    """Wait until a folder's entries are on the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
