"""Train a network on MNIST on all cores, then in one process, and compare.

The network is plain PyTensor or Theano code (class `MLP`). `train_on_all_ranks` trains it data-parallel with four
calls of Synkhronos; `train_in_one_process` is the serial script. Both start from the same weights and use the
same batches. Dropout masks differ between ranks, so that the curves are similar; with ``--dropout 0`` they agree.

Run it with ``python3 run.py mnist``; ``python3 run.py mnist --help`` lists the options.

Only training steps are timed, without the first step, which compiles, and without validation. The excluded time is
printed.
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import mnist
import synkhronos as synk
from synkhronos.training import make_train_function, make_train_function_serial, updates

try:
    import pytensor as graph_library
    import pytensor.tensor as T
except ImportError:
    import theano as graph_library
    import theano.tensor as T
    from theano.sandbox.rng_mrg import MRG_RandomStreams
try:
    import matplotlib
    import pooch
    from threadpoolctl import threadpool_info, threadpool_limits
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm
except ModuleNotFoundError as error:
    raise SystemExit(f"this demo needs {error.name}: pip install 'synkhronos[demos]'") from None

matplotlib.use("Agg")
graph_library.config.floatX = "float32"

# The update rules and a learning rate that suits each on this problem.
LEARNING_RATES = {
    "sgd": 0.5,
    "momentum": 0.1,
    "nesterov_momentum": 0.1,
    "adagrad": 0.02,
    "rmsprop": 0.001,
    "adadelta": 1.0,
    "adam": 0.001,
    "adamax": 0.002,
    "amsgrad": 0.001,
}
# Validation and test go through the network in this many pieces, which bounds the memory that they need.
EVALUATION_SLICES = 4


class MLP:
    """A multi-layer perceptron: fully connected layers with rectifiers, and a softmax at the end.

    `sizes` are the units of each layer, the input and the output included; `dropout` is the share of hidden units that
    a training step leaves out.  `loss` is the mean cross-entropy with dropout.  `error` is the share of images whose
    most probable digit is not the label, without dropout.  `generators` are the random generators of `loss`, with their
    new states after a step.
    """

    def __init__(self, sizes: list[int], dropout: float, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.x = T.matrix("x")
        self.y = T.ivector("y")
        self.layers = []
        for n_in, n_out in pairwise(sizes):
            # He et al. (2015): keeps the variance of the activations from layer to layer.
            weights = rng.normal(0, np.sqrt(2 / n_in), (n_in, n_out)).astype(np.float32)
            biases = np.zeros(n_out, dtype=np.float32)
            self.layers.append((graph_library.shared(weights, "W"), graph_library.shared(biases, "b")))
        self.params = [param for layer in self.layers for param in layer]
        self.generators: list[tuple[Any, Any]] = []
        self.loss = self._compute_cross_entropy(self._compute_scores(dropout, seed))
        self.error = T.neq(T.argmax(self._compute_scores(), axis=1), self.y).mean(dtype="float32")

    def _compute_scores(self, dropout: float = 0.0, seed: int = 0) -> Any:
        """Return the last layer's values before the softmax."""
        keep = np.float32(1 - dropout)
        hidden = self.x
        for number, (weights, biases) in enumerate(self.layers[:-1], start=1):
            hidden = T.maximum(T.dot(hidden, weights) + biases, 0)
            if dropout:
                numbers, generators = draw_uniform(hidden.shape, seed + number)
                self.generators += generators
                mask = numbers < keep
                # Division by the share of kept units preserves the expected value.
                hidden = hidden * T.cast(mask, "float32") / keep
        weights, biases = self.layers[-1]
        return T.dot(hidden, weights) + biases

    def _compute_cross_entropy(self, scores: Any) -> Any:
        # Subtracting the largest score changes nothing but keeps exp() from overflowing.
        scores = scores - scores.max(axis=1, keepdims=True)
        log_probabilities = scores - T.log(T.exp(scores).sum(axis=1, keepdims=True))
        return -log_probabilities[T.arange(self.y.shape[0]), self.y].mean()


def draw_uniform(shape: Any, seed: int) -> tuple[Any, list[tuple[Any, Any]]]:
    """Return random numbers from 0 to 1, new ones at each call, and the update of their generator.

    With Theano there is no update, since Theano updates its generator itself.
    """
    if graph_library.__name__ == "theano":
        return MRG_RandomStreams(seed).uniform(size=shape, dtype="float32"), []
    generator = T.random.shared_rng(seed=seed)
    next_generator, numbers = generator.uniform(size=shape, dtype="float32")
    return numbers, [(generator, next_generator)]


@dataclass
class RunResults:
    """Results of one training run."""

    title: str
    n_ranks: int
    #: The mean training loss of each epoch.
    losses: list[float] = field(default_factory=list)
    #: The validation error, from 0 to 1, before the first epoch and after each.
    errors: list[float] = field(default_factory=list)
    #: From the start to the end of the first step: building, compiling, and for ranks forking.
    setup_seconds: float = 0.0
    #: Time in all training steps but the first, and the number of their images.
    seconds: float = 0.0
    n_images: int = 0
    test_accuracy: float = 0.0
    #: Threads of linear algebra in this process.
    blas_threads: int = 0

    @property
    def images_per_second(self) -> float:
        """Speed of training; NaN after only one step, which is not timed."""
        return self.n_images / self.seconds if self.seconds else float("nan")


def train_on_all_ranks(digits: mnist.Digits, options: argparse.Namespace) -> RunResults:
    """Train data-parallel: every rank computes the gradient for its share of each batch."""
    start = perf_counter()
    n_ranks = synk.fork(options.ranks)
    model = MLP(options.sizes, options.dropout, options.seed)
    train = make_train_function(
        model.loss,
        model.params,
        model.x,
        model.y,
        options.rule,
        extra_updates=model.generators,
        learning_rate=options.learning_rate,
    )
    # "mean" weights each rank and slice by its rows: exact for any number of images.
    error = synk.function([model.x, model.y], (model.error, "mean"), name="classification_error")
    synk.distribute()
    parts = [(synk.data(part.images, model.x), synk.data(part.labels, model.y)) for part in digits]

    def evaluate(images: synk.Data, labels: synk.Data) -> float:
        return float(error(images, labels, num_slices=EVALUATION_SLICES))

    run = RunResults(f"{n_ranks} ranks", n_ranks)
    fit(run, start, train, evaluate, parts, options)
    synk.close()
    return run


def train_in_one_process(digits: mnist.Digits, options: argparse.Namespace) -> RunResults:
    """Train the same network without ranks."""
    start = perf_counter()
    # For a fair comparison, BLAS uses all cores, as in a program without Synkhronos.
    with threadpool_limits(len(os.sched_getaffinity(0))):
        model = MLP(options.sizes, options.dropout, options.seed)
        train = make_train_function_serial(
            model.loss,
            model.params,
            model.x,
            model.y,
            options.rule,
            extra_updates=model.generators,
            learning_rate=options.learning_rate,
        )
        error = graph_library.function([model.x, model.y], model.error)
        run = RunResults("one process", 1)
        fit(run, start, train, lambda images, labels: float(error(images, labels)), digits, options)
    return run


def fit(
    run: RunResults,
    start: float,
    train: Callable[..., Any],
    evaluate: Callable[..., float],
    parts: Sequence[tuple[Any, Any]],
    options: argparse.Namespace,
) -> None:
    """Train for some epochs in shuffled batches, validate after each, and test at the end.

    ``train(images, labels, batch=rows)`` takes one step and returns the loss; ``evaluate(images, labels)`` returns the
    share of wrong answers.  `parts` has the images and labels of all three parts in the form that both take.
    """
    rng = np.random.default_rng(options.seed)
    train_part, valid_part, test_part = parts
    n_train = len(train_part[1])
    n_batches = -(-n_train // options.batch_size)
    bar = tqdm(total=options.epochs * n_batches, desc=f"{run.title}, compiling", unit="batch")
    # Messages of the library are printed above the progress bar.
    with logging_redirect_tqdm([logging.getLogger("synkhronos")]), bar:
        run.errors.append(evaluate(*valid_part))
        for _ in range(options.epochs):
            order = rng.permutation(n_train)
            total_loss = 0.0
            for first in range(0, n_train, options.batch_size):
                rows = order[first : first + options.batch_size]
                step_start = perf_counter()
                total_loss += len(rows) * float(train(*train_part, batch=rows))
                now = perf_counter()
                if run.setup_seconds == 0:
                    run.setup_seconds = now - start
                    bar.set_description(run.title)
                else:
                    run.seconds += now - step_start
                    run.n_images += len(rows)
                bar.update()
            run.losses.append(total_loss / n_train)
            run.errors.append(evaluate(*valid_part))
            bar.set_postfix(loss=f"{run.losses[-1]:.4f}", validation_error=f"{run.errors[-1]:.2%}")
    run.test_accuracy = 1 - evaluate(*test_part)
    # At the end, since compiled functions may load another BLAS library.
    run.blas_threads = count_blas_threads()


def count_blas_threads() -> int:
    """Return the number of threads that linear algebra uses in this process now."""
    return max((pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"), default=1)


def print_table(runs: list[RunResults]) -> None:
    """Print a line for each run, with the speed-up relative to the last one."""
    print("\n             ranks  BLAS threads  seconds  images/s  speed-up  test accuracy")
    print("                      in a rank")
    for run in runs:
        speed_up = run.images_per_second / runs[-1].images_per_second
        print(
            f"{run.title:<12} {run.n_ranks:5d}  {run.blas_threads:12d}  {run.seconds:7.2f}"
            f"  {run.images_per_second:8,.0f}  {speed_up:8.2f}  {run.test_accuracy:13.1%}"
        )
    print("\nSeconds are those of training steps, without the first step and validation.")
    for run in runs:
        print(f"Not counted for {run.title}: {run.setup_seconds:.1f} s to start, build and compile.")


def save_plot(runs: list[RunResults], path: Path) -> None:
    """Draw the loss and the validation error of each run over the epochs."""
    # Their import waits for matplotlib.use() above.
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    # The curves may cover each other, so the first is wide and pale and the second thin and dashed.
    styles = [
        {"color": "tab:blue", "alpha": 0.45, "linewidth": 5},
        {"color": "black", "linestyle": "--", "linewidth": 1.5},
    ]
    for run, style in zip(runs, styles, strict=False):
        label = f"{run.title}, {run.seconds:.2f} s"
        left.plot(range(1, len(run.losses) + 1), run.losses, label=label, **style)
        right.plot(range(len(run.errors)), [100 * error for error in run.errors], label=label, **style)
    left.set(title="Training", xlabel="epoch", ylabel="mean cross-entropy", yscale="log")
    right.set(title="Validation", xlabel="epoch", ylabel="error in %", yscale="log")
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def load_digits(options: argparse.Namespace) -> mnist.Digits:
    """Load the data that the command line asks for."""
    if not (options.data or options.download):
        return mnist.load_embedded()
    directory = options.data or Path(pooch.os_cache("synkhronos-mnist"))
    try:
        if options.download:
            mnist.download(directory)
        return mnist.load_idx(directory)
    except (OSError, ValueError) as error:
        raise SystemExit(f"train_mnist.py: {error}") from None


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options, with the update rule itself in `rule`, and all layers' sizes in `sizes`."""
    parser = argparse.ArgumentParser(
        prog="train_mnist.py",
        description="Train a network on MNIST on all cores, then in one process, and compare.",
    )
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="the full set's IDX files, instead of 5,000 digits")
    add("--download", action="store_true", help="fetch the full set (11 MB), to --data or to a cache")
    add("--ranks", type=int, metavar="N", help="processes (default: one for each core)")
    add("--epochs", type=parse_positive, metavar="N", help="passes over the digits (30)")
    add("--batch-size", type=parse_positive, default=500, metavar="N", help="images a step (%(default)s)")
    add("--hidden", type=parse_positive, nargs="+", default=[800, 800], metavar="N", help="layers (800 800)")
    add("--dropout", type=float, default=0.5, metavar="P", help="hidden units to leave out (%(default)s)")
    rules = list(LEARNING_RATES)
    add("--rule", choices=rules, default="nesterov_momentum", help="the update rule (%(default)s)")
    add("--learning-rate", type=float, metavar="R", help="(default: one that suits the rule)")
    add("--seed", type=int, default=1, metavar="N", help="of weights, batches and dropout (%(default)s)")
    add("--no-serial", action="store_true", help="leave out the training in one process")
    add("--plot", type=Path, default=Path("mnist.png"), metavar="FILE", help="the curves (%(default)s)")
    add("--target", type=float, metavar="PERCENT", help="test accuracy to reach (92; with --epochs: any)")
    options = parser.parse_args()
    if options.target is None:
        options.target = 92 if options.epochs is None else 0
    options.epochs = options.epochs or 30
    if not 0 <= options.dropout < 1:
        parser.error(f"argument --dropout: {options.dropout} is not from 0 up to 1")
    if options.learning_rate is None:
        options.learning_rate = LEARNING_RATES[options.rule]
    options.rule = getattr(updates, options.rule)
    options.sizes = [28 * 28, *options.hidden, 10]
    return options


def parse_positive(text: str) -> int:
    """Return a positive integer, parsed from an argument; raise ArgumentTypeError if it is none."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


def main() -> int:
    """Train both ways, print the table and save the plot; return 0 if the test accuracy is high enough."""
    options = parse_arguments()
    digits = load_digits(options)
    print(
        f"{len(digits.train.labels):,} digits to train, {len(digits.valid.labels):,} to validate, "
        f"{len(digits.test.labels):,} to test; layers of {', '.join(map(str, options.sizes))} units; "
        f"{graph_library.__name__} {graph_library.__version__}"
    )
    runs = [train_on_all_ranks(digits, options)]
    if not options.no_serial:
        runs.append(train_in_one_process(digits, options))
    print_table(runs)
    try:
        save_plot(runs, options.plot)
        print(f"Curves saved in {options.plot}.")
    except OSError as error:
        print(f"The curves could not be saved: {error}.")
    accuracy = 100 * runs[0].test_accuracy
    reached = accuracy >= options.target
    print(f"Test accuracy {accuracy:.1f} %.")
    if options.target:
        print(f"At least {options.target:g} % wanted: {'reached' if reached else 'NOT reached'}.")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
