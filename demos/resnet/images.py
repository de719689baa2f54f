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

from synkhronos.loading import image_folder

__all__ = ["ImageSet", "load_images", "make_images", "read_folder"]

# Synthetic images are noise over one coarse picture per class, of COARSE x COARSE colours.
COARSE = 4

#: Allocator of a byte array (NumPy array or Data object) of a given shape.
Allocate = Callable[[tuple[int, ...]], Any]


class ImageSet(NamedTuple):
    """Images, uint8 of shape (n, 3, size, size), and the class of each, int32."""

    images: Any
    labels: np.ndarray


def load_images(options: argparse.Namespace, allocate: Allocate) -> tuple[list[ImageSet], int]:
    """Return the images to train and to validate that the command line asks for, and the number of classes."""
    if options.data:
        try:
            return read_folder(options.data, options.size, options.validation, options.seed, allocate)
        except (OSError, ValueError) as error:
            raise SystemExit(f"--data: {error}") from None
    n_valid = max(1, round(options.images * options.validation))
    counts = [options.images, n_valid]
    return make_images(counts, options.classes, options.size, options.seed, allocate), options.classes


def make_images(counts: Sequence[int], n_classes: int, size: int, seed: int, allocate: Allocate) -> list[ImageSet]:
    """Return parts of images with coarse colours and noise over them, the same for the same seed."""
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
        parts.append(ImageSet(images, labels))
    return parts


def read_folder(
    folder: Path, size: int, validation: float, seed: int, allocate: Allocate
) -> tuple[list[ImageSet], int]:
    """Return the images to train and to validate from one subfolder per class, and the number of classes.

    Images of any size are scaled, and cropped on both sides.  Classes are numbered in the alphabetical order of the
    subfolders.
    """
    source = image_folder(folder, size)
    labels = np.asarray(source.labels)
    order = np.random.default_rng(seed).permutation(len(source))
    n_valid = max(1, round(len(source) * validation))
    if n_valid == len(source):
        raise ValueError(f"no image is left to train: {folder} has {len(source)}, {n_valid} to validate")
    parts = []
    for indexes in (order[n_valid:], order[:n_valid]):
        images = allocate((len(indexes), 3, size, size))
        # Pillow lets other threads run while it decodes.
        with ThreadPoolExecutor() as pool:
            for i, (pixels, _) in enumerate(pool.map(source.__getitem__, indexes)):
                images[i] = pixels
        parts.append(ImageSet(images, labels[indexes]))
    return parts, len(source.classes)
