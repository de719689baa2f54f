"""Runs: a class that never saw this library, under each rule; logs, checkpoints, bindings, the commands."""

import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from types import SimpleNamespace

import numpy as np
import pytest
from launch_models import masks
from launch_runs import ENVIRONMENT, lines, run, train
from library import package, shared, tensor
from loading_sources import Damaged
from paths import ROOT, SUPPORT

from synkhronos.launch import binding, class_loop, contract, doctor
from synkhronos.launch.contract import ContractError, group_variables
from synkhronos.launch.recorder import ClassRecorder
from synkhronos.launch.settings import find_module
from synkhronos.ranks import available_cores
from synkhronos.rules import BSP
from synkhronos.training import Checkpoint, CheckpointError, rank_state
from synkhronos.training.training_graph import apply_own_gradient
from synkhronos.training.updates import (
    adadelta,
    adagrad,
    adam,
    adamax,
    amsgrad,
    momentum,
    nesterov_momentum,
    rmsprop,
    sgd,
)


def traces(folder):
    return [json.loads((folder / f"trace-{r}.json").read_text()) for r in range(2)]


@pytest.mark.parametrize("rule", ["BSP", "EASGD", "GOSGD"])
def test_launch_trains_a_theano_mpi_class(tmp_path, rule):
    options = {"EASGD": {"rule_options__period": 3}, "GOSGD": {"rule_options__probability": 0.5}}.get(rule, {})
    folder = tmp_path / "run"
    train(folder, "Traced", every=4, rule=rule, config__trace=f"'{tmp_path}'", **options)
    reports = lines(folder, "reports")
    assert [report["epoch"] for report in reports] == [1, 2, 3]
    assert reports[-1]["validation"]["error"] < 0.1 < reports[0]["loss"]
    assert reports[-1]["batch"] == "2 x 10" and reports[-1]["steps"] == 18
    one, other = traces(tmp_path)
    assert one["own"] != other["own"]  # what each instance had made of its parameters
    assert one["trace"][0][2] == other["trace"][0][2] == one["own"]  # and what they begin with
    assert one["random"] != other["random"]
    for epoch in range(3):  # shards of one order
        batches = [[step[3] for step in each["trace"] if step[0] == epoch] for each in (one, other)]
        assert len(batches[0]) == len(batches[1]) == 9 and not set(batches[0]) & set(batches[1])
    agree = [a[2] == b[2] for a, b in zip(one["trace"], other["trace"], strict=True)]
    assert all(agree) if rule == "BSP" else not all(agree)
    assert {line["rows"] for line in lines(folder, "rank-1")} == {40, 10}
    assert [array.shape for array in np.load(folder / "params.npz").values()] == [(5, 8), (8,), (8, 2)]


def test_launch_leaves_mpi_initialization_to_the_class(tmp_path, monkeypatch):
    pytest.importorskip("mpi4py")
    monkeypatch.setitem(ENVIRONMENT, "MPI4PY_RC_INITIALIZE", "1")  # mpi4py's default, which the tests turn off
    train(tmp_path, "UsesMpi", epochs=1)
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
    done = run("train", "launch_session.cfg", "--folder=one", cwd=tmp_path)
    assert "[rank 1] epoch 3, iteration 27, cost" in done.stdout
    script = tmp_path / "launch_session.py"
    script.write_text(
        textwrap.dedent("""
        # launch_session.py
        from synkhronos.rules import BSP

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
    same = [np.load(each / "params.npz") for each in (tmp_path / "one", folder)]
    assert all(np.array_equal(same[0][name], same[1][name]) for name in same[0])


@pytest.mark.any_library
def test_run_folder_describes_the_run(tmp_path):
    done = train(tmp_path / "run", "MLP", epochs=1, seed=4)
    assert done.stdout.startswith("2 ranks on cpu, cpu; ")
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert settings["devices"] == ["cpu", "cpu"] and settings["epochs"] == 1 and settings["seed"] == 4
    noted = json.loads((tmp_path / "run" / "run.json").read_text())
    assert noted["status"] == 0 and noted["numpy"] == np.__version__ and len(noted["commit"]) == 40
    said = (tmp_path / "run" / "rank-1.log").read_text()
    assert said.startswith("process ") and "epoch 1, iteration 9" in said
    assert f"[rank 1] {said.splitlines()[0]}" in done.stdout
    again = run("train", tmp_path / "run" / "settings.json", "--dry-run", "--folder", tmp_path / "other")
    assert json.loads(again.stdout)["modelfile"] == "launch_models.mlp"
    assert not (tmp_path / "other").exists()


@pytest.mark.any_library
@pytest.mark.parametrize("rule", ["BSP", "EASGD"])
def test_resume_from_a_checkpoint(tmp_path, rule):
    pytest.importorskip("safetensors")
    options = {"rule": rule, "checkpoint": 1} | (
        {"rule_options__period": 3, "rule_options__asynchronous": "false"} if rule == "EASGD" else {}
    )
    train(tmp_path / "whole", "Shaky", epochs=4, **options)
    train(tmp_path / "parts", "Shaky", epochs=2, **options)
    train(tmp_path / "parts", "Shaky", "--resume", epochs=4, **options)
    whole, parts = (np.load(tmp_path / each / "params.npz") for each in ("whole", "parts"))
    for name in whole:
        np.testing.assert_array_equal(whole[name], parts[name])
    (tmp_path / "parts" / "params.npz").unlink()  # as if it had been killed behind its last checkpoint
    train(tmp_path / "parts", "Shaky", "--resume", epochs=4, **options)
    with np.load(tmp_path / "parts" / "params.npz") as parts:
        for name in whole:
            np.testing.assert_array_equal(whole[name], parts[name])
    assert [report["epoch"] for report in lines(tmp_path / "parts", "reports")] == [1, 2, 3, 4]
    assert [line["step"] for line in lines(tmp_path / "parts", "rank-1")] == [9, 18, 27, 36]


@pytest.mark.any_library
@pytest.mark.slow
def test_early_stop_keeps_the_best_epoch(tmp_path):
    pytest.importorskip("safetensors")
    options = {"rule": "EASGD", "rule_options__period": 3, "rule_options__asynchronous": "false"}
    train(tmp_path / "best", "Overfits", epochs=3, **options)
    best = {"keep_best": "['top5', 'max']", "patience": 2, "keep": 1, "checkpoint": 5, "epochs": 9, **options}
    for resume in ([], ["--resume"]):
        done = train(tmp_path / "run", "Overfits", *resume, **best)
        assert ("top5 max: no better for 2 epochs; the run ends after 5" in done.stdout) != bool(resume)
        assert [report["epoch"] for report in lines(tmp_path / "run", "reports")] == [1, 2, 3, 4, 5]
        kept = Checkpoint(tmp_path / "run" / "checkpoints", keep_best=("top5", "max"))
        assert [kept.load(path).meta["epochs"] for path in kept.paths()] == [3, 5]
        assert kept.load(kept.best()).metrics["top5"] == 1.0
        expected, found, last = (
            np.load(tmp_path / name) for name in ("best/params.npz", "run/best.npz", "run/params.npz")
        )
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name])
            assert not np.array_equal(found[name], last[name])
        (tmp_path / "run" / "best.npz").unlink()  # as if it had been killed before its end
    # Of another metric nothing is known yet.
    train(tmp_path / "run", "Overfits", "--resume", **{**best, "keep_best": "error", "epochs": 6})
    assert lines(tmp_path / "run", "reports")[-1]["epoch"] == 6


def test_metric_missing_in_the_class():
    for keep_best, metrics, words in [
        (["acc", "max"], {"loss": 1.0, "cost": 2.0}, "A lacks:\n  metric 'acc', got loss, cost$"),
        (None, {"loss": 1.0}, "A lacks:\n  metric 'cost', got loss$"),
        (None, {}, "A lacks:\n  metric 'cost', got nothing$"),
    ]:
        settings = SimpleNamespace(keep_best=keep_best, patience=3, modelclass="A")
        with pytest.raises(ContractError, match=words):
            class_loop.ClassLoop.observe(SimpleNamespace(settings=settings), SimpleNamespace(metrics=metrics))


@pytest.mark.any_library
def test_resume_with_fewer_epochs_trains_none():
    run = SimpleNamespace(n_reports=3, n_epochs=2, class_stops=False)
    assert class_loop.ClassLoop.is_complete(run)


def step(update_rule):
    """Return a model of the launcher's kind whose compiled step has the variables of an update rule."""
    x, w = tensor.dvector("x"), shared(np.zeros(3), "w")
    updates = apply_own_gradient(update_rule((tensor.dot(x, w) - 1) ** 2, [w], 0.1))
    return SimpleNamespace(params=[w], train_fn=package.function([x], [], updates=list(updates.items())))


def test_checkpoint_names_update_rule_variables():
    """A class' update rule has no name that a run knows: the variables tell the library's own rules apart."""
    rules_of = {rule.__name__: rule for rule in (sgd, momentum, nesterov_momentum, adagrad, rmsprop, adadelta)}
    rules_of |= {rule.__name__: rule for rule in (adam, adamax, amsgrad)}
    found = {
        name: rank_state.describe_training("run", BSP("params"), group_variables(step(rule)), None)
        for name, rule in rules_of.items()
    }
    for before, after in itertools.product(found, repeat=2):
        if before == after:
            rank_state.check_description(
                "rows",
                found[before],
                rank_state.describe_training("run", BSP("params"), group_variables(step(rules_of[after])), None),
            )
        else:
            with pytest.raises(CheckpointError, match="is of another model: its variables of the update rule are"):
                rank_state.check_description("rows", found[before], found[after])


@pytest.fixture(scope="module")
def signalled_runs(tmp_path_factory):
    """Give the folder of runs that no signal has ended, one for each rule."""
    return tmp_path_factory.mktemp("signalled")


@pytest.mark.any_library
@pytest.mark.parametrize(
    ("rule", "mode", "place"), [("BSP", "train", [1, 4]), ("BSP", "val", [1, 2]), ("EASGD", "train", [1, 4])]
)
@pytest.mark.slow
def test_resume_after_the_step_of_a_signal(tmp_path, signalled_runs, rule, mode, place):
    pytest.importorskip("safetensors")
    options = {"rule": rule, "checkpoint": 1, "epochs": 3} | (
        {"rule_options__period": 3, "rule_options__asynchronous": "false"} if rule == "EASGD" else {}
    )
    undisturbed = signalled_runs / rule
    if not undisturbed.exists():
        train(undisturbed, "Signalled", **options)
    done = train(tmp_path / "parts", "Signalled", status=143, config__at=[mode, *place], **options)
    noted = json.loads((tmp_path / "parts" / "run.json").read_text())
    newest = max((tmp_path / "parts" / "checkpoints").iterdir())
    assert (noted["status"], noted["signal"], noted["checkpoint"]) == (143, "SIGTERM", str(newest))
    assert f"the run was ended by SIGTERM; --resume goes on from {newest}" in done.stderr
    assert not (tmp_path / "parts" / "params.npz").exists()
    n_steps = int(newest.name.removeprefix("rows-"))
    assert n_steps == 18 if mode == "val" else 9 < n_steps < 18
    train(tmp_path / "parts", "Signalled", "--resume", **options)
    whole, parts = (np.load(each / "params.npz") for each in (undisturbed, tmp_path / "parts"))
    for name in whole:
        np.testing.assert_array_equal(whole[name], parts[name])
    whole, parts = (lines(each, "reports") for each in (undisturbed, tmp_path / "parts"))
    for one, other in zip(whole, parts, strict=True):
        assert all(one[key] == other[key] for key in ("epoch", "seen", "steps", "loss", "validation", "learning_rate"))
    assert sum(line["rows"] for line in lines(tmp_path / "parts", "rank-1")) == 3 * 90


@pytest.mark.any_library
@pytest.mark.slow
def test_signal_ends_an_asynchronous_run(tmp_path):
    pytest.importorskip("safetensors")
    options = {"rule": "EASGD", "checkpoint": 1, "epochs": 2}
    train(tmp_path, "Signalled", "--devices=cpu", "--ranks=3", status=143, config__at=["train", 0, 3], **options)
    train(tmp_path, "Signalled", "--resume", **options)  # two of the three go on
    assert [report["epoch"] for report in lines(tmp_path, "reports")] == [1, 2]


@pytest.mark.any_library
def test_resume_in_the_middle_of_an_epoch():
    from synkhronos.launch import Model

    class Read(Model):
        batch_size = 2

        def build(self):
            kind = SimpleNamespace(type=SimpleNamespace(dtype="int64"))
            self.inputs, self.params = [kind], []

        def load(self):
            return [np.arange(20)], []

    model, recorder = Read({"rank": 1, "size": 2, "seed": 3}), ClassRecorder(0)
    model.epoch = 4
    batches = [model.next_batch(recorder)[0].tolist() for _ in range(5)]
    model.epoch = 5
    model.next_batch(recorder)
    model.epoch = 4
    model.skip_iter(3)
    assert [model.next_batch(recorder)[0].tolist() for _ in range(2)] == batches[3:]


@pytest.mark.any_library
def test_launch_reports_once_an_epoch(tmp_path):
    (tmp_path / "counted.py").write_text(
        textwrap.dedent("""
        from launch_models.mlp import MLP
        from synkhronos.rules import LocalSGD

        def report(self, worker, state, report=LocalSGD.report):
            print("a report")
            return report(self, worker, state)

        LocalSGD.report = report
        """)
    )
    sets = ["--set=model='counted.py:MLP'", "--set=rule=LocalSGD", "--set=epochs=2"]
    run("train", *sets, "--devices=cpu,cpu", "--folder=run", cwd=tmp_path)
    assert (tmp_path / "run" / "rank-1.log").read_text().count("a report") == 2


@pytest.mark.any_library
@pytest.mark.slow
def test_resume_after_a_truncated_log_line(tmp_path):
    pytest.importorskip("safetensors")
    train(tmp_path, "MLP", epochs=1, checkpoint=1)
    with open(tmp_path / "rank-1.jsonl", "a") as file:
        file.write('{"time": 17')  # the disk was full, or the machine went down
    train(tmp_path, "MLP", "--resume", epochs=2, checkpoint=1)
    assert [line["epoch"] for line in lines(tmp_path, "rank-1")] == [0, 1]


@pytest.mark.any_library
@pytest.mark.slow
def test_run_folder_is_locked(tmp_path):
    pytest.importorskip("safetensors")
    train(tmp_path, "MLP", epochs=1, checkpoint=1)
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        from synkhronos.rules import BSP
        run = dict(modelfile="launch_models.mlp", modelclass="MLP", devices="cpu", folder={str(tmp_path)!r})
        first, second = BSP(), BSP()
        first.init(**run, resume="latest", checkpoint=1, epochs=20)
        try:
            second.init(**run, resume="latest", epochs=20)
        except ValueError as error:
            print(error)
        first.wait()
        second.init(**run, resume="latest", epochs=21)  # now it may
        second.wait()
        """)
    )
    done = subprocess.run([sys.executable, script], cwd=SUPPORT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"folder: {tmp_path} has a run that hasn't ended: wait for it, or name another" in done.stdout
    assert [report["epoch"] for report in lines(tmp_path, "reports")] == list(range(1, 22))


@pytest.mark.any_library
@pytest.mark.slow
def test_resume_on_another_number_of_ranks(tmp_path):
    pytest.importorskip("safetensors")
    train(tmp_path, "MLP", epochs=1, rule="EASGD", checkpoint=1)
    train(tmp_path, "MLP", "--resume", "--devices=cpu", "--ranks=3", epochs=2, rule="EASGD")
    assert [report["batch"] for report in lines(tmp_path, "reports")] == ["2 x 10", "3 x 10"]
    done = train(tmp_path, "MLP", "--resume", epochs=3, status=1)
    assert re.search(r"CheckpointError: .*rows-0+9 is of the rule EASGD, got BSP", done.stderr)


@pytest.mark.any_library
@pytest.mark.slow
def test_ranks_with_fewer_batches_do_not_block(tmp_path):
    done = train(tmp_path, "Uneven", epochs=1)
    assert "ranks have [9, 4] batches: each takes 4, since all exchange at once" in done.stdout
    train(tmp_path / "other", "Uneven", epochs=1, rule="EASGD")
    assert [lines(tmp_path / "other", f"rank-{r}")[-1]["step"] for r in range(2)] == [9, 4]


@pytest.mark.any_library
@pytest.mark.slow
def test_random_streams_differ_by_rank(tmp_path):
    train(tmp_path, "Noisy", epochs=1)
    drawn = [re.search("drawn .*", (tmp_path / f"rank-{r}.log").read_text())[0] for r in range(2)]
    assert drawn[0] != drawn[1]
    # Nor do rows a second count the first step, in which functions may be compiled: 90 rows would be 45 in these 2 s.
    assert (
        lines(tmp_path, "rank-1")[0]["rows_per_second"] > 45 and lines(tmp_path, "reports")[0]["rows_per_second"] > 90
    )


def test_session_class_imports_neighbouring_modules(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "their_parts.py").write_text("rate = 3\n")
    (tmp_path / "nets" / "their_net.py").write_text("from their_parts import rate\nclass Net:\n    rate = rate\n")
    root, module = find_module("nets/their_net.py", "Net", [str(tmp_path)])
    assert module == "nets.their_net" and contract.load_class(root, module, "Net").rate == 3


# -- binding -------------------------------------------------------------------------------------------------


@pytest.mark.any_library
def test_launch_shares_cores_among_ranks():
    assert binding.assign_cores(["cpu"] * 2, range(5), {})[0] == [[0, 1], [2, 3, 4]]
    assert binding.assign_cores(["cpu"] * 3, [4, 6, 9], {})[0] == [[4], [6], [9]]
    assert binding.assign_cores(["cpu"] * 3, [0, 1], {}) == ([], "not bound: there are 2 cores for 3 ranks")


@pytest.mark.any_library
def test_binding_places_ranks_near_their_gpus(tmp_path):
    for address, cores in (("0000:1b:00.0", "0-3,8-11"), ("0000:3c:00.0", "0-3,8-11"), ("0000:9d:00.0", "4-7")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "local_cpulist").write_text(f"{cores}\n")
    near = {
        f"cuda{i}": binding.find_device_cores(address, tmp_path)
        for i, address in enumerate(("00000000:1B:00.0", "00000000:3C:00.0", "00000000:9D:00.0"))
    }
    devices = sorted(near)
    found, why = binding.assign_cores(devices, range(12), near)
    assert found == [[0, 1, 2, 3], [8, 9, 10, 11], [4, 5, 6, 7]] and why.endswith("next to its GPU")
    assert binding.assign_cores(devices, [0, 1, 2, 5], near)[0] == [[0], [1, 2], [5]]
    found, why = binding.assign_cores(devices, [0, 1, 2, 12], near)
    assert found[2] == [0, 1, 2, 12] and "next to cuda2 are not among those" in why
    assert binding.assign_cores(devices, [0, 5, 6], near)[1] == "not bound: cores 0 are next to the GPUs of 2 ranks"
    assert binding.find_device_cores("0000:ff:00.0", tmp_path) == []


@pytest.mark.any_library
def test_binding_follows_cudas_gpu_order(tmp_path, monkeypatch):
    # On the bus the slow one comes first; CUDA begins with the fast one.
    names = {"GPU-slow": "0000:1b:00.0", "GPU-fast": "0000:9d:00.0"}
    for address, cores in zip(names.values(), ("0-3", "4-7"), strict=True):
        (tmp_path / address).mkdir()
        (tmp_path / address / "local_cpulist").write_text(cores)
    memory = SimpleNamespace(total=80 << 30)
    nvml = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByIndex": [*names].__getitem__,
        "nvmlDeviceGetHandleByUUID": bytes.decode,
        "nvmlDeviceGetName": lambda name: f"a {name}",
        "nvmlDeviceGetMemoryInfo": lambda name: memory,
        "nvmlDeviceGetPciInfo": lambda name: SimpleNamespace(busId=names[name].encode()),
        "nvmlDeviceGetP2PStatus": lambda one, other, index: 0,
        "NVML_P2P_CAPS_INDEX_NVLINK": 2,
        "NVML_P2P_STATUS_OK": 0,
        "NVMLError": OSError,
    }
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**nvml))
    cuda = SimpleNamespace(Device=lambda number: SimpleNamespace(uuid=["fast", "slow"][number]))
    monkeypatch.setitem(sys.modules, "cuda.core", cuda)
    monkeypatch.setattr(binding.find_gpu_cores, "__defaults__", (tmp_path,))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert binding.find_gpu_cores(["cuda0", "cuda1"]) == {"cuda0": [4, 5, 6, 7], "cuda1": [0, 1, 2, 3]}
    assert doctor._describe_gpus(2) == [
        "  cuda0: a GPU-fast, 80 GiB, next to cores 4-7, NVLink to 1",
        "  cuda1: a GPU-slow, 80 GiB, next to cores 0-3, NVLink to 0",
    ]
    del cuda.Device
    assert binding.find_gpu_cores(["cuda0", "cuda1"]) == {}


@pytest.mark.any_library
@pytest.mark.skipif(available_cores() < 2, reason="needs two cores")
@pytest.mark.slow
def test_binding_of_ranks_and_threads(tmp_path):
    (tmp_path / "where.py").write_text(
        textwrap.dedent("""
        import os
        from launch_models.mlp import MLP

        class Where(MLP):
            def cleanup(self):
                threads = {tuple(sorted(os.sched_getaffinity(int(t)))) for t in os.listdir("/proc/self/task")}
                print("cores", sorted(threads))
        """)
    )
    common = ["--set=model='where.py:Where'", "--devices=cpu,cpu", "--set=epochs=1"]
    run("train", *common, "--folder=bound", cwd=tmp_path)
    run("train", *common, "--folder=free", "--no-bind", cwd=tmp_path)
    allowed = sorted(os.sched_getaffinity(0))
    half = len(allowed) // 2
    for r, own in enumerate((allowed[:half], allowed[half:])):
        assert f"cores {[tuple(own)]}" in (tmp_path / "bound" / f"rank-{r}.log").read_text()
        said = (tmp_path / "free" / f"rank-{r}.log").read_text()
        assert f"cores {[tuple(allowed)]}" in said and "not bound" in said


# -- the base class ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["BSP", "GOSGD"])
def test_model_base_class_trains(tmp_path, rule):
    run(
        "train",
        "--set=model='launch_models/small.py:Line'",
        "--devices=cpu,cpu",
        f"--set=rule={rule}",
        "--folder",
        tmp_path,
        "--set=rule_options.probability=0.5" if rule == "GOSGD" else "--set=seed=3",
        cwd=SUPPORT,
    )
    reports = lines(tmp_path, "reports")
    assert [report["steps"] for report in reports] == [12] * 8  # 120 rows, ten a step, six steps on each of two ranks
    assert reports[-1]["validation"]["error"] < 0.3 and reports[-1]["learning_rate"] == 0.05
    (w,) = np.load(tmp_path / "params.npz").values()
    np.testing.assert_allclose(w, [1, 2, 3], atol=0.1)
    rng = np.random.default_rng(0).normal(size=(165, 3))[120:]
    loss = float(np.mean((rng @ w - rng @ [1.0, 2.0, 3.0]) ** 2))
    np.testing.assert_allclose(reports[-1]["validation"]["cost"], loss, rtol=1e-6)  # each of 45 rows once


@pytest.mark.parametrize("rule", ["BSP", "EASGD", "DiLoCo"])
@pytest.mark.slow
def test_model_metrics_are_weighted_by_items(tmp_path, rule):
    model = ["--set=model='launch_models/small.py:Masked'", "--devices=cpu,cpu", f"--set=rule={rule}"]
    more = ["--set=rule_options.period=1", "--set=rule_options.momentum=0.9"] if rule == "DiLoCo" else []
    run("train", *model, *more, "--set=checkpoint=1", "--set=seed=3", "--folder", tmp_path, cwd=SUPPORT)
    (x, y, mask), (_, y_valid, mask_valid) = (
        [part[rows] for part in masks.rows()] for rows in (slice(40), slice(40, None))
    )
    for report in lines(tmp_path, "reports"):
        np.testing.assert_allclose(report["loss"], (mask * y**2).sum() / mask.sum(), rtol=1e-6)
        for name, errors in (("cost", y_valid**2), ("error", abs(y_valid))):
            expected = (mask_valid * errors).sum() / mask_valid.sum()
            np.testing.assert_allclose(report["validation"][name], expected, rtol=1e-6)
    _, average = np.load(tmp_path / "params.npz").values()
    expected = np.zeros(3)
    for epoch in range(2):
        order = np.random.default_rng((3, epoch)).permutation(40)
        for first in range(0, 40, 4):  # two rows a rank
            expected = 0.9 * expected + 0.1 * x[order[first : first + 4]].mean(axis=0)
    np.testing.assert_allclose(average, expected, rtol=0.5 if rule == "EASGD" else 1e-9)


def test_bsp_params_averages_by_weight(tmp_path):
    model = ["--set=model='launch_models/small.py:Stepping'", "--devices=cpu,cpu", "--set=rule=BSP", "--set=seed=3"]
    run("train", *model, "--set=epochs=2", "--folder", tmp_path, cwd=SUPPORT)
    x, y, mask = masks.rows()
    w = np.zeros(3)
    for epoch in range(2):
        order = np.random.default_rng((3, epoch)).permutation(40)
        for first in range(0, 40, 4):  # two rows a rank
            rows = order[first : first + 4]
            if mask[rows].any():
                gradient = 2 * (mask[rows] * x[rows] * (x[rows] * w - y[rows])).sum(axis=0) / mask[rows].sum()
                w = w - 0.1 * gradient
    np.testing.assert_allclose(np.load(tmp_path / "params.npz")["arr_0"], w, rtol=1e-9)


def test_model_warns_of_a_mean_without_weight(tmp_path):
    model = ["--set=model='launch_models/small.py:Unweighted'", "--devices=cpu"]
    run("train", *model, "--set=epochs=1", "--folder", tmp_path, cwd=SUPPORT)
    assert "loss: the denominator of a mean depends on the values of mask" in (tmp_path / "rank-0.log").read_text()


@pytest.mark.any_library
def test_model_learning_rate_of_0_changes_nothing(tmp_path):
    for epochs in (1, 2):
        run(
            "train",
            "--set=model='launch_models/small.py:Frozen'",
            "--devices=cpu,cpu",
            "--set=rule=SlowMo",
            "--set=rule_options.period=1",
            f"--set=epochs={epochs}",
            "--folder",
            tmp_path / str(epochs),
            cwd=SUPPORT,
        )
    first, second = (np.load(tmp_path / str(epochs) / "params.npz")["arr_0"] for epochs in (1, 2))
    np.testing.assert_allclose(second, first, rtol=1e-12)


@pytest.mark.any_library
def test_model_base_class_errors():
    from synkhronos.launch import Model

    class Uneven(Model):
        def load(self):
            return [np.zeros(3), np.zeros(4)], []

    class TooFew(Model):
        def load(self):
            return [np.zeros(30)], []

    config = {"rank": 0, "size": 2, "seed": 0}
    with pytest.raises(ValueError, match=r"load\(\): training arrays have \[3, 4\] rows"):
        Uneven(config)
    with pytest.raises(
        ValueError, match="batch_size: expected at most 15, as 30 rows are shared out among 2 ranks, got 100"
    ):
        TooFew(config)
    with pytest.raises(NotImplementedError, match=r"Model.load\(\)"):
        Model(config)


@pytest.mark.any_library
def test_model_names_a_nan_row():
    from synkhronos.launch.class_loop import ClassLoop

    rows = np.zeros((5, 2))
    rows[3, 1] = np.inf
    recorder = ClassRecorder(0)
    recorder.train_error(1, np.nan)
    recorder.stepped()
    recorder.write()
    run = SimpleNamespace(
        worker=SimpleNamespace(size=1), recorder=recorder, outcomes=[recorder.meter.get_outcome(0.1)], rows=1,
        trained=recorder.epoch_began + 1, n_reports=1, model=SimpleNamespace(train_data=[np.arange(5), rows]),
    )  # fmt: skip
    with pytest.raises(
        FloatingPointError, match=r"the cost is nan in epoch 2: row 3 of load\(\)'s training array 1 has inf"
    ):
        ClassLoop.make_report(run)
    run.model = SimpleNamespace(train_data="a class of somebody's")
    with pytest.raises(FloatingPointError, match="the cost is nan in epoch 2: nothing of it was saved"):
        ClassLoop.make_report(run)


@pytest.mark.any_library
def test_model_trains_when_a_loader_skips_batches():
    from synkhronos.launch import Model
    from synkhronos.loading import Loader

    class Read(Model):
        batch_size = 2

        def build(self):
            kind = SimpleNamespace(type=SimpleNamespace(dtype="int64"))
            self.inputs, self.params = [kind, kind], []
            self.val_fn = lambda pictures, numbers: [numbers.mean()]

        def load(self):
            train, valid = Damaged(8, bad=(2, 3)), Damaged(5, bad=(4,))
            return [Loader(source, shuffle=False, on_error="skip") for source in (train, valid)]

    model, recorder = Read({"rank": 0, "size": 1, "seed": 0}), ClassRecorder(0)
    try:
        assert (model.data.n_batch_train, model.data.n_batch_val) == (4, 3)
        numbers = [model.next_batch(recorder)[1].tolist() for _ in range(4)]
        assert numbers == [[0, 1], [4, 5], [6, 7], [0, 1]]
        model.reset_iter("val")
        for i in range(3):
            model.val_iter(i, recorder)
        assert recorder.validation_sums() == (4, {"cost": 2 * 0.5 + 2 * 2.5})
    finally:
        model.cleanup()


@pytest.mark.any_library
def test_console_script_runs_the_command(tmp_path, capsys, monkeypatch):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, name = project["scripts"]["synkhronos"].split(":")
    monkeypatch.setattr("sys.argv", ["synkhronos", "train", "none.toml"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        getattr(importlib.import_module(module), name)()
    assert caught.value.code == 2 and "none.toml: expected a session file" in capsys.readouterr().err
