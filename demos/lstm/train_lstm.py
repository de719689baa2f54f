"""Train an LSTM for sentiment classification under elastic averaging (EASGD), asynchronously.

The network is that of Theano's tutorial and of Platoon's example: word vectors, an LSTM layer, the mean over time,
logistic regression.  The texts are synthetic: most words are neutral, and the others belong to the text's class with
probability 0.7.  ``--data FILE`` reads an .npz file with ``x``, word indexes of shape (texts, words), and ``y``, 0 or
1.

The script trains without ranks, then on each number of ranks in ``--ranks``, and prints the time of all epochs except
the first, with the speed-up that Platoon published for its example on 1 to 4 GPUs.  Processor time is the mean over
ranks; use it if there are fewer cores than ranks, or other load.  In JAX mode it includes compilation for new batch
lengths, so train for many epochs.
"""

from __future__ import annotations

import argparse
import time
import warnings
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

try:
    import pytensor as library
    import pytensor.tensor as T

    sigmoid = T.sigmoid
except ImportError:
    import theano as library
    import theano.tensor as T

    sigmoid = T.nnet.sigmoid

from processor_time import get_processor_seconds

import synkhronos as synk
from synkhronos import exchange_rules
from synkhronos.training import make_train_function_serial, make_trainer
from synkhronos.training.updates import adam

# Harmless warnings of JAX mode: an assertion is skipped, float64 becomes float32.
warnings.filterwarnings("ignore", "Skipping Assert|Explicitly requested dtype")

#: Platoon's published speed-up on 1 to 4 GPUs, relative to one GPU without Platoon (870 seconds).
PLATOON = {"none": "1.00", "1": "0.95", "2": "1.82", "3": "2.65", "4": "3.42"}


class Texts(NamedTuple):
    """Texts of equal length, int32 of shape (texts, words), and their classes."""

    x: np.ndarray
    y: np.ndarray


def make_texts(count: int, length: int, vocabulary: int) -> Texts:
    """Return synthetic texts; every sixth word on average belongs to a class, mostly the text's."""
    rng = np.random.default_rng(0)
    y = rng.integers(2, size=count).astype("int32")
    x = rng.integers(200, vocabulary, size=(count, length))
    has_class = rng.random((count, length)) < 1 / 6
    word_class = np.where(rng.random((count, length)) < 0.7, y[:, None], 1 - y[:, None])
    x = np.where(has_class, word_class * 100 + rng.integers(100, size=(count, length)), x)
    return Texts(x.astype("int32"), y)


def build_network(vocabulary: int, size: int, length: int) -> tuple[Any, Any, Any, Any, list[Any]]:
    """Return x, y, loss, error and parameters."""
    rng = np.random.default_rng(1)

    def make_weights(name: str, *shape: int) -> Any:
        return library.shared((rng.standard_normal(shape) / np.sqrt(shape[0])).astype("float32"), name)

    words = library.shared((0.1 * rng.standard_normal((vocabulary, size))).astype("float32"), "words")
    w_in, w_back = make_weights("w_in", size, 4 * size), make_weights("w_back", size, 4 * size)
    # The forget gate is initially open.
    b = library.shared(np.repeat(np.array([0, 1, 0, 0], "float32"), size), "b")
    w_out, b_out = make_weights("w_out", size), library.shared(np.zeros(1, "float32"), "b_out")

    x, y = T.imatrix("x"), T.ivector("y")
    inputs = T.dot(words[x.T.flatten()], w_in).reshape((length, x.shape[0], 4 * size)) + b
    # Unrolled, without `scan`: Theano's scan does not compile on Python 3.11, PyTensor's takes minutes.
    h = c = T.zeros_like(inputs[0, :, :size])
    total = 0
    for t in range(length):
        gates = inputs[t] + T.dot(h, w_back)
        i, f, o = (sigmoid(gates[:, k * size : (k + 1) * size]) for k in range(3))
        c = f * c + i * T.tanh(gates[:, 3 * size :])
        h = o * T.tanh(c)
        total = total + h
    score = T.dot(total / np.float32(length), w_out) + b_out[0]
    sign = T.cast(2 * y - 1, "float32")
    loss = T.log1p(T.exp(-sign * score)).mean(dtype="float32")
    error = T.neq(score > 0, y > 0).mean(dtype="float32")
    return x, y, loss, error, [words, w_in, w_back, b, w_out, b_out]


class Times(NamedTuple):
    """Wall time and processor time (mean over ranks) of all epochs except the first, and the final loss and error."""

    seconds: float
    processor_seconds: float
    loss: float
    error: float


def split_texts(texts: Texts) -> tuple[Texts, Texts]:
    """Return training and validation texts, nine tenths and one tenth."""
    n_valid = max(1, len(texts.x) // 10)
    return Texts(texts.x[n_valid:], texts.y[n_valid:]), Texts(texts.x[:n_valid], texts.y[:n_valid])


def train(n: int, texts: Texts, options: argparse.Namespace) -> Times:
    """Train on n ranks."""
    synk.fork(n, use_gpu=options.gpu)
    x, y, loss, error, params = build_network(int(texts.x.max()) + 1, options.size, texts.x.shape[1])
    rule = exchange_rules.EASGD(alpha=options.alpha, beta=options.beta, period=options.period)
    trainer = make_trainer(loss, params, x, y, adam, rule, options.rate, validate={"error": error})
    train_texts, valid = split_texts(texts)
    seconds, n_rows = 0.0, 0
    for report in trainer.epochs(*train_texts, batch_size=options.batch_size, epochs=options.epochs, valid=valid):
        if report.epoch == 1:  # includes compilation
            processor_seconds = synk.run(get_processor_seconds)
        else:  # without compilation for new batch lengths
            seconds += (report.rows_seen - n_rows) / report.rows_per_second
        n_rows = report.rows_seen
        print(f"{n} {'rank' if n == 1 else 'ranks'}, {report}", flush=True)
    processor_seconds = [
        end - begin for end, begin in zip(synk.run(get_processor_seconds), processor_seconds, strict=True)
    ]
    synk.close()
    return Times(seconds, sum(processor_seconds) / n, report.loss, report.validation["error"])


def train_without_ranks(texts: Texts, options: argparse.Namespace) -> Times:
    """Train in this process: the same steps without an exchange rule."""
    synk.fork(1, use_gpu=options.gpu)  # selects the GPU, and sets the number of BLAS threads of a rank
    x, y, loss, error, params = build_network(int(texts.x.max()) + 1, options.size, texts.x.shape[1])
    step = make_train_function_serial(loss, params, x, y, adam, learning_rate=options.rate)
    compute_error = library.function([x, y], error)
    train_texts, valid = split_texts(texts)
    rng = np.random.default_rng(0)
    for epoch in range(options.epochs):
        if epoch == 1:
            processor_seconds, start = time.process_time(), time.perf_counter()
        order = rng.permutation(len(train_texts.x))
        losses = [
            step(*train_texts, batch=order[first : first + options.batch_size])
            for first in range(0, len(order) - options.batch_size + 1, options.batch_size)
        ]
        mean, valid_error = float(np.mean([float(loss) for loss in losses])), float(compute_error(*valid))
        print(f"without ranks, epoch {epoch + 1}: loss {mean:.4f}, error {valid_error:.4f}", flush=True)
    seconds, processor_seconds = time.perf_counter() - start, time.process_time() - processor_seconds
    synk.close()
    return Times(seconds, processor_seconds, mean, valid_error)


def main() -> None:
    """Train on each number of ranks, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2], metavar="N", help="numbers of ranks (default: 1 2)")
    add("--gpu", action="store_true", default=None, help="use GPUs; fail if there are none")
    add("--cpu", action="store_false", dest="gpu", help="use CPU cores")
    add("--data", metavar="FILE", help="an .npz file with x and y (default: synthetic texts)")
    add("--texts", type=int, default=4000, metavar="N", help="number of synthetic texts (default: %(default)s)")
    add("--length", type=int, default=20, metavar="N", help="words per text (default: %(default)s)")
    add("--size", type=int, default=64, metavar="N", help="size of word vectors and of the LSTM (default: %(default)s)")
    add("--epochs", type=int, default=4, help="2 or more (default: %(default)s)")
    add("--batch-size", type=int, default=16, metavar="N", help="texts of one rank in a step (default: %(default)s)")
    add("--rate", type=float, default=0.002, help="learning rate (default: %(default)s)")
    add("--period", type=int, default=10, help="steps between exchanges (default: %(default)s)")
    add("--beta", type=float, default=0.9, help="beta of EASGD (default: %(default)s)")
    add("--alpha", type=float, help="alpha of EASGD (default: beta / ranks; Platoon uses 0.5)")
    mode = {"pytensor": "JAX", "theano": "FAST_RUN"}[library.__name__]
    add("--mode", default=mode, help="compilation mode of functions on the CPU (default: %(default)s)")
    options = parser.parse_args()
    if options.epochs < 2:
        parser.error("argument --epochs: 2 or more are needed, as the first, which compiles, is not counted")
    if options.gpu and synk.get_n_gpu() == 0:
        parser.error("argument --gpu: this machine has no usable GPU")
    if options.mode == "JAX" and find_spec("jax") is None:
        raise SystemExit("this demo needs jax, or --mode NUMBA: pip install 'synkhronos[jax]'")
    library.config.floatX = "float32"
    if not options.gpu and synk.get_n_gpu() == 0:
        library.config.mode = options.mode
    if options.data:
        with np.load(options.data) as file:
            texts = Texts(file["x"].astype("int32"), file["y"].astype("int32"))
    else:
        texts = make_texts(options.texts, options.length, 2000)
    start = time.perf_counter()
    results = {"none": train_without_ranks(texts, options), **{f"{n}": train(n, texts, options) for n in options.ranks}}
    serial = results["none"]
    print(f"\n{'':>5}  {'':>8}  {'':>8}  {'processor':>9}  {'':>8}  {'Platoon':>8}")
    print(
        f"{'ranks':>5}  {'seconds':>8}  {'speed-up':>8}  {'seconds':>9}  {'speed-up':>8}  {'speed-up':>8}  "
        f"{'loss':>7}  {'error':>7}"
    )
    for n, times in results.items():
        print(
            f"{n:>5}  {times.seconds:>8.2f}  {serial.seconds / times.seconds:>8.2f}  {times.processor_seconds:>9.2f}  "
            f"{serial.processor_seconds / times.processor_seconds:>8.2f}  {PLATOON.get(n, ''):>8}  {times.loss:>7.4f}  "
            f"{times.error:>7.2%}"
        )
    print(f"\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
