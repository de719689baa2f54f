"""Train a network on handwritten digits, data-parallel, with the data in the ranks' own memory.

The data is scattered once into shared variables, which are in GPU memory if ranks use GPUs. In a step, `batch_s`
selects rows of each rank's own part, so that only indexes are sent. Each rank shuffles its own part.
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
from digits import EXAMPLES, ImageSet, add_arguments, load_digits, parse_options
from lasagne_tools import options as common
from lasagne_tools.fit import fit
from lasagne_tools.library import describe_libraries, theano
from lasagne_tools.report import print_results, run_serial
from models import IMAGE, Network, build_network
from synkhronos.training import make_train_function

SERIAL = Path(__file__).with_name("train_mnist_theano.py")


class GpuDataTrainer:
    """A network that all ranks train, and its data in the ranks' own memory."""

    def __init__(self, network: Network, parts: list[ImageSet], options: argparse.Namespace, n_ranks: int) -> None:
        self.n_ranks, self._options = n_ranks, options
        train, valid, test = [self._make_part_variables(name) for name in ("train", "valid", "test")]

        # Gradients of the ranks' own rows, one all-reduce, and an update, as one callable.
        self._step = make_train_function(
            network.loss,
            network.params,
            network.x,
            network.y,
            options.update_rule,
            sliceable_shareds=train,
            learning_rate=options.learning_rate,
        )

        loss_and_error = [(network.test_loss, "mean"), (network.test_error, "mean")]
        self._validate = self._make_function_of_shareds(valid, network, loss_and_error)
        self._test = self._make_function_of_shareds(test, network, loss_and_error)
        synk.distribute()
        for variables, part in zip((train, valid, test), parts, strict=True):
            synk.scatter(variables, list(part))
        self._lengths = synk.get_lengths(train[1])

    @staticmethod
    def _make_part_variables(name: str) -> list[Any]:
        """Return shared variables for images and labels, which the ranks' rows go into."""
        images = np.zeros((1, *IMAGE), theano.config.floatX)
        labels = np.zeros(1, "int32")
        return [theano.shared(images, f"{name}_images"), theano.shared(labels, f"{name}_labels")]

    @staticmethod
    def _make_function_of_shareds(variables: list[Any], network: Network, outputs: Any) -> synk.Function:
        """Make a function that has shared variables in place of its inputs."""
        givens = list(zip((network.x, network.y), variables, strict=True))
        return synk.function([], outputs, givens=givens, sliceable_shareds=variables)

    def make_batches(self, rng: np.random.Generator) -> list[list[np.ndarray]]:
        """Return for each step a list of shuffled indexes for each rank."""
        n_steps = -(-sum(self._lengths) // self._options.batch_size)
        by_rank = [np.array_split(rng.permutation(length), n_steps) for length in self._lengths]
        return [list(rows) for rows in zip(*by_rank, strict=True)]

    def count_rows(self, batch: list[np.ndarray]) -> list[int]:
        """Return the number of rows of a batch that each rank computes."""
        return [len(rows) for rows in batch]

    def train(self, batches: Sequence[list[np.ndarray]]) -> list[Any]:
        """Take a step for each batch, on GPUs in one launch; return the losses."""
        return self._step.steps(batches_s=batches)

    def validate(self) -> tuple[float, float]:
        """Return loss and error of the validation data, by one call on all of it."""
        return self._compute_loss_and_error(self._validate)

    def test(self) -> tuple[float, float]:
        """Return loss and error of the test data."""
        return self._compute_loss_and_error(self._test)

    def _compute_loss_and_error(self, function: synk.Function) -> tuple[float, float]:
        # Each rank takes its rows in slices, so that a large set needs no more memory than a small one.
        loss, error = function(num_slices=self._options.slices)
        return float(loss), float(error)


def main() -> None:
    """Train, test, and print the results."""
    parser = common.make_parser(__doc__.splitlines()[0], EXAMPLES, __file__)
    add_arguments(parser)
    common.add_rank_arguments(parser)
    options = parse_options(parser)
    serial = run_serial(SERIAL) if options.compare else None

    start = perf_counter()
    n_ranks = synk.fork(options.ranks, use_gpu=options.use_gpu)
    if options.batch_size < n_ranks:
        parser.error(f"argument --batch-size: {options.batch_size} images are too few for {n_ranks} ranks")
    network = build_network(options.model, options.seed, options.dropout)
    trainer = GpuDataTrainer(network, load_digits(options), options, n_ranks)
    print(f"{options.model} on {n_ranks} ranks, data in the ranks' memory; {describe_libraries()}")
    run = fit(trainer, options, f"{n_ranks} ranks", start)
    run.test = trainer.test()
    synk.close()
    print_results(run, options, serial)


if __name__ == "__main__":
    main()
