"""Where the data of the zoo come from.

`arrays`
    A user's: an .npz file, or a folder of .npy files, which are read as they are needed.
`pictures`
    A user's: a folder of image files, which are read as they are needed.
`made_up_images`
    Coarse colours with noise over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["arrays", "made_up_images", "pictures"]

Parts = tuple[list[Any], list[Any]]


def arrays(path: Path) -> Parts:
    """Return the arrays of training and of validation that a file or a folder has.

    Parameters
    ----------
    path : Path
        An .npz file with the arrays ``x_train``, ``y_train``, ``x_valid`` and ``y_valid``; or a folder with the files
        ``x_train.npy`` and so on.  These are not read as a whole: each rank reads the rows that it takes.

    Returns
    -------
    train, valid : list of two arrays
        ``x`` and ``y`` of each.

    Raises
    ------
    FileNotFoundError
        If one of them is missing.
    """
    names = [f"{name}_{part}" for part in ("train", "valid") for name in ("x", "y")]
    found: dict[str, Any] = {}
    if path.is_dir():
        found = {file.stem: np.load(file, mmap_mode="r") for file in path.glob("*.npy")}
    elif path.is_file():
        with np.load(path) as file:
            found = {name: file[name] for name in file.files if name in names}
    for name in names:
        if name not in found:
            raise FileNotFoundError(f"data: expected {', '.join(names)} in {path}, found no {name}")
    return [found[name] for name in names[:2]], [found[name] for name in names[2:]]


class Pictures:
    """Image files that are read when somebody makes an array of them.

    Parameters
    ----------
    files : sequence of Path
    side : int
        To what height and width to scale them; what is too wide or too high is cropped on both sides.
    """

    def __init__(self, files: Sequence[Path], side: int):
        self.files, self.shape = np.asarray(files, object), (len(files), 3, side, side)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, rows: Any) -> Pictures:
        return Pictures(self.files[rows], self.shape[2])

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        images = np.empty(self.shape, np.uint8)
        # Pillow lets other threads run while it decodes.
        with ThreadPoolExecutor() as pool:
            for i, pixels in enumerate(pool.map(self._read, self.files)):
                images[i] = pixels
        return images if dtype is None else images.astype(dtype)

    def _read(self, path: Path) -> np.ndarray:
        from PIL import Image, ImageOps  # made-up images do without Pillow

        with Image.open(path) as image:
            return np.asarray(ImageOps.fit(image.convert("RGB"), self.shape[2:])).transpose(2, 0, 1)


def pictures(folder: Path, side: int) -> Parts:
    """Return images, and the numbers of their classes, which are subfolders in alphabetical order.

    Parameters
    ----------
    folder : Path
        Has the folders ``train`` and ``valid``, with a subfolder for each class, of image files.
    side : int
        To what height and width to scale the images.

    Raises
    ------
    FileNotFoundError
        If there are no images.
    """
    parts = []
    classes = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
    for name in ("train", "valid"):
        files = [(path, i) for i, each in enumerate(classes) for path in sorted((folder / name / each).glob("*.*"))]
        if not files:
            raise FileNotFoundError(f"data: expected image files in {folder / name}/CLASS, found none")
        parts.append([Pictures([path for path, _ in files], side), np.array([i for _, i in files], np.int32)])
    return parts[0], parts[1]


def made_up_images(count: int, shape: tuple[int, int, int], classes: int, seed: int = 0) -> list[np.ndarray]:
    """Return images, uint8 of shape (count, *shape), and classes, int32: each has coarse colours of its own."""
    rng = np.random.default_rng(seed)
    channels, height, width = shape
    labels = rng.integers(classes, size=count, dtype=np.int32)
    coarse = np.random.default_rng(0).integers(128, size=(classes, channels, 4, 4), dtype=np.uint8)[labels]
    images = rng.integers(128, size=(count, *shape), dtype=np.uint8)
    images += coarse.repeat(-(-height // 4), axis=2).repeat(-(-width // 4), axis=3)[:, :, :height, :width]
    return [images, labels]
