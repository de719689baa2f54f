"""The scripts and the notebook in demos/pymc; each script checks its own results."""

import json
import runpy
import sys
import warnings

import pytest
from paths import ROOT

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ArviZ announces its next version
    pytest.importorskip("pymc", reason="the extra `pymc` is not installed")
import pytensor

import synkhronos as synk

DEMOS = ROOT / "demos" / "pymc"
#: Mode that compiles fastest, by Python's linker.
MODE = "FAST_COMPILE"
SMALL = {
    "counts": ["--rows", "400", "--steps", "200"],
    "logistic": ["--rows", "400", "--draws", "30"],
    "own_density": ["--rows", "400"],
}


def test_every_demo_script_is_tested():
    assert sorted(SMALL) == sorted(path.stem for path in DEMOS.glob("*.py"))


# The scripts run in this process, which has the imports.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("script", SMALL)
def test_demo_script_checks_its_results(monkeypatch, capsys, script):
    path = str(DEMOS / f"{script}.py")
    monkeypatch.setattr(sys, "argv", [path, "--ranks", "2", *SMALL[script]])
    monkeypatch.setattr(pytensor.config, "mode", MODE)
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        synk.close()
    assert "2 ranks" in capsys.readouterr().out


# The cells run in this process, too; tests/ranks/test_notebook.py starts kernels.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_notebook_prints_its_results(monkeypatch, capsys):
    monkeypatch.setattr(pytensor.config, "mode", MODE)
    cells = json.loads((DEMOS / "one_chain.ipynb").read_text())["cells"]
    names = {}
    try:
        for cell in cells:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), names)
    finally:
        synk.close()
    printed = capsys.readouterr().out
    assert "2 ranks" in printed and "slope 0." in printed and "mean 1." in printed
