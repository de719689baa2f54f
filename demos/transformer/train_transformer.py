"""Train a transformer on the characters of a text, on all ranks.

AdamW without decay on biases and norms, a warm-up and a cosine, clipping of the gradient's norm, accumulation, label
smoothing, a moving average of the parameters that is validated and written into checkpoints: the options of
`synkhronos.training.make_trainer`.  The text is the reference of the language that Python ships for ``help()``, half a
million characters, or a file of yours.  At the end the network writes some lines by itself.

On GPUs, ``JAX_DEFAULT_MATMUL_PRECISION=bfloat16`` in the environment computes in bfloat16, with parameters in float32.
"""

from __future__ import annotations

import argparse
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytensor
from text import Text, load_text
from transformer import Transformer, build_transformer, is_matrix

import synkhronos as synk
from synkhronos.training import CheckpointFolder, Recorder, Report, make_trainer, schedules
from synkhronos.training.updates import adamw

warnings.filterwarnings("ignore", "Skipping Assert|Explicitly requested dtype")


def train(network: Transformer, text: Text, options: argparse.Namespace, n: int) -> list[Report]:
    """Train on `n` ranks and print reports; the network then has the averaged parameters."""
    trainer = make_trainer(
        network.loss_smooth,
        network.params,
        network.x,
        network.y,
        adamw,
        learning_rate=schedules.warmup(schedules.cosine(options.rate, options.epochs), options.warmup),
        weight_decay=options.decay,
        mask=is_matrix,
        clip_norm=options.clip,
        num_slices=options.slices,
        ema=options.ema,
        validate={"bits": network.loss / np.float32(np.log(2))},
        validate_ema=True,
    )
    folder = options.folder
    reports: list[Report] = []
    for report in trainer.epochs(
        *text.train,
        batch_size=options.batch_size,
        epochs=options.epochs,
        valid=text.valid,
        recorder=Recorder(folder) if folder else None,
        checkpoints=CheckpointFolder(folder) if folder else None,
        resume="latest" if options.resume else None,
    ):
        speed = report.rows_per_second * options.length
        print(f"{report}; {speed:,.0f} characters/s", flush=True)
        if not reports:
            start = time.perf_counter()  # the first epoch compiles, and is not counted
        reports.append(report)
    if len(reports) > 1:
        n_characters = (reports[-1].rows_seen - reports[0].rows_seen) * options.length
        print(f"{n} ranks: {n_characters / (time.perf_counter() - start):,.0f} characters/s, validation included")
    synk.broadcast(trainer.params, [average.get_value() for average in trainer.get_ema() or []])
    return reports


def draw_curves(reports: list[Report], path: Path) -> None:
    """Draw bits a character over epochs."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    epochs = [report.epoch for report in reports]
    axes.plot(epochs, [report.loss / np.log(2) for report in reports], "o-", label="training, mean of the epoch")
    axes.plot(epochs, [report.validation["bits"] for report in reports], "o-", label="validation, averaged parameters")
    axes.set(xlabel="epochs", ylabel="bits a character")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    print(f"picture: {path}")


def generate_text(network: Transformer, alphabet: str, options: argparse.Namespace) -> str:
    """Return characters that the network writes, each drawn from its prediction."""
    predict = pytensor.function([network.x], network.logits)
    rng = np.random.default_rng(options.seed)
    numbers = [alphabet.index("\n") if "\n" in alphabet else 0]
    for _ in range(options.write):
        window = np.zeros((1, options.length), "int32")
        recent = numbers[-options.length :]
        window[0, : len(recent)] = recent
        logits = np.asarray(predict(window))[0, len(recent) - 1].astype("float64") / options.temperature
        p = np.exp(logits - logits.max())
        numbers.append(rng.choice(len(p), p=p / p.sum()))
    return "".join(alphabet[number] for number in numbers)


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    kinds: dict[str, Any] = {"metavar": "N", "type": int}
    add("--ranks", help="processes (default: one for each GPU, or for each core)", **kinds)
    add("--gpu", action="store_true", default=None, help="use GPUs; fail if there are none")
    add("--cpu", action="store_false", dest="gpu", help="use CPU cores")
    add("--mode", default="JAX", help="PyTensor's mode on CPU cores: JAX, NUMBA or CVM (default: %(default)s)")
    add("--text", type=Path, metavar="FILE", help="a text file in UTF-8 (default: Python's help texts)")
    add("--characters", help="use the beginning of the text only", **kinds)
    add("--length", default=64, help="characters of a window (%(default)s)", **kinds)
    add("--size", default=64, help="features of a character (%(default)s)", **kinds)
    add("--heads", default=4, help="attention heads (%(default)s)", **kinds)
    add("--layers", default=2, help="blocks (%(default)s)", **kinds)
    add("--batch-size", default=16, help="windows of one rank in a step (%(default)s)", **kinds)
    add("--slices", default=1, help="slices that a rank computes one after the other (%(default)s)", **kinds)
    add("--epochs", default=8, help="passes over the text (%(default)s)", **kinds)
    add("--rate", type=float, default=0.004, help="highest learning rate (%(default)s)")
    add("--warmup", type=float, default=0.2, metavar="EPOCHS", help="time to reach it (%(default)s)")
    add("--decay", type=float, default=0.1, help="weight decay of matrices (%(default)s)")
    add("--clip", type=float, default=1.0, metavar="NORM", help="largest norm of the gradient (%(default)s)")
    add("--ema", type=float, default=0.99, help="decay of the parameters' averages (%(default)s)")
    add("--smoothing", type=float, default=0.0, help="label smoothing (%(default)s)")
    add("--folder", type=Path, metavar="DIR", help="write records and checkpoints there")
    add("--resume", action="store_true", help="go on from the newest checkpoint in --folder")
    add("--plot", type=Path, metavar="FILE", help="draw the curves into this picture")
    add("--write", default=300, help="characters to write at the end (%(default)s)", **kinds)
    add("--temperature", type=float, default=0.7, help="of these (%(default)s)")
    add("--seed", default=1, help="of weights and of what is written (%(default)s)", **kinds)
    options = parser.parse_args(arguments)
    if options.resume and not options.folder:
        parser.error("argument --resume: needs --folder")
    if options.folder and not options.resume and CheckpointFolder(options.folder).list_paths():
        parser.error("argument --folder: it has a training run: add --resume to continue it, or name another folder")
    if options.gpu and synk.get_n_gpu() == 0:
        parser.error("argument --gpu: this machine has no usable GPU")
    if options.mode == "JAX" and find_spec("jax") is None:
        raise SystemExit("this demo needs jax, or --mode NUMBA: pip install 'synkhronos[jax]'")
    return options


def main() -> None:
    """Train, and let the network write."""
    options = parse_options()
    pytensor.config.floatX = "float32"
    if not options.gpu and synk.get_n_gpu() == 0:
        pytensor.config.mode = options.mode
    text = load_text(options.text, options.length, options.characters)
    n = synk.fork(options.ranks, use_gpu=options.gpu)
    network = build_transformer(
        len(text.alphabet), options.length, options.size, options.heads, options.layers, options.smoothing, options.seed
    )
    count = sum(param.get_value(borrow=True).size for param in network.params)
    print(f"{n} ranks, {count:,} parameters, {len(text.train[0]):,} windows of {options.length} characters", flush=True)
    reports = train(network, text, options, n)
    synk.close()
    if options.plot and reports:
        draw_curves(reports, options.plot)
    if options.write:
        print(generate_text(network, text.alphabet, options))


if __name__ == "__main__":
    main()
