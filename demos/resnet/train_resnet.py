"""Train a residual network on images, data-parallel.

Each rank computes the gradient for its own rows of a batch. Batch normalization sees these rows alone; the running
averages of all ranks are averaged in each step, with the gradients.
"""

from __future__ import annotations

import synkhronos.compat  # noqa: F401 - before Lasagne

# isort: split
import sys
from pathlib import Path
from time import perf_counter

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import synkhronos as synk
from images import load_images
from lasagne_tools import options as common
from lasagne_tools.batches import make_full_batches
from lasagne_tools.fit import fit
from lasagne_tools.parallel import ParallelTrainer
from lasagne_tools.report import print_results, run_serial
from network import build_network
from settings import add_arguments, describe_run, parse_options

SERIAL = Path(__file__).with_name("train_resnet_theano.py")
EXAMPLES = [
    "--ranks 2 --batch-size 32 --compare",
    "--data ~/pictures --epochs 50 --rule adam",
    "--depth 14 --width 16 --size 32 --images 512 --batch-size 16 --cpu",
]


def main() -> None:
    """Train, and print the results."""
    parser = common.make_parser(__doc__.splitlines()[0], EXAMPLES, __file__)
    add_arguments(parser)
    common.add_rank_arguments(parser)
    options = parse_options(parser)
    serial = run_serial(SERIAL) if options.compare else None

    start = perf_counter()
    n_ranks = synk.fork(options.ranks, use_gpu=options.use_gpu)
    image_sets, n_classes = load_images(options, lambda shape: synk.data(dtype="uint8", shape=shape))
    shape = options.blocks, options.width, options.size, n_classes
    network = build_network(*shape, options.weight_decay, options.seed, options.smoothing)
    parts = [(images, synk.data(labels, network.y)) for images, labels in image_sets]
    batch_size = n_ranks * options.batch_size
    trainer = ParallelTrainer(network, parts, options, n_ranks, make_full_batches, batch_size, network.average_updates)
    print(f"{n_ranks} ranks, {describe_run(options)}")
    run = fit(trainer, options, f"{n_ranks} ranks", start)
    synk.close()
    print_results(run, options, serial)


if __name__ == "__main__":
    main()
