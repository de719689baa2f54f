"""Train a network on handwritten digits, data-parallel, with the data in host memory.

The data is in Data objects, in memory shared by all ranks. A step gets shuffled indexes, and the ranks copy their
shares of the rows in parallel. The program differs from the serial one, train_mnist_theano.py, in the calls of `synk`
and in the trainer: lasagne_tools/parallel.py has this one's, and lasagne_tools/serial.py the other's.
"""

from __future__ import annotations

import synkhronos.compat  # noqa: F401 - before Lasagne

# isort: split
import sys
from pathlib import Path
from time import perf_counter

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import synkhronos as synk
from digits import EXAMPLES, add_arguments, load_digits, parse_options
from lasagne_tools import options as common
from lasagne_tools.batches import make_shuffled_batches
from lasagne_tools.fit import fit
from lasagne_tools.library import describe_libraries
from lasagne_tools.parallel import ParallelTrainer
from lasagne_tools.report import print_results, run_serial
from models import build_network

SERIAL = Path(__file__).with_name("train_mnist_theano.py")


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
    parts = [(synk.data(part.images, network.x), synk.data(part.labels, network.y)) for part in load_digits(options)]
    trainer = ParallelTrainer(network, parts, options, n_ranks, make_shuffled_batches, options.batch_size)
    print(f"{options.model} on {n_ranks} ranks, data in host memory; {describe_libraries()}")
    run = fit(trainer, options, f"{n_ranks} ranks", start)
    run.test = trainer.test()
    synk.close()
    print_results(run, options, serial)


if __name__ == "__main__":
    main()
