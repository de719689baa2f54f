"""Command line arguments of all scripts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from synkhronos import get_n_gpu
from synkhronos.training import updates

# Update rules, with a learning rate that suits the demos' networks.
LEARNING_RATES = {
    "sgd": 0.1,
    "momentum": 0.05,
    "nesterov_momentum": 0.05,
    "adagrad": 0.01,
    "rmsprop": 0.0005,
    "adadelta": 1.0,
    "adam": 0.0005,
    "adamax": 0.001,
    "amsgrad": 0.0005,
}


def parse_positive(text: str) -> int:
    """Return a positive integer, parsed from an argument; raise ArgumentTypeError if it is none."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


#: Options of an argument that is a positive integer.
POSITIVE: dict[str, Any] = {"type": parse_positive, "metavar": "N"}


def make_parser(description: str, examples: list[str], script: str) -> argparse.ArgumentParser:
    """Return an argument parser that prints examples."""
    name = Path(script).name
    lines = "\n".join(f"  python {name} {example}".rstrip() for example in examples)
    return argparse.ArgumentParser(
        prog=name,
        description=description,
        epilog=f"examples:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # run_serial() compares arguments with their full names.
        allow_abbrev=False,
    )


def add_device_arguments(arguments: Any) -> None:
    """Add ``--gpu`` and ``--cpu``."""
    add = arguments.add_mutually_exclusive_group().add_argument
    settings = {"dest": "use_gpu", "action": "store_const"}
    add("--gpu", const=True, help="compute on GPUs (default: if there are usable GPUs)", **settings)
    add("--cpu", const=False, help="compute on CPU cores", **settings)


def add_rank_arguments(arguments: argparse.ArgumentParser) -> None:
    """Add the arguments of `synkhronos.fork`, and ``--compare``."""
    group = arguments.add_argument_group("ranks")
    add = group.add_argument
    add("--ranks", **POSITIVE, help="processes (default: one for each GPU, or for each core)")
    add_device_arguments(group)
    add("--compare", action="store_true", help="first train in one process, and show the speed-up")


def add_training_arguments(arguments: argparse.ArgumentParser, epochs: int, steps_per_launch: int = 1) -> None:
    """Add epochs, update rule, learning rate and seed."""
    add = arguments.add_argument_group("training").add_argument
    add("--epochs", **POSITIVE, default=epochs, help="passes over the data (%(default)s)")
    add("--steps", **POSITIVE, help="at most this many steps in an epoch")
    add("--at-once", **POSITIVE, default=steps_per_launch, help="steps that the GPUs take in one go (%(default)s)")
    rules = list(LEARNING_RATES)
    add("--rule", choices=rules, default="nesterov_momentum", metavar="NAME", help=f"{', '.join(rules)} (%(default)s)")
    add("--learning-rate", type=float, metavar="R", help="(default: one that suits the rule)")
    add("--seed", type=int, default=1, metavar="N", help="of weights, batches and dropout (%(default)s)")
    add("--slices", **POSITIVE, default=4, help="pieces of validation and test, to save memory (%(default)s)")
    add("--quiet", action="store_true", help="no progress bar")
    add("--result", type=Path, metavar="FILE", help="write the figures into a file, as JSON")


def finish_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Check ``--gpu``, set the default learning rate, and set `update_rule` to the function of that name."""
    if options.use_gpu and get_n_gpu() == 0:
        parser.error("argument --gpu: this machine has no usable GPU")
    if options.learning_rate is None:
        options.learning_rate = LEARNING_RATES[options.rule]
    options.update_rule = getattr(updates, options.rule)
