"""Train a residual network on images in one process, with plain functions of the graph library.

The serial program that train_resnet.py is to be compared with; its option --compare runs this. The functions are
Theano's own (PyTensor's, where Theano is not installed).
"""

from __future__ import annotations

import synkhronos.compat  # noqa: F401 - before Lasagne

# isort: split
import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import synkhronos as synk
from images import Part, load_images
from lasagne_tools import options as common
from lasagne_tools.batches import evaluate_in_slices, make_full_batches, take_steps
from lasagne_tools.fit import fit
from lasagne_tools.library import theano
from lasagne_tools.report import print_results
from network import Network, build_network
from settings import add_arguments, describe_run, parse_options

EXAMPLES = [
    "--batch-size 64 --gpu",
    "--data ~/pictures --epochs 50 --rule adam",
    "--depth 14 --width 16 --size 32 --images 512 --batch-size 16 --cpu",
]


class SerialTrainer:
    """A network and its images.

    Parameters
    ----------
    network : Network
        The network to train.
    parts : list of two Part
        Images and labels to train and to validate.
    options : Namespace
        Parsed command line.
    """

    n_ranks = 1

    def __init__(self, network: Network, parts: list[Part], options: argparse.Namespace) -> None:
        self._options = options
        self._train_part, self._valid_part = parts
        # The update rules of Synkhronos need no ranks. Lasagne's own have the same formulas.
        grad_updates, param_updates, _ = options.update_rule(
            network.loss, network.params, learning_rate=options.learning_rate
        )
        inputs = [network.x, network.y]
        updates = [*grad_updates.items(), *network.average_updates.items()]
        self._gradient = theano.function(inputs, network.loss, updates=updates)
        self._update = theano.function([], updates=param_updates)
        self._evaluate = theano.function(inputs, [network.test_loss, network.test_error])

    def make_batches(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Return the epoch's batches: lists of shuffled indexes, without an incomplete last one."""
        return make_full_batches(rng, len(self._train_part.labels), self._options.batch_size)

    def count_rows(self, batch: np.ndarray) -> list[int]:
        """Return the number of rows of a batch that the process computes: all."""
        return [len(batch)]

    def train(self, batches: Sequence[np.ndarray]) -> list[Any]:
        """Take a step for each batch; return the losses."""
        return take_steps(self._gradient, self._update, *self._train_part, batches)

    def validate(self) -> tuple[float, float]:
        """Return loss and error of the validation images."""
        # The serial counterpart of num_slices.
        return evaluate_in_slices(self._evaluate, *self._valid_part, self._options.slices)


def main() -> None:
    """Train, and print the results."""
    parser = common.make_parser(__doc__.splitlines()[0], EXAMPLES, __file__)
    add_arguments(parser)
    common.add_device_arguments(parser)
    options = parse_options(parser)

    start = perf_counter()
    # One rank without workers: fork() selects the GPU if there is one.
    synk.fork(1, use_gpu=options.use_gpu)
    parts, n_classes = load_images(options, lambda shape: np.empty(shape, np.uint8))
    shape = options.blocks, options.width, options.size, n_classes
    network = build_network(*shape, options.weight_decay, options.seed, options.smoothing)
    trainer = SerialTrainer(network, parts, options)
    print(f"one process, {describe_run(options)}")
    run = fit(trainer, options, "one process", start)
    synk.close()
    print_results(run, options)


if __name__ == "__main__":
    main()
