"""Train a network on handwritten digits in one process, with plain functions of the graph library.

The serial program that the other two scripts are to be compared with; their option --compare runs it. Its functions
are Theano's own (PyTensor's, where that is installed).
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
from digits import Part, add_arguments, load_digits, parse_options
from lasagne_tools import options as common
from lasagne_tools.batches import evaluate_in_slices, make_shuffled_batches, take_steps
from lasagne_tools.fit import fit
from lasagne_tools.library import describe_libraries, theano
from lasagne_tools.report import print_results
from models import Network, build_network

EXAMPLES = ["mlp --epochs 50", "cnn --data ~/mnist --rule adam --gpu"]


class SerialTrainer:
    """A network and its data.

    Parameters
    ----------
    network : Network
        The network to train.
    parts : list of three Part
        Images and labels to train, to validate and to test.
    options : Namespace
        Parsed command line.
    """

    n_ranks = 1

    def __init__(self, network: Network, parts: list[Part], options: argparse.Namespace) -> None:
        self._options = options
        self._train_part, self._valid_part, self._test_part = parts
        # The update rules of Synkhronos need no ranks. Lasagne's own have the same formulas.
        grad_updates, param_updates, _ = options.update_rule(
            network.loss, network.params, learning_rate=options.learning_rate
        )
        inputs = [network.x, network.y]
        self._gradient = theano.function(inputs, network.loss, updates=grad_updates)
        self._update = theano.function([], updates=param_updates)
        self._evaluate = theano.function(inputs, [network.test_loss, network.test_error])

    def make_batches(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Return the epoch's batches: lists of shuffled indexes."""
        return make_shuffled_batches(rng, len(self._train_part.labels), self._options.batch_size)

    def count_rows(self, batch: np.ndarray) -> list[int]:
        """Return the number of rows of a batch that the process computes: all."""
        return [len(batch)]

    def train(self, batches: Sequence[np.ndarray]) -> list[Any]:
        """Take a step for each batch; return the losses."""
        return take_steps(self._gradient, self._update, *self._train_part, batches)

    def validate(self) -> tuple[float, float]:
        """Return loss and error of the validation data."""
        return self._compute_loss_and_error(self._valid_part)

    def test(self) -> tuple[float, float]:
        """Return loss and error of the test data."""
        return self._compute_loss_and_error(self._test_part)

    def _compute_loss_and_error(self, part: Part) -> tuple[float, float]:
        # The serial counterpart of num_slices.
        return evaluate_in_slices(self._evaluate, *part, self._options.slices)


def main() -> None:
    """Train, test, and print the results."""
    parser = common.make_parser(__doc__.splitlines()[0], EXAMPLES, __file__)
    add_arguments(parser)
    common.add_device_arguments(parser)
    options = parse_options(parser)

    start = perf_counter()
    # One rank without workers: fork() selects the GPU if there is one.
    synk.fork(1, use_gpu=options.use_gpu)
    network = build_network(options.model, options.seed, options.dropout)
    trainer = SerialTrainer(network, load_digits(options), options)
    print(f"{options.model} in one process; {describe_libraries()}")
    run = fit(trainer, options, "one process", start)
    run.test = trainer.test()
    synk.close()
    print_results(run, options)


if __name__ == "__main__":
    main()
