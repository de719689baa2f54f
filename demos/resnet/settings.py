"""The arguments of both ResNet scripts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lasagne_tools import options as common
from lasagne_tools.library import describe_libraries
from network import BLOCKS

__all__ = ["add_arguments", "describe_run", "parse_options"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of both scripts."""
    add = parser.add_argument_group("network").add_argument
    depths = ", ".join(map(str, BLOCKS))
    add("--depth", type=int, choices=BLOCKS, default=50, metavar="N", help=f"layers: {depths} (%(default)s)")
    add("--blocks", type=_parse_blocks, metavar="N,N,...", help="blocks of each stage, instead of a depth: 1,1,1,1")
    add("--width", **common.POSITIVE, default=64, help="filters of the first layer (%(default)s)")
    add("--weight-decay", type=float, default=1e-4, metavar="R", help="penalty of large weights (%(default)s)")
    add("--smoothing", type=float, default=0.0, metavar="SHARE", help="label smoothing (%(default)s)")
    add = parser.add_argument_group("images").add_argument
    add("--data", type=Path, metavar="DIR", help="a folder with a subfolder of images for each class")
    add("--images", **common.POSITIVE, default=1280, help="synthetic images, without DIR (%(default)s)")
    add("--classes", **common.POSITIVE, default=10, help="synthetic classes (%(default)s)")
    add("--size", **common.POSITIVE, default=224, help="height and width (%(default)s)")
    add("--validation", type=float, default=0.1, metavar="SHARE", help="of the images to validate (%(default)s)")
    add("--batch-size", **common.POSITIVE, default=32, help="images a step, of each rank (%(default)s)")
    common.add_training_arguments(parser, epochs=3)


def parse_options(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and set `blocks`; exit with a message if it is invalid."""
    options = parser.parse_args(words)
    if not 0 < options.validation < 1:
        parser.error(f"argument --validation: {options.validation} is not between 0 and 1")
    options.blocks = options.blocks or BLOCKS[options.depth]
    common.finish_options(parser, options)
    return options


def describe_run(options: argparse.Namespace) -> str:
    """Return a line that describes the network and the images."""
    return (
        f"residual network with {','.join(map(str, options.blocks))} blocks and {options.width} filters, "
        f"{options.size}x{options.size} images, {options.batch_size} a step and rank; {describe_libraries()}"
    )


def _parse_blocks(text: str) -> tuple[int, ...]:
    return tuple(common.parse_positive(word) for word in text.split(","))
