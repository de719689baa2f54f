"""Train an LSTM to tell the mood of texts, under elastic averaging: each rank at its own pace.

The network of Theano's tutorial, and of Platoon's example: word vectors, an LSTM layer, the mean over time, logistic
regression.  The texts are made up: words of two moods, and many of none, of which a text has a few more of one mood.
``--data FILE`` takes an .npz file with ``x``, word numbers of shape (texts, words), and ``y``, 0 or 1.

It trains on 1, 2, ... ranks, for as many epochs each, and prints the times beside those that Platoon has published for
its own example on 1 to 4 GPUs.
"""

from __future__ import annotations

import argparse
import time
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

import synkhronos as synk
from synkhronos import rules
from synkhronos.extensions.updates import adam
from synkhronos.training import make_trainer

#: Seconds on one GPU without Platoon (870), over those with it on 1 to 4.
PLATOON = {1: 0.95, 2: 1.82, 3: 2.65, 4: 3.42}


class Texts(NamedTuple):
    """Texts of equal length, and their moods.

    Attributes
    ----------
    x : ndarray of int32, shape (texts, words)
    y : ndarray of int32, shape (texts,)
    """

    x: np.ndarray
    y: np.ndarray


def made_up(count: int, length: int, vocabulary: int) -> Texts:
    """Return texts in which a word in six has a mood, mostly the text's."""
    rng = np.random.default_rng(0)
    y = rng.integers(2, size=count).astype("int32")
    x = rng.integers(200, vocabulary, size=(count, length))
    has_mood = rng.random((count, length)) < 1 / 6
    mood = np.where(rng.random((count, length)) < 0.7, y[:, None], 1 - y[:, None])
    x = np.where(has_mood, mood * 100 + rng.integers(100, size=(count, length)), x)
    return Texts(x.astype("int32"), y)


def network(vocabulary: int, size: int, length: int) -> tuple[Any, Any, Any, Any, list[Any]]:
    """Return x, y, loss, error and parameters."""
    rng = np.random.default_rng(1)

    def weights(name: str, *shape: int) -> Any:
        return library.shared((rng.standard_normal(shape) / np.sqrt(shape[0])).astype("float32"), name)

    words = library.shared((0.1 * rng.standard_normal((vocabulary, size))).astype("float32"), "words")
    w_in, w_back = weights("w_in", size, 4 * size), weights("w_back", size, 4 * size)
    # The gate that forgets is open at first.
    b = library.shared(np.repeat(np.array([0, 1, 0, 0], "float32"), size), "b")
    w_out, b_out = weights("w_out", size), library.shared(np.zeros(1, "float32"), "b_out")

    x, y = T.imatrix("x"), T.ivector("y")
    driven = T.dot(words[x.T.flatten()], w_in).reshape((length, x.shape[0], 4 * size)) + b
    # Step by step, not by `scan`: Theano's can't be compiled for Python 3.11, and PyTensor's takes minutes.
    h = c = T.zeros_like(driven[0, :, :size])
    total = 0
    for t in range(length):
        gates = driven[t] + T.dot(h, w_back)
        i, f, o = (sigmoid(gates[:, k * size : (k + 1) * size]) for k in range(3))
        c = f * c + i * T.tanh(gates[:, 3 * size :])
        h = o * T.tanh(c)
        total = total + h
    score = T.dot(total / np.float32(length), w_out) + b_out[0]
    sign = T.cast(2 * y - 1, "float32")
    loss = T.log1p(T.exp(-sign * score)).mean(dtype="float32")
    error = T.neq(score > 0, y > 0).mean(dtype="float32")
    return x, y, loss, error, [words, w_in, w_back, b, w_out, b_out]


def train(n: int, texts: Texts, options: argparse.Namespace) -> tuple[float, float, float]:
    """Train on n ranks; return seconds of all epochs but for compiling, the last loss and validation's error."""
    synk.fork(n, use_gpu=options.gpu)
    x, y, loss, error, params = network(int(texts.x.max()) + 1, options.size, texts.x.shape[1])
    rule = rules.EASGD(alpha=options.alpha, beta=options.beta, period=options.period)
    trainer = make_trainer(loss, params, x, y, adam, rule, options.rate, validate={"error": error})
    held = max(1, len(texts.x) // 10)
    learn, valid = (texts.x[held:], texts.y[held:]), (texts.x[:held], texts.y[:held])
    seconds, seen = 0.0, 0
    for report in trainer.epochs(*learn, batch_size=options.batch_size, epochs=options.epochs, valid=valid):
        seconds += (report.seen - seen) / report.rows_per_second
        seen = report.seen
        print(f"{n} ranks, {report}", flush=True)
    synk.close()
    return seconds, report.loss, report.validation["error"]


def main() -> None:
    """Train on each number of ranks, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2], metavar="N", help="numbers of ranks (default: 1 2)")
    add("--gpu", action="store_true", default=None, help="fail where there are no GPUs")
    add("--cpu", action="store_false", dest="gpu", help="keep off GPUs")
    add("--data", metavar="FILE", help="an .npz file with x and y (default: made-up texts)")
    add("--texts", type=int, default=4000, metavar="N", help="made-up texts (default: %(default)s)")
    add("--length", type=int, default=20, metavar="N", help="words of each (default: %(default)s)")
    add("--size", type=int, default=64, metavar="N", help="of word vectors and of the layer (default: %(default)s)")
    add("--epochs", type=int, default=4, help="(default: %(default)s)")
    add("--batch-size", type=int, default=16, metavar="N", help="a rank's texts in a step (default: %(default)s)")
    add("--rate", type=float, default=0.002, help="learning rate (default: %(default)s)")
    add("--period", type=int, default=10, help="steps between exchanges (default: %(default)s)")
    add("--beta", type=float, default=0.9, help="of EASGD (default: %(default)s)")
    add("--alpha", type=float, help="of EASGD, in the place of beta / ranks; Platoon's is 0.5")
    modes = {"pytensor": "JAX", "theano": "FAST_RUN"}
    add("--mode", default=modes[library.__name__], help="of functions on the CPU (default: %(default)s)")
    options = parser.parse_args()
    library.config.floatX = "float32"
    if not options.gpu and synk.get_n_gpu() == 0:
        library.config.mode = options.mode
    if options.data:
        with np.load(options.data) as file:
            texts = Texts(file["x"].astype("int32"), file["y"].astype("int32"))
    else:
        texts = made_up(options.texts, options.length, 2000)
    began = time.perf_counter()
    found = {n: train(n, texts, options) for n in options.ranks}
    one = found[min(found)][0] * min(found)
    print(f"\n{'ranks':>5}  {'seconds':>8}  {'speed-up':>8}  {'Platoon':>8}  {'loss':>7}  {'error':>7}")
    for n, (seconds, loss, error) in found.items():
        platoon = f"{PLATOON[n]:.2f}" if n in PLATOON else ""
        print(f"{n:>5}  {seconds:>8.2f}  {one / seconds:>8.2f}  {platoon:>8}  {loss:>7.4f}  {error:>7.2%}")
    print(f"\n{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
