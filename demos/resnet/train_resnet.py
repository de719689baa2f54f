"""Train a residual network on images, data-parallel.

Each rank computes the gradient for its own rows of a batch. Batch normalization sees these rows alone; the running
averages of all ranks are averaged in each step, with the gradients.
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
from images import ImageSet, load_images
from lasagne_tools import options as common
from lasagne_tools.batches import make_full_batches
from lasagne_tools.fit import fit
from lasagne_tools.report import print_results, run_serial
from network import Network, build_network
from settings import add_arguments, describe_run, parse_options
from synkhronos.training import make_train_function

SERIAL = Path(__file__).with_name("train_resnet_theano.py")
EXAMPLES = [
    "--ranks 2 --batch-size 32 --compare",
    "--data ~/pictures --epochs 50 --rule adam",
    "--depth 14 --width 16 --size 32 --images 512 --batch-size 16 --cpu",
]


class ParallelTrainer:
    """A network that all ranks train, and its images, in Data objects."""

    def __init__(self, network: Network, parts: list[ImageSet], options: argparse.Namespace, n_ranks: int) -> None:
        self.n_ranks, self._options = n_ranks, options
        self._batch_size = n_ranks * options.batch_size
        self._train_part, self._valid_part = [(part.images, synk.data(part.labels, network.y)) for part in parts]

        # One callable: gradients and running averages of all ranks' rows, one all-reduce, and an update.
        self._step = make_train_function(
            network.loss,
            network.params,
            network.x,
            network.y,
            options.update_rule,
            extra_updates=network.average_updates,
            learning_rate=options.learning_rate,
        )
        self._evaluate = synk.function(
            [network.x, network.y],
            [(network.test_loss, "mean"), (network.test_error, "mean")],
            name="test_loss_and_error",
        )
        synk.distribute()

    def make_batches(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Return the epoch's batches for all ranks: lists of shuffled indexes, without an incomplete last one."""
        return make_full_batches(rng, len(self._train_part[1]), self._batch_size)

    def count_rows(self, batch: np.ndarray) -> list[int]:
        """Return the number of rows of a batch that each rank computes."""
        return [len(batch) // self.n_ranks] * self.n_ranks

    def train(self, batches: Sequence[np.ndarray]) -> list[Any]:
        """Take a step for each batch; return the losses."""
        return self._step.steps(*self._train_part, batches=batches)

    def validate(self) -> tuple[float, float]:
        """Return loss and error of the validation images, by one call on all of them."""
        # Each rank takes its rows in slices, which bounds the memory that they need.
        loss, error = self._evaluate(*self._valid_part, num_slices=self._options.slices)
        return float(loss), float(error)


def main() -> None:
    """Train, and print the results."""
    parser = common.make_parser(__doc__.splitlines()[0], EXAMPLES, __file__)
    add_arguments(parser)
    common.add_rank_arguments(parser)
    options = parse_options(parser)
    serial = run_serial(SERIAL) if options.compare else None

    start = perf_counter()
    n_ranks = synk.fork(options.ranks, use_gpu=options.use_gpu)
    parts, n_classes = load_images(options, lambda shape: synk.data(dtype="uint8", shape=shape))
    shape = options.blocks, options.width, options.size, n_classes
    network = build_network(*shape, options.weight_decay, options.seed, options.smoothing)
    trainer = ParallelTrainer(network, parts, options, n_ranks)
    print(f"{n_ranks} ranks, {describe_run(options)}")
    run = fit(trainer, options, f"{n_ranks} ranks", start)
    synk.close()
    print_results(run, options, serial)


if __name__ == "__main__":
    main()
