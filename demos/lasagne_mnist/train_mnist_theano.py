"""Train a network on handwritten digits in one process, with plain functions of the graph library.

The serial script that the other two scripts are to be compared with; their option --compare runs it. Its functions
are Theano's own (PyTensor's, where that is installed).
"""

from __future__ import annotations

import synkhronos.compat  # noqa: F401 - before Lasagne

# isort: split
import sys
from pathlib import Path
from time import perf_counter

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import synkhronos as synk
from digits import add_arguments, load_digits, parse_options
from lasagne_tools import options as common
from lasagne_tools.batches import make_shuffled_batches
from lasagne_tools.fit import fit
from lasagne_tools.library import describe_libraries
from lasagne_tools.report import print_results
from lasagne_tools.serial import SerialTrainer
from models import build_network

EXAMPLES = ["mlp --epochs 50", "cnn --data ~/mnist --rule adam --gpu"]


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
    trainer = SerialTrainer(network, load_digits(options), options, make_shuffled_batches)
    print(f"{options.model} in one process; {describe_libraries()}")
    run = fit(trainer, options, "one process", start)
    run.test = trainer.test()
    synk.close()
    print_results(run, options)


if __name__ == "__main__":
    main()
