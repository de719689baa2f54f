"""Train a network on handwritten digits, data-parallel, with the data in host memory.

The data is in Data objects, in memory shared by all ranks. A step gets shuffled indexes, and the ranks copy their
shares of the rows in parallel. The program differs from the serial one, train_mnist_theano.py, in the lines that begin
with `synk.` and in the training function.
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
from lasagne_tools.batches import make_shuffled_batches
from lasagne_tools.fit import fit
from lasagne_tools.library import describe_libraries
from lasagne_tools.report import print_results, run_serial
from models import Network, build_network
from synkhronos.training import make_train_function

SERIAL = Path(__file__).with_name("train_mnist_theano.py")


class CpuDataTrainer:
    """A network that all ranks train, and its data in host memory."""

    def __init__(self, network: Network, parts: list[ImageSet], options: argparse.Namespace, n_ranks: int) -> None:
        self.n_ranks, self._options = n_ranks, options
        self._train_part, self._valid_part, self._test_part = [
            (synk.data(part.images, network.x), synk.data(part.labels, network.y)) for part in parts
        ]
        # Gradients of all ranks' rows, one all-reduce, and an update, as one callable.
        self._step = make_train_function(
            network.loss,
            network.params,
            network.x,
            network.y,
            options.update_rule,
            learning_rate=options.learning_rate,
        )
        # "mean" weighs each rank and slice by its rows: exact for any number of images.
        self._evaluate = synk.function(
            [network.x, network.y], [(network.test_loss, "mean"), (network.test_error, "mean")]
        )
        synk.distribute()

    def make_batches(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Return the epoch's batches: lists of shuffled indexes."""
        return make_shuffled_batches(rng, len(self._train_part[1]), self._options.batch_size)

    def count_rows(self, batch: np.ndarray) -> list[int]:
        """Return the number of rows of a batch that each rank computes."""
        return [len(rows) for rows in np.array_split(batch, self.n_ranks)]

    def train(self, batches: Sequence[np.ndarray]) -> list[Any]:
        """Take a step for each batch, on GPUs in one launch; return the losses."""
        return self._step.steps(*self._train_part, batches=batches)

    def validate(self) -> tuple[float, float]:
        """Return loss and error of the validation data, by one call on all of it."""
        return self._compute_loss_and_error(self._valid_part)

    def test(self) -> tuple[float, float]:
        """Return loss and error of the test data."""
        return self._compute_loss_and_error(self._test_part)

    def _compute_loss_and_error(self, part: tuple[synk.Data, synk.Data]) -> tuple[float, float]:
        # Each rank takes its rows in slices, so that a large set needs no more memory than a small one.
        loss, error = self._evaluate(*part, num_slices=self._options.slices)
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
    network = build_network(options.model, options.seed, options.dropout)
    trainer = CpuDataTrainer(network, load_digits(options), options, n_ranks)
    print(f"{options.model} on {n_ranks} ranks, data in host memory; {describe_libraries()}")
    run = fit(trainer, options, f"{n_ranks} ranks", start)
    run.test = trainer.test()
    synk.close()
    print_results(run, options, serial)


if __name__ == "__main__":
    main()
