"""Data of the zoo: arrays in files, folders of images, and synthetic images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from synkhronos.launcher import SettingsError
from synkhronos.loading import Loader, image_folder
from synkhronos.ranks import count_available_cores

__all__ = ["load_arrays", "make_image_loaders", "make_images"]

Parts = tuple[list[Any], list[Any]]


def load_arrays(path: Path) -> Parts:
    """Return ``x`` and ``y`` for training and for validation.

    `path` is an .npz file with the arrays ``x_train``, ``y_train``, ``x_valid`` and ``y_valid``, or a folder with the
    files ``x_train.npy`` and so on.  These are mapped: each rank reads only its rows.
    """
    names = [f"{name}_{part}" for part in ("train", "valid") for name in ("x", "y")]
    arrays: dict[str, Any] = {}
    if path.is_dir():
        arrays = {file.stem: np.load(file, mmap_mode="r") for file in path.glob("*.npy")}
    elif path.is_file():
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files if name in names}
    for name in names:
        if name not in arrays:
            raise FileNotFoundError(f"data: expected {', '.join(names)} in {path}, found no {name}")
    return [arrays[name] for name in names[:2]], [arrays[name] for name in names[2:]]


def make_image_loaders(folder: Path, side: int) -> tuple[Loader, Loader]:
    """Return loaders of the folders ``train`` and ``valid``, which have a subfolder of images for each class."""
    train, valid = (image_folder(folder / name, side) for name in ("train", "valid"))
    if train.classes != valid.classes:
        different = sorted(set(train.classes) ^ set(valid.classes))
        raise SettingsError(
            f"data: expected the same classes in {folder}/train and /valid; one lacks {', '.join(different)}"
        )
    processes = min(8, count_available_cores())  # those of the rank, if it is bound to its share
    return Loader(train, processes=processes), Loader(valid, processes=processes, shuffle=False)


def make_images(count: int, shape: tuple[int, int, int], classes: int, seed: int = 0) -> list[np.ndarray]:
    """Return synthetic images, uint8 of shape (count, *shape), and classes, int32: noise over a picture per class."""
    rng = np.random.default_rng(seed)
    channels, height, width = shape
    labels = rng.integers(classes, size=count, dtype=np.int32)
    coarse = np.random.default_rng(0).integers(128, size=(classes, channels, 4, 4), dtype=np.uint8)[labels]
    images = rng.integers(128, size=(count, *shape), dtype=np.uint8)
    images += coarse.repeat(-(-height // 4), axis=2).repeat(-(-width // 4), axis=3)[:, :, :height, :width]
    return [images, labels]
