"""Every message of `check` and of the launcher, and what brings it about.

Each entry has what is typed, the exit status, and a part of what is said.
"""

import dataclasses
import datetime
import json
import re
import subprocess
import sys
import textwrap

import pytest
from launch_runs import ENVIRONMENT, run, train
from paths import SUPPORT

from synkhronos import rules
from synkhronos.gpus import get_n_gpu
from synkhronos.launch import SettingsError, contract
from synkhronos.launch.recorder import ClassRecorder
from synkhronos.launch.settings import Settings, join_tables, parse_set, read_environment, read_session, resolve
from synkhronos.launch.supervisor import prepare

pytestmark = pytest.mark.any_library

MODEL = {"model": "launch_models/mlp.py:MLP", "devices": "cpu"}
GPUS = get_n_gpu()

#: Settings, and what is said of them; nothing starts.
SETTINGS = {
    "no model": ({"model": None, "devices": "cpu"}, r"modelfile: expected the file to train"),
    "no class": ({"model": None, "modelfile": "launch_models.mlp"}, r"modelclass: expected the class to train"),
    "no colon": ({"model": "mlp.py"}, r"model: expected FILE:CLASS, got 'mlp.py'"),
    "no such file": ({"model": "launch_models/none.py:MLP"}, r"modelfile: there is no file launch_models/none.py in /"),
    "no such module": ({"model": "launch_models.none:MLP"}, r"modelfile: .* got 'launch_models.none': there is no launch_models/none.py in /"),
    "no such class": ({"model": "launch_models/others.py:Nobody"}, r"modelclass: .*others.py has no 'Nobody': it has Traced, Wider, Noisy, "),
    "no Python": ({"model": "{broken}:MLP"}, r"modelfile: .*broken.py, line 2: "),
    "devices, a number": ({"devices": 2}, r"devices: expected names such as cuda0 and cpu, got 2"),
    "devices, none": ({"devices": []}, r"devices: expected at least one name, such as cuda0 or cpu, got \[\]"),
    "devices, a word": ({"devices": "tpu0"}, r"devices: expected cuda0, gpu0 and so on, or cpu alone, got 'tpu0'"),
    "devices, mixed": ({"devices": "cpu,cuda0"}, r"got 'cpu'; cpu can't be mixed with GPUs"),
    "devices, another host": ({"devices": "node2:cuda0"}, r"devices: 'node2:cuda0' is on another host: these are devices of this machine; hosts = "),
    "devices, GPUs on hosts": ({"devices": "cuda0", "hosts": "a,b"}, r"devices: cuda0 is not there: this machine shows no GPU"),
    "devices and hosts": ({"devices": "cpu,cpu", "hosts": ["a:3", "b"]}, r"ranks: expected 2, the number of devices, got 3"),
    "hosts, a number": ({"hosts": 2}, r"hosts: expected a list of names, or \"all\", got 2"),
    "hosts, none of them": ({"hosts": ["a", "b:no"]}, r"hosts: expected a number of ranks from 1 to 1024 after the colon, got 'b:no'"),
    "hosts, twice": ({"hosts": "a,a"}, r"hosts: a is named twice"),
    "hosts, no allocation": ({"hosts": "all"}, r'hosts: "all" are the hosts of an allocation'),
    "devices, not there": ({"devices": "cuda99"}, r"devices: cuda99 is not there: this machine shows (no GPU|cuda0 to cuda\d+); cpu,cpu computes on two of its cores"),
    "ranks and devices": ({"devices": "cpu,cpu", "ranks": 3}, r"ranks: expected 2, the number of devices, got 3"),
    "ranks, none": ({"ranks": 0}, r"ranks: expected at least 1, got 0"),
    "ranks, too many": ({"ranks": 10**30}, r"ranks: expected at most 1024, got 1000"),
    "root, a number": ({"root": 3}, r"root: expected a text, got 3"),
    "ranks, a word": ({"ranks": "all"}, r"ranks: expected an integer, got 'all'"),
    "a rule": ({"rule": "SSP"}, r"rule: expected one of ASGD, BSP, .* got 'SSP'"),
    "a rule, a number": ({"rule": 3}, r"rule: expected a text, got 3"),
    "EAMSGD": ({"rule": "EAMSGD"}, r"rule: EAMSGD needs the velocities, and a class doesn't name them: take EASGD"),
    "an average": ({"rule_options": {"average": "velocity"}}, r"rule_options.average: expected 'gradient' or 'params', got 'velocity'"),
    "timeline": ({"timeline": "late"}, r"timeline: expected true or false, got 'late'"),
    "warmup": ({"warmup": "late"}, r"warmup: expected true or false, got 'late'"),
    "an option": ({"rule": "EASGD", "rule_options": {"tau": 3}}, r"rule_options: EASGD has no 'tau': expected one of beta, period, alpha, asynchronous"),
    "an option's value": ({"rule": "EASGD", "rule_options": {"beta": 2}}, r"rule_options: beta: expected a number above 0, up to 1, got 2"),
    "an option, yes or no": ({"rule": "EASGD", "rule_options": {"asynchronous": "False"}}, r"rule_options: asynchronous: expected True or False, got 'False'"),
    "an option without end": ({"rule": "SlowMo", "rule_options": {"lr": float("inf")}}, r"rule_options: lr: expected a positive number, got inf"),
    "options, no table": ({"rule_options": "period"}, r"rule_options: expected a table of names and values, got 'period'"),
    "config, a date": ({"config": {"days": [datetime.date(2024, 1, 1)]}}, r"config: expected numbers, texts, lists and tables: .* date is not JSON"),
    "config, no table": ({"config": [1]}, r"config: expected a table of names and values, got \[1\]"),
    "epochs": ({"epochs": 0}, r"epochs: expected at least 1, got 0"),
    "config, given by the run": ({"config": {"rank": 0}}, r"config: 'rank' is given by the run: each rank has its own"),
    "config, the name": ({"config": {"mname": "MLP"}}, r"config: 'mname' is given by the run: it is the class' name"),
    "config, another setting": ({"config": {"seed": 3}}, r"config: 'seed' is given by the run: use the setting 'seed'"),
    "seed": ({"seed": "x"}, r"seed: expected an integer, got 'x'"),
    "seed, large": ({"seed": 2**32}, r"seed: expected at most 4294967295, got 4294967296"),
    "grace": ({"grace": -1}, r"grace: expected a number of seconds, got -1"),
    "grace, without end": ({"grace": float("inf")}, r"grace: expected a number of seconds, got inf"),
    "devices, many": ({"devices": ["cpu"] * 2000}, r"devices: expected at most 1024, got 2000"),
    "every": ({"every": 0}, r"every: expected at least 1, got 0"),
    "checkpoint": ({"checkpoint": -1}, r"checkpoint: expected no negative number, got -1"),
    "restarts": ({"restarts": -1}, r"restarts: expected no negative number, got -1"),
    "restarts alone": ({"restarts": 1}, r"restarts: needs checkpoints: set 'checkpoint', the number of epochs between"),
    "on_death": ({"on_death": "go on"}, r"on_death: expected 'stop' or 'continue', got 'go on'"),
    "on_death, a flag": ({"on_death": True}, r"on_death: expected 'stop' or 'continue', got True"),
    "max_deaths": ({"max_deaths": 0}, r"max_deaths: expected at least 1, got 0"),
    "max_deaths, a text": ({"max_deaths": "x"}, r"max_deaths: expected an integer, got 'x'"),
    "patience": ({"patience": 0}, r"patience: expected at least 1, got 0"),
    "keep_best, a name": ({"keep_best": "accuracy"}, r"keep_best: expected one of loss, cost, error, top5, got 'accuracy'"),
    "keep_best": ({"keep_best": ["error", "least"]}, r"keep_best: expected a metric's name, or a pair such as \('accuracy', 'max'\), got"),
    "keep": ({"keep": 0}, r"keep: expected at least 1, got 0"),
    "bind": ({"bind": "perhaps"}, r"bind: expected true or false, got 'perhaps'"),
    "scale_lr": ({"scale_lr": 7}, r"scale_lr: expected true or false, got 7"),
    "folder, used": ({"folder": "{used}"}, r"folder: .*used has a run already: name another, or go on with --resume"),
    "folder, with a file": ({"folder": "{broken_folder}"}, r"folder: .*checkpoints has to be a folder, or nothing yet"),
    "resume, nothing": ({"folder": "{used}", "resume": "latest"}, r"resume: expected a checkpoint in .*checkpoints, found none"),
    "resume, elsewhere": ({"resume": "nowhere"}, r"resume: expected 'latest' or a checkpoint's folder, got 'nowhere'"),
}  # fmt: skip

#: Session files, and what is said of them.
FILES = {
    "not there": ("none.toml", None, r"none.toml: expected a session file: "),
    "no TOML": ("a.toml", "rule = ", r"a.toml: Invalid value"),
    "no JSON": ("a.json", "{", r"a.json: Expecting"),
    "no settings": ("a.json", "3", r"a.json: expected settings by name, got 3"),
    "no setting": ("a.toml", "rules = 'BSP'", r"a.toml: 'rules' is no setting: expected one of .*rule_options"),
    "no KEY=VALUE": (
        "a.cfg",
        "RULE=BSP\nDEVICES",
        r"a.cfg: line 2: expected KEY=VALUE, or a .toml file, got 'DEVICES'",
    ),
    "no key": ("a.cfg", "COLOUR=red", r"a.cfg: 'COLOUR' is no setting: expected RULE, "),
    "a quotation mark": ("a.cfg", "RULE='BSP", r"a.cfg: line 1: a quotation mark is not closed"),
    "a way to exchange": (
        "a.cfg",
        "SYNC_TYPE=max",
        r"a.cfg: SYNC_TYPE: expected one of avg, cdd, swap, got 'max'",
    ),
    "a strategy": ("a.cfg", "EXCH_STRATEGY=pigeon", r"a.cfg: EXCH_STRATEGY: expected one of .* got 'pigeon'"),
}

#: Classes, and what `check` says.
CLASSES = {
    "NoMethods": r"NoMethods lacks:\n  method compile_iter_fns\(\): compiles its functions\n  method train_iter\(\): .*\n  method val_iter\(\): .*\n  method adjust_hyperp\(\): .*\n  method cleanup\(\)",
    "NoParams": r"NoParams lacks:\n  attribute params: expected a list of shared variables, got None",
    "StrangeParams": r"StrangeParams lacks:\n  attribute params\[1\]: expected a shared variable, got 3",
    "NoData": r"NoData lacks:\n  attribute data: expected an object with n_batch_train and n_batch_val, got None",
    "NoCount": r"NoCount lacks:\n  attribute data.n_batch_val: expected a number of batches, at least 0, got 'many'",
    "TwoArguments": r"TwoArguments fails when an instance is made: ContractError: TwoArguments\(\): expected a class that takes one config, got one that takes \['config', 'more'\]",
    "Raises": r"Raises fails when train_iter\(\) runs: KeyError: 'images'",
    "StrangeCall": r"the recorder has no 'celebrate': it answers .*train_error",
    "Silent": r"Silent: train_iter\(\) has not called recorder.train_error\(count, cost, error\).*\nSilent: train_iter\(\) changes none of params\nSilent: val_iter\(\) has not called recorder.val_error",
    "Diverges": r"Diverges: the cost is nan after 3 iterations",
    "NoEpochs": r"NoEpochs: it has no n_epochs: give --set epochs=N",
    "a_number": r"a_number fails when its module is imported: ContractError: modelclass: 'a_number' of launch_models.others: expected a class, got 3",
}  # fmt: skip
#: One of each kind is also run; and what shows on all ranks alone.
RUN = {
    "NoMethods": ({}, CLASSES["NoMethods"]),
    "StrangeParams": ({}, CLASSES["StrangeParams"]),
    "a_number": ({}, r"expected a class, got 3"),
    "Wider": ({}, r"params: of shapes \[\[5, 8\], .* on rank 0, and of \[\[5, 9\], .* on rank 1"),
    "Other": ({"scale_lr": "true"}, r"Other lacks:\n  method scale_lr\(size\), for scale_lr = true"),
    "NoEpochs": ({}, r"attribute n_epochs: expected a number of epochs, got None; or give --set epochs=N"),
}


@pytest.fixture
def places(tmp_path):
    (tmp_path / "broken.py").write_text("class MLP:\n    def\n")
    (tmp_path / "used" / "checkpoints" / "rows-of-mine").mkdir(parents=True)  # no checkpoint's name
    (tmp_path / "used" / "settings.json").write_text("{}")
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "checkpoints").touch()
    return {
        "broken_folder": tmp_path / "file",
        "broken": tmp_path / "broken.py",
        "used": tmp_path / "used",
        "new": tmp_path / "new",
    }


@pytest.mark.parametrize("name", SETTINGS)
def test_launch_refuses_wrong_settings(name, places, monkeypatch):
    given, words = SETTINGS[name]
    monkeypatch.chdir(SUPPORT)
    asked = {"folder": str(places["new"]), **MODEL, **given}
    asked = {
        key: value.format(**places) if isinstance(value, str) else value
        for key, value in asked.items()
        if value is not None
    }
    with pytest.raises(SettingsError, match=words):
        resolve([asked])
    assert not places["new"].exists()


def test_launch_refuses_unimportable_file_names(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v1.2").mkdir()
    for name in ("v1.2/my_net.py", "net.v2.py", "random.py", "numpy.py"):
        (tmp_path / name).write_text("class Net: pass\n")
    asked = {"modelclass": "Net", "devices": "cpu", "folder": "run"}
    for name, words in (
        ("net.v2.py", "net.v2.py: a module's name has no dot: rename the file"),
        ("random.py", "random.py: 'random' is a module that every run imports: rename the file"),
        ("numpy.py", "numpy.py: 'numpy' is a module that every run imports"),
    ):
        with pytest.raises(SettingsError, match=f"modelfile: .*{words}"):
            resolve([{**asked, "modelfile": name}])
    found = resolve([{**asked, "modelfile": "v1.2/my_net.py"}])
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert contract.load_class(found.root, found.modelfile, "Net").__module__ == "my_net"


def test_run_folder_that_cannot_be_made_is_named(tmp_path):
    settings = Settings("module", "Class", ".", ("cpu",), folder="/proc/no/folder")
    with pytest.raises(SettingsError, match="folder: /proc/no/folder can't be made or written: .*No such file"):
        prepare(settings, [])
    (tmp_path / "file").touch()
    for folder, words in (
        ("file", "File exists"),
        ("file/run", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("\0", "embedded null byte"),
    ):
        with pytest.raises(SettingsError, match=f"folder: .* can't be made or written: .*{words}"):
            prepare(dataclasses.replace(settings, folder=str(tmp_path / folder)), [])
    (tmp_path / "settings.json").mkdir()
    with pytest.raises(SettingsError, match="folder: .* can't be written: .*Is a directory"):
        prepare(dataclasses.replace(settings, folder=str(tmp_path)), [])


def test_run_folder_without_results_is_reused(monkeypatch, tmp_path):
    monkeypatch.chdir(SUPPORT)
    asked = [{**MODEL, "folder": str(tmp_path)}]
    settings = resolve(asked)
    with prepare(settings, []):
        with pytest.raises(SettingsError, match="has a run that hasn't ended"):
            prepare(settings, [])
    for name in ("failure.txt", "rank-0.log", "processes.json"):
        (tmp_path / name).touch()
    with prepare(resolve(asked), []):
        assert not (tmp_path / "failure.txt").exists()
    for name in ("rank-1.jsonl", "reports.jsonl", "params.npz"):
        (tmp_path / name).touch()
        with pytest.raises(SettingsError, match="folder: .* has a run already"):
            resolve(asked)
        (tmp_path / name).unlink()


def test_session_file_expands_tilde(monkeypatch, tmp_path):
    monkeypatch.chdir(SUPPORT)
    monkeypatch.setenv("HOME", str(tmp_path))
    stored = tmp_path / "old" / "checkpoints" / "rows-000000000001"
    stored.mkdir(parents=True)
    (stored / "meta.json").touch()
    pytest.importorskip("safetensors")
    found = resolve([{**MODEL, "folder": "~/new", "resume": "~/old/checkpoints/rows-000000000001"}])
    assert found.folder == str(tmp_path / "new") and found.resume == str(stored)


@pytest.mark.parametrize("name", FILES)
def test_launch_refuses_wrong_session_files(name, tmp_path):
    file, text, words = FILES[name]
    if text is not None:
        (tmp_path / file).write_text(text)
    with pytest.raises(SettingsError, match=words) as caught:
        read_session(tmp_path / file)
    assert text is None or str(caught.value).count(file) == 1  # where the file lacks, the system names it too


@pytest.mark.skipif(GPUS > 0, reason="is about machines without GPUs")
def test_command_line_errors(tmp_path):
    for arguments, words in (
        (["train", "--set", "epochs"], "synkhronos train: --set: expected KEY=VALUE, got 'epochs'"),
        (["train", "--set", "epoch=3"], "synkhronos train: --set: 'epoch' is no setting: expected one of "),
        (["train", "none.toml"], "synkhronos train: none.toml: expected a session file: "),
        (["train", "--ranks", "x"], "argument --ranks: invalid int value: 'x'"),
        (["check", "mlp.py"], "model: expected FILE:CLASS, got 'mlp.py'"),
    ):
        done = run(*arguments, status=2, cwd=tmp_path)
        assert words in done.stderr + done.stdout
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def checked():
    """Check all classes in one process: each would import the graph library by itself."""
    code = f"""
from synkhronos.launch.check import check
for name in {list(CLASSES)}:
    print("-- class", name)
    print("-- status", check(f"launch_models/others.py:{{name}}"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=SUPPORT, env=ENVIRONMENT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return dict(part.split("\n", 1) for part in done.stdout.split("-- class ")[1:])


@pytest.mark.parametrize("name", CLASSES)
def test_check_names_missing_parts_of_a_class(checked, name):
    assert re.search(CLASSES[name], checked[name]), checked[name]
    assert checked[name].endswith("-- status 1\n")


def test_check_of_classes():
    run("check", "launch_models/others.py:NoData", status=1, cwd=SUPPORT)
    run("check", "launch_models/others.py:NoEpochs", "--set", "epochs=2", cwd=SUPPORT)  # as it says itself
    said = run("check", "launch_models.mlp:MLP", cwd=SUPPORT).stdout
    assert re.search(r"^epoch 1, iteration 3, .*; [\d,]+ rows/s\n", said)
    assert said.endswith("MLP has all that a run asks for\n")


def test_check_counts_batches_without_a_batch_size(capsys):
    for rows, unit in ((1, "batches"), (20, "rows")):
        recorder = ClassRecorder(0, rows=rows)
        recorder.train_error(1, 0.5, 0.1)
        recorder.stepped()
        recorder.write()
        assert capsys.readouterr().out.endswith(f" {unit}/s\n")


@pytest.mark.parametrize("name", RUN)
@pytest.mark.slow
def test_launch_names_missing_parts_of_a_class(name, tmp_path):
    settings, words = RUN[name]
    done = train(tmp_path, name, status=1, **settings)
    assert re.search(words, done.stderr), done.stderr


def test_init_refuses_wrong_settings(monkeypatch, tmp_path):
    monkeypatch.chdir(SUPPORT)
    rule = rules.EASGD()
    with pytest.raises(RuntimeError, match=r"wait\(\): expected a call of init\(\) before it"):
        rule.wait()
    with pytest.raises(SettingsError, match="modelclass: .* has no 'Nobody'"):
        rule.init(devices=["cpu"], modelfile="launch_models.mlp", modelclass="Nobody", folder=str(tmp_path / "run"))
    with pytest.raises(SettingsError, match=r"period: a rule that is started with init\(\) takes numbers and words"):
        rules.EASGD(period=lambda step: 3).init(["cpu"], "launch_models.mlp", "MLP", folder=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_init_takes_defaults_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.chdir(SUPPORT)
    monkeypatch.setenv("SYNKHRONOS_MODEL", "launch_models/mlp.py:Nobody")
    with pytest.raises(SettingsError, match="modelclass: .*mlp.py has no 'Nobody'"):
        rules.BSP().init(["cpu"], folder=str(tmp_path / "run"))


# -- what comes before what ----------------------------------------------------------------------------------


def test_command_line_precedes_environment_and_file(tmp_path, monkeypatch):
    monkeypatch.chdir(SUPPORT)
    (tmp_path / "session.toml").write_text(
        textwrap.dedent("""
        rule = "EASGD"
        model = "launch_models/others.py:Other"
        devices = ["cpu", "cpu", "cpu"]
        epochs = 7
        seed = 5
        [rule_options]
        period = 4
        beta = 0.5
        [config]
        depth = 3
        """)
    )
    file = read_session(tmp_path / "session.toml")
    environment = read_environment(
        {"SYNKHRONOS_EPOCHS": "8", "SYNKHRONOS_SEED": "6", "SYNKHRONOS_THEANO": "pytensor", "HOME": "x"}
    )
    assert environment == {"epochs": 8, "seed": 6}
    given = [parse_set("epochs=9"), parse_set("rule_options.period=2"), parse_set("config.name=a b")]
    found = resolve([*given, environment, file])
    assert (found.epochs, found.seed, found.modelclass, found.devices) == (9, 6, "Other", ("cpu",) * 3)
    assert found.rule_options == {"period": 2, "beta": 0.5} and found.config == {"depth": 3, "name": "a b"}
    assert vars(found.make_rule())["period"] == 2
    assert resolve([{"ranks": 2}, file]).devices == ("cpu", "cpu")
    assert resolve([{"devices": "cpu"}, {"ranks": 4}, file]).devices == ("cpu",)
    assert resolve([{"modelfile": "launch_models.mlp", "modelclass": "MLP"}, file]).modelclass == "MLP"
    with pytest.raises(SettingsError, match="modelclass: .*mlp.py has no 'Other'"):  # the file's class stays
        resolve([{"modelfile": "launch_models.mlp"}, file])


def test_command_line_order_does_not_matter():
    for words in (
        ["--set=ranks=2", "--devices=cpu"],
        ["--set=devices=cpu", "--ranks=2"],
        ["--set=ranks=2", "--set=devices=cpu"],
        ["--set=devices=cpu", "--set=ranks=2"],
    ):
        said = run("train", "--set=model=launch_models/mlp.py:MLP", "--dry-run", *words, cwd=SUPPORT).stdout
        assert json.loads(said)["devices"] == ["cpu", "cpu"], words


def test_theano_mpi_session_files_are_read(tmp_path):
    (tmp_path / "session.cfg").write_text(
        "# a comment\nRULE=EASGD\nMODELFILE = 'models.mlp'\nMODELCLASS=MLP # this one\n\nDEVICES=cuda0,cuda1\nBIND=true\n"
    )
    assert read_session(tmp_path / "session.cfg") == {
        "rule": "EASGD", "modelfile": "models.mlp", "modelclass": "MLP", "devices": "cuda0,cuda1", "bind": "true",
    }  # fmt: skip
    (tmp_path / "session.cfg").write_text("RULE=BSP\nSYNC_TYPE=swap\nEXCH_STRATEGY=ar\n")
    assert read_session(tmp_path / "session.cfg") == {"rule": "Swap"}
    (tmp_path / "session.cfg").write_text("SYNC_TYPE=cdd\nRULE=BSP\nEXCH_STRATEGY=nccl16\n")
    assert read_session(tmp_path / "session.cfg") == {
        "rule": "BSP",
        "rule_options": {"average": "gradient", "precision": "float16"},
    }


def test_device_names_of_gpus(monkeypatch):
    monkeypatch.setattr("synkhronos.launch.settings.get_n_gpu", lambda: 4)
    monkeypatch.chdir(SUPPORT)
    model = {"model": "launch_models/mlp.py:MLP"}
    assert resolve([model]).devices == ("cuda0", "cuda1", "cuda2", "cuda3")
    assert resolve([model, {"ranks": 2}]).devices == ("cuda0", "cuda1")
    assert resolve([model, {"devices": "gpu2, cuda0"}]).devices == ("cuda2", "cuda0")
    assert resolve([model, {"devices": ["cpu"], "ranks": 2}]).devices == ("cpu", "cpu")
    for given, words in (
        ({"devices": "gpu1,cuda1"}, "devices: expected each GPU once, got gpu1, cuda1"),
        ({"devices": "cuda4"}, "cuda4 is not there: this machine shows cuda0 to cuda3"),
        ({"ranks": 5}, "ranks: expected at most 4, one for each GPU, got 5; or devices = 'cpu'"),
    ):
        with pytest.raises(SettingsError, match=words):
            resolve([model, given])


def test_checkpoint_requirements_are_checked_at_start(monkeypatch):
    monkeypatch.chdir(SUPPORT)
    monkeypatch.setattr("synkhronos.launch.settings.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"checkpoint: needs safetensors: pip install 'synkhronos\[training\]'"):
        resolve([{**MODEL, "checkpoint": 2}])
    with pytest.raises(SettingsError, match="resume: needs safetensors"):
        resolve([{**MODEL, "resume": "latest"}])


# -- doctor --------------------------------------------------------------------------------------------------


def test_doctor_describes_the_machine():
    from synkhronos.launch import doctor

    text = doctor.report()
    assert re.search(r"^cores +\d+ for this process, \d+ in all$", text, re.MULTILINE)
    assert re.search(rf"^GPUs +{GPUS}$", text, re.MULTILINE)
    assert re.search(r"^(pytensor|Theano) +\d", text, re.MULTILINE)
    # The two need different versions of NumPy: who has one must not be told to install the other.
    assert "synkhronos[theano]" not in text and "synkhronos[pytensor]" not in text


def test_doctor_names_the_first_step(monkeypatch):
    from synkhronos.launch import doctor

    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "get_n_gpu", lambda: 0)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 64 << 20}))
    first, optional = doctor.report().split("\nDo first\n")[1].split("\nOptional\n")
    assert first.splitlines() == [
        "  1. install a graph library; without one nothing runs: pip install 'synkhronos[pytensor]'",
        "  2. enlarge /dev/shm, which holds the data and has 64 MiB: mount -o remount,size=8G /dev/shm, "
        "or docker run --shm-size=8g",
    ]
    for line in (
        "  PyTensor's JAX mode: pip install 'synkhronos[jax]'",
        "  checkpoints, and train --resume: pip install 'synkhronos[training]'",
        "  ranks on several hosts: pip install 'synkhronos[hosts]'",
        "  PyTensor's C mode: apt-get install g++",
    ):
        assert line in optional.splitlines()


@pytest.mark.parametrize(
    ("library", "ready", "absent"),
    [
        ("pytensor", "PyTensor's functions run on the cores; synkhronos.fork() starts ", "Theano"),
        ("theano", "Theano's functions run on", "JAX"),
    ],
)
def test_doctor_says_that_ranks_can_run(monkeypatch, library, ready, absent):
    from synkhronos.launch import doctor

    monkeypatch.setattr(doctor, "find_spec", lambda name: name if name == library else None)
    monkeypatch.setattr(doctor, "get_n_gpu", lambda: 0)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 8 << 30}))
    found, optional = doctor.report().split("\nOptional\n")
    assert "Do first" not in found and f"\nReady: {ready}" in found and absent not in optional


def test_doctor_puts_gpus_that_cannot_be_used_first(monkeypatch):
    from synkhronos.devices import JAX
    from synkhronos.launch import doctor

    monkeypatch.setattr(doctor, "find_spec", lambda name: name if name == "pytensor" else None)
    monkeypatch.setattr(doctor, "get_n_gpu", lambda: 2)
    monkeypatch.setattr(JAX, "missing_requirements", lambda: ["jax", "nccl4py"])
    monkeypatch.setattr(doctor, "_describe_gpus", lambda count: ["  cuda0: a card", "  cuda1: a card"])
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 8 << 30}))
    text = doctor.report()
    assert "  1. make the GPUs usable, which needs jax, nccl4py: pip install 'synkhronos[gpu]'\n" in text
    assert text.index("cuda1: a card") < text.index("Do first")


def test_options_are_checked_with_their_rule(tmp_path, monkeypatch):
    monkeypatch.chdir(SUPPORT)
    file = {**MODEL, "folder": str(tmp_path), "rule": "EASGD", "rule_options": {"period": 10, "beta": 0.5}}
    for sets, options in (
        (["rule=BSP"], {}),
        (["rule=LocalSGD", "rule_options.period=3"], {"period": 3}),
        (["rule_options.period=3", "rule=LocalSGD"], {"period": 3}),
        (["rule=easgd"], {"period": 10, "beta": 0.5}),
        (["rule_options.period=3"], {"period": 3, "beta": 0.5}),
    ):
        assert resolve([join_tables(map(parse_set, sets)), file]).rule_options == options
    without = {**MODEL, "folder": str(tmp_path), "rule_options": {"period": 4}}
    assert resolve([parse_set("rule=LocalSGD"), without]).rule_options == {"period": 4}
