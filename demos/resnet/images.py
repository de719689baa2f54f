"""Images to train on: synthetic, or from a folder.

Pixels are bytes, written directly into the array that `allocate` returns, which may be shared memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Part", "load_images", "make_images", "read_folder"]

# Synthetic images are noise over one coarse picture per class, of COARSE x COARSE colours.
COARSE = 4

#: Allocator of a byte array (NumPy array or Data object) of a given shape.
Allocate = Callable[[tuple[int, ...]], Any]


class Part(NamedTuple):
    """Images and their labels.

    Attributes
    ----------
    images : array or Data of uint8, shape (n, 3, size, size)
        Red, green and blue, from 0 to 255.
    labels : ndarray of int32, shape (n,)
        Class of each image.
    """

    images: Any
    labels: np.ndarray


def load_images(options: argparse.Namespace, allocate: Allocate) -> tuple[list[Part], int]:
    """Load or make the images that the command line asks for.

    Parameters
    ----------
    options : Namespace
        Parsed command line; uses `data`, `images`, `classes`, `size`, `validation` and `seed`.
    allocate : callable
        Returns an array of bytes, given its shape.

    Returns
    -------
    parts : list of two Part
        To train and to validate.
    n_classes : int
        Number of classes.
    """
    if options.data:
        try:
            return read_folder(options.data, options.size, options.validation, options.seed, allocate)
        except (OSError, ValueError) as error:
            raise SystemExit(f"--data: {error}") from None
    n_valid = max(1, round(options.images * options.validation))
    counts = [options.images, n_valid]
    return make_images(counts, options.classes, options.size, options.seed, allocate), options.classes


def make_images(counts: Sequence[int], n_classes: int, size: int, seed: int, allocate: Allocate) -> list[Part]:
    """Make images of coarse colours with noise over them, the same for the same seed.

    Parameters
    ----------
    counts : sequence of int
        Number of images of each part.
    n_classes, size, seed : int
        Number of classes, height and width of an image, and seed.
    allocate : callable
        Returns an array of bytes, given its shape.

    Returns
    -------
    list of Part
        One for each count.
    """
    rng = np.random.default_rng(seed)
    repeats = -(-size // COARSE)
    coarse = rng.integers(128, size=(n_classes, 3, COARSE, COARSE), dtype=np.uint8)
    pictures = coarse.repeat(repeats, axis=2).repeat(repeats, axis=3)[:, :, :size, :size]
    parts = []
    for n in counts:
        labels = rng.integers(n_classes, size=n, dtype=np.int32)
        images = allocate((n, 3, size, size))
        for i, label in enumerate(labels):
            images[i] = pictures[label] + rng.integers(128, size=(3, size, size), dtype=np.uint8)
        parts.append(Part(images, labels))
    return parts


def read_folder(folder: Path, size: int, validation: float, seed: int, allocate: Allocate) -> tuple[list[Part], int]:
    """Read images from one subfolder per class.

    Parameters
    ----------
    folder : Path
        Has one subfolder of image files for each class, of any size and format that Pillow reads.
    size : int
        Height and width; images are scaled, and cropped on both sides.
    validation : float
        The share of the images that is kept for validation.
    seed : int
        Of the choice of these.
    allocate : callable
        Returns an array of bytes, given its shape.

    Returns
    -------
    parts : list of two Part
        To train and to validate.
    n_classes : int
        Number of classes, in the alphabetical order of the subfolders.

    Raises
    ------
    FileNotFoundError
        If there are no images.
    OSError
        If a file is no image.
    """
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    files = [
        (path, label)
        for label, folder_of_class in enumerate(classes)
        for path in sorted(folder_of_class.iterdir())
        if path.is_file()
    ]
    if len(files) < 2:
        raise FileNotFoundError(f"{folder} needs a subfolder for each class, with images in it")
    order = np.random.default_rng(seed).permutation(len(files))
    n_valid = min(max(1, round(len(files) * validation)), len(files) - 1)
    parts = []
    for indexes in (order[n_valid:], order[:n_valid]):
        images = allocate((len(indexes), 3, size, size))
        # Pillow lets other threads run while it decodes.
        with ThreadPoolExecutor() as pool:
            for i, pixels in enumerate(pool.map(lambda index: _read_image(files[index][0], size), indexes)):
                images[i] = pixels
        parts.append(Part(images, np.array([files[index][1] for index in indexes], np.int32)))
    return parts, len(classes)


def _read_image(path: Path, size: int) -> np.ndarray:
    """Return an image's bytes, colours first."""
    from PIL import Image, ImageOps  # not needed for synthetic images

    with Image.open(path) as image:
        return np.asarray(ImageOps.fit(image.convert("RGB"), (size, size))).transpose(2, 0, 1)
