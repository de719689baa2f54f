"""The scripts and the notebook in demos/pymc; each script checks its own results."""

import json
import os
import queue
import runpy
import sys
import time
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
ENVIRONMENT = {
    **os.environ,
    "PYTENSOR_FLAGS": f"mode={MODE}",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
}
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


def test_notebook_prints_its_results():
    jupyter_client = pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    cells = json.loads((DEMOS / "one_chain.ipynb").read_text())["cells"]
    manager = jupyter_client.KernelManager(kernel_name="python3")
    manager.start_kernel(env={**ENVIRONMENT, "IPYTHONDIR": "/nonexistent"})
    client = manager.client()
    client.start_channels()
    printed = ""
    try:
        client.wait_for_ready(timeout=60)
        for cell in cells:
            if cell["cell_type"] == "code":
                printed += run(client, "".join(cell["source"]))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert "2 ranks" in printed and "slope 0." in printed and "mean 1." in printed


def run(client, code):
    """Run code in a kernel; return its output."""
    cell, printed, deadline = client.execute(code), "", time.monotonic() + 100
    while time.monotonic() < deadline:
        try:
            message = client.get_iopub_msg(timeout=1)
        except queue.Empty:
            continue
        if message["parent_header"].get("msg_id") != cell:
            continue
        content = message["content"]
        assert message["msg_type"] != "error", "\n".join(content["traceback"])
        if message["msg_type"] == "stream" and content["name"] == "stdout":
            printed += content["text"]
        if message["msg_type"] == "status" and content["execution_state"] == "idle":
            return printed
    raise AssertionError(f"a cell is not done; it printed {printed!r}")
