"""Each demo's networks end with the same parameters on two ranks and in one process.

They start alike, see the same batches, and leave dropout out. Sums of single precision numbers in another order differ
in their last digits, so the parameters do too.
"""

import argparse
import logging
from time import perf_counter

import numpy as np
import pytest
from train_mnist_gpu_data import GpuDataTrainer

import digits
import settings
import synkhronos as synk
from images import make_images
from lasagne_tools import options as common
from lasagne_tools.batches import make_full_batches, make_shuffled_batches
from lasagne_tools.fit import fit
from lasagne_tools.library import theano
from lasagne_tools.parallel import ParallelTrainer
from lasagne_tools.serial import SerialTrainer
from models import build_network as build_mnist
from network import build_network as build_resnet
from network import build_training_loss

# Enough to see a velocity at work; small, since PyTensor's Python mode computes some elements one by one.
N_STEPS = 2
N_IMAGES, BATCH_SIZE = 11, 6
MODELS = ["mlp", "custom_mlp:1,32,0.3,0.3", "cnn"]


def get_values(params):
    return [param.get_value() for param in params]


def assert_close(values, expected, tolerance=2e-5):
    assert len(values) == len(expected) > 0
    for a, b in zip(values, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def assert_all_ranks_hold(params, expected, tolerance=2e-5):
    for rank in range(2):
        assert_close(synk.get_value(rank, params), expected, tolerance)


# -- handwritten digits ----------------------------------------------------------------------------------


def make_parser(scripts):
    parser = common.make_parser("", [], "script.py")
    common.add_device_arguments(parser)
    scripts.add_arguments(parser)
    return parser


def make_mnist_options(model):
    # The second batch has an odd number of images, which does not split evenly.
    words = f"{model} --no-dropout --synthetic {N_IMAGES} --batch-size {BATCH_SIZE} --rule nesterov_momentum --slices 2".split()
    return digits.parse_options(make_parser(digits), words)


def compute_whole_rows(batch):
    """Return indexes into the whole data, from the ranks' indexes into their parts."""
    return np.concatenate([batch[0], batch[1] - (-N_IMAGES // 2)])


def make_mnist_trainers(make_trainer, options):
    """Return two networks of equal parameters, the first one's trainer for two ranks, the other's for one process."""
    networks = [build_mnist(options.model, options.seed, options.dropout) for _ in range(2)]
    assert_close(get_values(networks[0].params), get_values(networks[1].params), tolerance=0)
    parts = digits.load_digits(options)
    alone = SerialTrainer(networks[1], parts, options, make_shuffled_batches)
    return networks, make_trainer(networks[0], parts, options), alone


def make_cpu_data_trainer(network, parts, options):
    parts = [(synk.data(part.images, network.x), synk.data(part.labels, network.y)) for part in parts]
    return ParallelTrainer(network, parts, options, 2, make_shuffled_batches, options.batch_size)


def make_gpu_data_trainer(network, parts, options):
    return GpuDataTrainer(network, parts, options, 2)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("make_trainer", [make_cpu_data_trainer, make_gpu_data_trainer])
def test_mnist_models_on_two_ranks_equal_one_process(two_ranks, make_trainer, model):
    options = make_mnist_options(model)
    networks, together, alone = make_mnist_trainers(make_trainer, options)
    start = get_values(networks[0].params)
    batches = together.make_batches(np.random.default_rng(3))
    assert len(batches) == 2 and together.count_rows(batches[1]) == [3, 2]
    assert sum(sum(together.count_rows(batch)) for batch in batches) == N_IMAGES
    for batch in batches:
        (loss,) = together.train([batch])
        rows = compute_whole_rows(batch) if make_trainer is make_gpu_data_trainer else batch
        np.testing.assert_allclose(loss, alone.train([rows])[0], rtol=2e-5)
    assert_all_ranks_hold(networks[0].params, get_values(networks[1].params))
    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(get_values(networks[0].params), start, strict=True))
    np.testing.assert_allclose(together.validate(), alone.validate(), rtol=1e-4)
    np.testing.assert_allclose(together.test(), alone.test(), rtol=1e-4)


# -- residual networks -----------------------------------------------------------------------------------


def make_resnet_options():
    words = ["--blocks", "1,1", "--width", "4", "--size", "16", "--batch-size", "4", "--weight-decay", "0.01"]
    return settings.parse_options(make_parser(settings), words)


def build_resnet_model(options):
    return build_resnet(options.blocks, options.width, options.size, 3, options.weight_decay, options.seed)


def make_resnet_parts(options, allocate):
    return make_images([24, 6], 3, options.size, options.seed, allocate)


@pytest.fixture
def together(two_ranks):
    """The residual network on two ranks."""
    options = make_resnet_options()
    parts = make_resnet_parts(options, lambda shape: synk.data(dtype="uint8", shape=shape))
    network = build_resnet_model(options)
    data = [(images, synk.data(labels, network.y)) for images, labels in parts]
    arguments = network, data, options, 2, make_full_batches, 2 * options.batch_size, network.average_updates
    return network, ParallelTrainer(*arguments)


def test_resnet_with_equal_rows_on_ranks_equals_one_process(together):
    network, trainer = together
    options = make_resnet_options()
    alone = build_resnet_model(options)
    parts = make_resnet_parts(options, lambda shape: np.empty(shape, "uint8"))
    serial = SerialTrainer(alone, parts, options, make_full_batches, alone.average_updates)
    for rows in serial.make_batches(np.random.default_rng(3))[:N_STEPS]:
        (loss,) = trainer.train([np.concatenate([rows, rows])])
        np.testing.assert_allclose(loss, serial.train([rows])[0], rtol=1e-4)
    assert_all_ranks_hold(network.params, get_values(alone.params), tolerance=2e-4)
    assert_all_ranks_hold(network.averages, get_values(alone.averages), tolerance=2e-4)
    np.testing.assert_allclose(trainer.validate(), serial.validate(), rtol=1e-3)


def test_resnet_equals_one_process_with_split_batch_norm(together):
    network, trainer = together
    options = make_resnet_options()
    images, labels = make_resnet_parts(options, lambda shape: np.empty(shape, "uint8"))[0]

    # The serial reference: both halves go through the network apart, and their losses are averaged.
    alone = build_resnet_model(options)
    x, y, half = alone.x, alone.y, options.batch_size
    losses, moved = [], []
    for rows in (slice(half), slice(half, None)):
        loss, average_updates = build_training_loss(alone.output, x[rows], y[rows])
        losses.append(loss)
        moved.append(average_updates)
    penalty = options.weight_decay * sum((p**2).sum() for p in alone.params if p.name == "W")
    loss = (losses[0] + losses[1]) / 2 + penalty
    grad_updates, param_updates, _ = options.update_rule(loss, alone.params, learning_rate=options.learning_rate)
    outputs = [loss, *(half_averages[average] for half_averages in moved for average in alone.averages)]
    gradient = theano.function([x, y], outputs, updates=grad_updates)
    update = theano.function([], updates=param_updates)

    n = len(alone.averages)
    averages = [get_values(alone.averages), get_values(alone.averages)]
    for average in alone.averages:
        average.set_value(np.zeros_like(average.get_value()))
    for rows in trainer.make_batches(np.random.default_rng(3))[:N_STEPS]:
        (loss_of_step,) = trainer.train([rows])
        expected, *statistics = gradient(images[rows], labels[rows])
        update()
        np.testing.assert_allclose(loss_of_step, expected, rtol=1e-4)
        # With averages of zero their new values are the step times the half's statistics.
        by_rank = [statistics[:n], statistics[n:]]
        averages = [[0.9 * a + s for a, s in zip(*pair, strict=True)] for pair in zip(averages, by_rank, strict=True)]
    assert_all_ranks_hold(network.params, get_values(alone.params), tolerance=2e-4)

    assert any(np.abs(a - b).max() > 1e-3 for a, b in zip(*averages, strict=True))
    assert_all_ranks_hold(network.averages, [(a + b) / 2 for a, b in zip(*averages, strict=True)], tolerance=2e-4)


# -- few rows --------------------------------------------------------------------------------------------


def test_rank_without_rows_contributes_nothing(two_ranks):
    # Five images in steps of two: rank 0 has three, and rank 1 sits out the last step.
    options = digits.parse_options(make_parser(digits), ["custom_mlp:0", "--no-dropout", "--synthetic", "5"])
    options.batch_size = 2
    networks, together, alone = make_mnist_trainers(make_gpu_data_trainer, options)
    batches = together.make_batches(np.random.default_rng(3))
    assert [together.count_rows(batch) for batch in batches] == [[1, 1], [1, 1], [1, 0]]
    for batch in batches:
        together.train([batch])
        alone.train([np.concatenate([batch[0], batch[1] + 3])])
    assert_all_ranks_hold(networks[0].params, get_values(networks[1].params))


class RecordingTrainer:
    """A trainer that records its calls."""

    n_ranks = 2

    def __init__(self, sizes):
        self.sizes, self.calls = sizes, []

    def make_batches(self, rng):
        return list(self.sizes)

    def count_rows(self, batch):
        return [batch - batch // 2, batch // 2]

    def train(self, batches):
        self.calls.append(list(batches))
        return [float(batch) for batch in batches]

    def validate(self):
        return 0.5, 0.25


@pytest.mark.parametrize(
    ("sizes", "at_once", "calls", "counted"),
    [
        ([10] * 12, 4, [[10] * 4] * 3, 80 + 120),
        # The last batch is smaller, and compiled for.
        ([10] * 7 + [5], 20, [[10] * 2] * 3 + [[10, 5]], 40 + 75),
        ([10] * 3, 20, [[10]] * 3, 20 + 30),
        ([10], 20, [[10]], 10),
    ],
)
def test_fit_passes_several_batches_at_once_and_counts_images(sizes, at_once, calls, counted):
    trainer = RecordingTrainer(sizes)
    options = argparse.Namespace(epochs=2, steps=None, at_once=at_once, seed=1, quiet=True)
    began = perf_counter()
    run = fit(trainer, options, "recorded", began)
    seconds = perf_counter() - began
    assert trainer.calls == calls * 2
    assert sum(run.images) == counted and run.images[0] >= run.images[1]
    assert run.losses == [pytest.approx(np.average(sizes, weights=sizes))] * 2
    assert run.validation == [(0.5, 0.25)] * 2
    assert 0 < run.setup_seconds < seconds and 0 < run.seconds < seconds


def test_progress_bar_reports_compilation(capsys):
    bars = []

    class SlowTrainer(RecordingTrainer):
        def train(self, batches):
            bars.append(capsys.readouterr().err)
            logging.getLogger("synkhronos").warning("this may take a minute")
            return super().train(batches)

        def validate(self):
            bars.append(capsys.readouterr().err)
            return super().validate()

    options = argparse.Namespace(epochs=1, steps=None, at_once=1, seed=1, quiet=False)
    fit(SlowTrainer([10] * 3), options, "shown", perf_counter())
    first, second, *_, validation = bars
    assert first.split("\r")[-1].startswith("shown, compiling:   0%") and "| 0/3 " in first
    # On a line of its own.
    assert "this may take a minute" in [line.strip() for line in second.replace("\r", "\n").splitlines()]
    assert "compiling" not in second.split("\r")[-1]
    assert validation.split("\r")[-1].startswith("shown, validating: 100%")
