"""Runs of the launcher: classes written without this library, under each rule; logs, timelines, run folders."""

import importlib
import json
import re
import subprocess
import sys
import textwrap
import tomllib

import numpy as np
import pytest
from launch_runs import ENVIRONMENT, read_json_lines, run, train
from paths import ROOT, SUPPORT

from synkhronos.launcher.configuration.model_file import locate_model_class
from synkhronos.launcher.model_class.model_interface import import_model_class

pytestmark = pytest.mark.starts_programs


def read_traces(folder):
    return [json.loads((folder / f"trace-{r}.json").read_text()) for r in range(2)]


@pytest.mark.parametrize("rule", ["BSP", "EASGD", "GOSGD"])
def test_launch_trains_a_theano_mpi_class(tmp_path, rule):
    options = {"EASGD": {"rule_options__period": 3}, "GOSGD": {"rule_options__probability": 0.5}}.get(rule, {})
    folder = tmp_path / "run"
    train(folder, "TracingMLP", every=4, rule=rule, config__trace=f"'{tmp_path}'", **options)
    reports = read_json_lines(folder, "reports")
    assert [report["epoch"] for report in reports] == [1, 2, 3]
    assert reports[-1]["validation"]["error"] < 0.1 < reports[0]["loss"]
    assert reports[-1]["batch"] == "2 x 10" and reports[-1]["steps"] == 18
    lines = [line for r in range(2) for line in read_json_lines(folder, f"rank-{r}")]
    for report in reports:
        exchange = sum(line["exchange"] for line in lines if line["epoch"] + 1 == report["epoch"]) / 2
        assert report["seconds"]["exchange"] == pytest.approx(exchange)
    first, second = read_traces(tmp_path)
    assert first["initial_sum"] != second["initial_sum"]  # the initial parameters of each instance
    assert (
        first["trace"][0][2] == second["trace"][0][2] == first["initial_sum"]
    )  # and the parameters that training starts with
    assert first["random"] != second["random"]
    for epoch in range(3):  # shards of one order
        batches = [[step[3] for step in traces["trace"] if step[0] == epoch] for traces in (first, second)]
        assert len(batches[0]) == len(batches[1]) == 9 and not set(batches[0]) & set(batches[1])
    agree = [a[2] == b[2] for a, b in zip(first["trace"], second["trace"], strict=True)]
    assert all(agree) if rule == "BSP" else not all(agree)
    assert {line["rows"] for line in read_json_lines(folder, "rank-1")} == {40, 10}
    assert [array.shape for array in np.load(folder / "params.npz").values()] == [(5, 8), (8,), (8, 2)]


def test_launch_leaves_mpi_initialization_to_the_class(tmp_path):
    pytest.importorskip("mpi4py")
    # mpi4py's default, which the other tests disable
    train(tmp_path, "MpiMLP", epochs=1, environment={"MPI4PY_RC_INITIALIZE": "1"})
    for rank in (0, 1):
        assert "imported before: False size: 1 sum: 3" in (tmp_path / f"rank-{rank}.log").read_text()


def test_launch_records_a_timeline(tmp_path):
    train(tmp_path, epochs=1, timeline="true")
    spans = [e for e in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"] if e["ph"] == "X"]
    for rank in (0, 1):
        assert {"step", "exchange"} <= {span["name"] for span in spans if span["pid"] == rank}
    assert "critical path" in run("show", str(tmp_path / "timeline.json")).stdout


def test_launch_runs_the_seed_examples(tmp_path):
    (tmp_path / "launch_session.cfg").write_text(
        "# launch_session.cfg\nRULE=BSP\nMODELFILE=launch_models.mlp\nMODELCLASS=MLP\nDEVICES=cpu,cpu\n"
    )
    done = run("train", "launch_session.cfg", "--folder=one", cwd=tmp_path, new=True)
    assert "[rank 1] epoch 3, iteration 27, cost" in done.stdout
    script = tmp_path / "launch_session.py"
    script.write_text(
        textwrap.dedent("""
        # launch_session.py
        import synkhronos.compat
        from theanompi import BSP

        BSP.sync_type = "avg"  # MLP has no vels, which "cdd" needs
        rule=BSP()
        # modelfile: the relative path to the model file
        # modelclass: the class name of the model to be imported from that file
        rule.init(devices=['cpu', 'cpu'] ,
                  modelfile = 'launch_models.mlp',
                  modelclass = 'MLP')
        rule.wait()
        """)
    )
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    params = [np.load(run_folder / "params.npz") for run_folder in (tmp_path / "one", folder)]
    assert all(np.array_equal(params[0][name], params[1][name]) for name in params[0])


def test_run_folder_describes_the_run(tmp_path):
    done = train(tmp_path / "run", "MLP", epochs=1, seed=4)
    assert done.stdout.startswith("2 ranks on cpu, cpu; ")
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert settings["devices"] == ["cpu", "cpu"] and settings["epochs"] == 1 and settings["seed"] == 4
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == 0 and record["numpy"] == np.__version__ and len(record["commit"]) == 40
    log = (tmp_path / "run" / "rank-1.log").read_text()
    assert log.startswith("process ") and "epoch 1, iteration 9" in log
    assert f"[rank 1] {log.splitlines()[0]}" in done.stdout
    again = run("train", tmp_path / "run" / "settings.json", "--dry-run", "--folder", tmp_path / "other")
    assert json.loads(again.stdout)["modelfile"] == "launch_models.mlp"
    assert not (tmp_path / "other").exists()


def test_launch_reports_once_an_epoch(tmp_path):
    (tmp_path / "counted.py").write_text(
        textwrap.dedent("""
        from launch_models.mlp import MLP
        from synkhronos.exchange_rules import LocalSGD

        def compute_consensus(self, context, state, report=LocalSGD.compute_consensus):
            print("a report")
            return report(self, context, state)

        LocalSGD.compute_consensus = compute_consensus
        """)
    )
    sets = ["--set=model='counted.py:MLP'", "--set=rule=LocalSGD", "--set=epochs=2"]
    run("train", *sets, "--devices=cpu,cpu", "--folder=run", cwd=tmp_path)
    assert (tmp_path / "run" / "rank-1.log").read_text().count("a report") == 2


@pytest.mark.slow
def test_run_folder_is_locked(tmp_path):
    pytest.importorskip("safetensors")
    train(tmp_path, "MLP", epochs=1, checkpoint=1)
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        from synkhronos.exchange_rules import BSP
        from synkhronos.launcher import start_run
        settings = dict(modelfile="launch_models.mlp", modelclass="MLP", devices="cpu", folder={str(tmp_path)!r})
        run = start_run(BSP(), **settings, resume="latest", checkpoint=1, epochs=20)
        try:
            start_run(BSP(), **settings, resume="latest", epochs=20)
        except ValueError as error:
            print(error)
        run.wait()
        start_run(BSP(), **settings, resume="latest", epochs=21).wait()  # now it may
        """)
    )
    done = subprocess.run([sys.executable, script], cwd=SUPPORT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (
        f"folder: {tmp_path} is in use by a run that hasn't ended: wait for it, or choose another folder" in done.stdout
    )
    assert [report["epoch"] for report in read_json_lines(tmp_path, "reports")] == list(range(1, 22))


@pytest.mark.slow
def test_ranks_with_fewer_batches_do_not_block(tmp_path):
    done = train(tmp_path, "UnequalBatchesMLP", epochs=1)
    assert "ranks have [9, 4] batches: each trains on 4, since all exchange together" in done.stdout
    train(tmp_path / "other", "UnequalBatchesMLP", epochs=1, rule="EASGD")
    assert [read_json_lines(tmp_path / "other", f"rank-{r}")[-1]["step"] for r in range(2)] == [9, 4]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "steps"), [("BSP", [9, 9]), ("EASGD", [9, 12]), ("GOSGD", [9, 12])])
def test_data_that_grow_between_epochs_do_not_block(tmp_path, rule, steps):
    train(tmp_path, "GrowingEpochsMLP", epochs=3, rule=rule)
    assert [read_json_lines(tmp_path, f"rank-{r}")[-1]["step"] for r in range(2)] == steps
    assert [report["steps"] for report in read_json_lines(tmp_path, "reports")] == (
        [4, 6, 8] if rule == "BSP" else [4, 7, 10]
    )


@pytest.mark.slow
def test_random_streams_differ_by_rank(tmp_path):
    train(tmp_path, "EqualSeedsMLP", epochs=1)
    drawn = [re.search("drawn .*", (tmp_path / f"rank-{r}.log").read_text())[0] for r in range(2)]
    assert drawn[0] != drawn[1]
    # Rows per second exclude the first step, which may compile: 90 rows in these 2 s would be 45 per second.
    assert (
        read_json_lines(tmp_path, "rank-1")[0]["rows_per_second"] > 45
        and read_json_lines(tmp_path, "reports")[0]["rows_per_second"] > 90
    )


def test_session_class_imports_neighbouring_modules(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "their_parts.py").write_text("rate = 3\n")
    (tmp_path / "nets" / "their_net.py").write_text("from their_parts import rate\nclass Net:\n    rate = rate\n")
    root, module = locate_model_class("nets/their_net.py", "Net", [str(tmp_path)])
    assert module == "nets.their_net" and import_model_class(root, module, "Net").rate == 3


def test_console_script_runs_the_command(tmp_path, capsys, monkeypatch):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, name = project["scripts"]["synkhronos"].split(":")
    monkeypatch.setattr("sys.argv", ["synkhronos", "train", "none.toml"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        getattr(importlib.import_module(module), name)()
    assert caught.value.code == 2 and "none.toml: expected a session file" in capsys.readouterr().err
