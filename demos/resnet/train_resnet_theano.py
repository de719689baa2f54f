"""Train a residual network on images in one process, with plain functions of the graph library.

The serial script that train_resnet.py is to be compared with; its option --compare runs this. The functions are
Theano's own (PyTensor's, where Theano is not installed).
"""

from __future__ import annotations

import synkhronos.compat  # noqa: F401 - before Lasagne

# isort: split
import sys
from pathlib import Path
from time import perf_counter

import numpy as np

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import synkhronos as synk
from images import load_images
from lasagne_tools import options as common
from lasagne_tools.batches import make_full_batches
from lasagne_tools.fit import fit
from lasagne_tools.report import print_results
from lasagne_tools.serial import SerialTrainer
from network import build_network
from settings import add_arguments, describe_run, parse_options

EXAMPLES = [
    "--batch-size 64 --gpu",
    "--data ~/pictures --epochs 50 --rule adam",
    "--depth 14 --width 16 --size 32 --images 512 --batch-size 16 --cpu",
]


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
    trainer = SerialTrainer(network, parts, options, make_full_batches, network.average_updates)
    print(f"one process, {describe_run(options)}")
    run = fit(trainer, options, "one process", start)
    synk.close()
    print_results(run, options)


if __name__ == "__main__":
    main()
