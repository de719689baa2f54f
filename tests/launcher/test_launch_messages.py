"""Messages of `check` and of the launcher name the wrong setting or class.

Each entry has a command line, its exit status, and a part of its message.
"""

import dataclasses
import datetime
import json
import locale
import re
import sys
import textwrap

import pytest
from launch_runs import run, run_cases, train
from messages import raises
from paths import SUPPORT

from synkhronos import exchange_rules
from synkhronos.gpus import get_n_gpu
from synkhronos.launcher import SettingsError, background_run, doctor, start_run
from synkhronos.launcher.configuration.resolve import resolve_settings
from synkhronos.launcher.configuration.settings import Settings, merge_tables
from synkhronos.launcher.configuration.sources import (
    merge_sources,
    parse_set_option,
    read_environment,
    read_session_file,
)
from synkhronos.launcher.model_class.model_interface import ModelInterfaceError, import_model_class
from synkhronos.launcher.model_class.model_recorder import ModelRecorder
from synkhronos.launcher.supervision.run_folder import create_and_lock_run_folder

pytestmark = pytest.mark.starts_programs

MODEL = {"model": "launch_models/mlp.py:MLP", "devices": "cpu"}
GPUS = get_n_gpu()

#: Wrong settings, and the name in the message; no process is started.
SETTINGS = {
    "no model": ({"model": None, "devices": "cpu"}, "modelfile"),
    "model, too long": ({"model": "x" * 300 + ".py:MLP"}, "modelfile"),
    "no class": ({"model": None, "modelfile": "launch_models.mlp"}, "modelclass"),
    "no colon": ({"model": "mlp.py"}, "model"),
    "no such file": ({"model": "launch_models/none.py:MLP"}, "modelfile"),
    "no such module": ({"model": "launch_models.none:MLP"}, "modelfile"),
    "no such class": ({"model": "launch_models/mlp_variants.py:Nobody"}, "modelclass"),
    "no Python": ({"model": "{broken}:MLP"}, "modelfile"),
    "devices, a number": ({"devices": 2}, "devices"),
    "devices, none": ({"devices": []}, "devices"),
    "devices, a word": ({"devices": "tpu0"}, "devices"),
    "devices, mixed": ({"devices": "cpu,cuda0"}, "devices"),
    "devices, another host": ({"devices": "node2:cuda0"}, "devices"),
    "devices, GPUs on hosts": ({"devices": "cuda0", "hosts": "a,b"}, "devices"),
    "devices and hosts": ({"devices": "cpu,cpu", "hosts": ["a:3", "b"]}, "ranks"),
    "hosts, a number": ({"hosts": 2}, "hosts"),
    "hosts, none of them": ({"hosts": ["a", "b:no"]}, "hosts"),
    "hosts, twice": ({"hosts": "a,a"}, "hosts"),
    "hosts, no allocation": ({"hosts": "all"}, "hosts"),
    "devices, not there": ({"devices": "cuda99"}, "devices"),
    "ranks and devices": ({"devices": "cpu,cpu", "ranks": 3}, "ranks"),
    "ranks, none": ({"ranks": 0}, "ranks"),
    "ranks, too many": ({"ranks": 10**30}, "ranks"),
    "pythonpath, a number": ({"pythonpath": 3}, "pythonpath"),
    "ranks, a word": ({"ranks": "all"}, "ranks"),
    "a rule": ({"rule": "SSP"}, "rule"),
    "a rule, a number": ({"rule": 3}, "rule"),
    "EAMSGD": ({"rule": "EAMSGD"}, "rule"),
    "an average": ({"rule_options": {"average": "velocity"}}, "rule_options"),
    "timeline": ({"timeline": "late"}, "timeline"),
    "warmup": ({"warmup": "late"}, "warmup"),
    "an option": ({"rule": "EASGD", "rule_options": {"tau": 3}}, "rule_options"),
    "an option's value": ({"rule": "EASGD", "rule_options": {"beta": 2}}, "rule_options"),
    "an option, yes or no": ({"rule": "EASGD", "rule_options": {"asynchronous": "False"}}, "rule_options"),
    "an option without end": ({"rule": "SlowMo", "rule_options": {"lr": float("inf")}}, "rule_options"),
    "options, no table": ({"rule_options": "period"}, "rule_options"),
    "config, a date": ({"config": {"days": [datetime.date(2024, 1, 1)]}}, "config"),
    "config, no table": ({"config": [1]}, "config"),
    "config, a number for a name": ({"config": {"layers": [{1: 2}]}}, "config"),
    "epochs": ({"epochs": 0}, "epochs"),
    "config, given by the run": ({"config": {"rank": 0}}, "config"),
    "config, the name": ({"config": {"mname": "MLP"}}, "config"),
    "config, another setting": ({"config": {"seed": 3}}, "config"),
    "seed": ({"seed": "x"}, "seed"),
    "seed, large": ({"seed": 2**32}, "seed"),
    "grace": ({"grace": -1}, "grace"),
    "grace, without end": ({"grace": float("inf")}, "grace"),
    "devices, many": ({"devices": ["cpu"] * 2000}, "devices"),
    "every": ({"every": 0}, "every"),
    "checkpoint": ({"checkpoint": -1}, "checkpoint"),
    "restarts": ({"restarts": -1}, "restarts"),
    "restarts alone": ({"restarts": 1}, "restarts"),
    "on_death": ({"on_death": "go on"}, "on_death"),
    "on_death, a flag": ({"on_death": True}, "on_death"),
    "max_deaths": ({"max_deaths": 0}, "max_deaths"),
    "max_deaths, a text": ({"max_deaths": "x"}, "max_deaths"),
    "patience": ({"patience": 0}, "patience"),
    "keep_best, a name": ({"keep_best": "accuracy"}, "keep_best"),
    "keep_best": ({"keep_best": ["error", "least"]}, "keep_best"),
    "keep": ({"keep": 0}, "keep"),
    "bind": ({"bind": "perhaps"}, "bind"),
    "scale_lr": ({"scale_lr": 7}, "scale_lr"),
    "folder, too long": ({"folder": "x" * 300}, "folder"),
    "folder, used": ({"folder": "{used}"}, "folder"),
    "resume, nothing": ({"folder": "{used}", "resume": "latest"}, "resume"),
    "resume, elsewhere": ({"resume": "nowhere"}, "resume"),
    "resume, too long": ({"resume": "x" * 300}, "resume"),
}  # fmt: skip

#: Wrong session files: file names and contents.
FILES = {
    "not there": ("none.toml", None),
    "no TOML": ("a.toml", "rule = "),
    "no JSON": ("a.json", "{"),
    "no settings": ("a.json", "3"),
    "no setting": ("a.toml", "rules = 'BSP'"),
    "no KEY=VALUE": ("a.cfg", "RULE=BSP\nDEVICES"),
    "no key": ("a.cfg", "COLOUR=red"),
}

#: Classes that miss a part, and the message of `check`.
CLASSES_TO_CHECK = {
    "NoMethods": r"NoMethods: missing or invalid:\n  method compile_iter_fns\(\): compiles its functions\n  method train_iter\(\): .*\n  method val_iter\(\): .*\n  method adjust_hyperp\(\): .*\n  method cleanup\(\)",
    "NoParams": r"NoParams: missing or invalid:\n  attribute params: expected a list of shared variables, got None",
    "NonVariableParams": r"NonVariableParams: missing or invalid:\n  attribute params\[1\]: expected a shared variable, got 3",
    "WithoutData": r"WithoutData: missing or invalid:\n  attribute data: expected an object with n_batch_train and n_batch_val, got None",
    "InvalidBatchCount": r"InvalidBatchCount: missing or invalid:\n  attribute data.n_batch_val: expected a number of batches, at least 0, got 'many'",
    "WithTwoArguments": r"WithTwoArguments fails when an instance is made: TypeError: .* missing 1 required positional argument: 'more'",
    "RaisingMLP": r"mlp_variants.py: RaisingMLP fails when train_iter\(\) runs: KeyError: 'images' \(line \d+, in train_iter\(\)\)\n-- status",
    "UnknownRecorderCall": "'ModelRecorder' object has no attribute 'celebrate'",
    "SilentMLP": r"SilentMLP: train_iter\(\) has not called recorder.train_error\(count, cost, error\).*\n.*SilentMLP: train_iter\(\) changes none of params\n.*SilentMLP: val_iter\(\) has not called recorder.val_error",
    "DivergingMLP": r"DivergingMLP: the cost is nan after 3 iterations",
    "NoEpochs": r"attribute n_epochs: expected a number of epochs, got None; or give --set epochs=N",
    "not_a_class": r"modelclass: 'not_a_class' of launch_models.mlp_variants: expected a class, got 3",
}  # fmt: skip
#: Classes that are run, as their errors occur only on several ranks or with a setting.
CLASSES_TO_RUN = {
    "UnequalShapesMLP": ({}, r"params: of shapes \[\[5, 8\], .* on rank 0, and of \[\[5, 9\], .* on rank 1"),
    "RenamedMLP": ({"scale_lr": "true"}, r"RenamedMLP lacks:\n  method scale_lr\(size\), for scale_lr = true"),
    "RefusingMLP": ({"config.colour": "red"}, "^rank [01]: config: RefusingMLP has no 'colour'\n$"),
}


@pytest.fixture
def paths(tmp_path):
    """Make files and folders that a run cannot use; return their paths by name."""
    (tmp_path / "broken.py").write_text("class MLP:\n    def\n")
    (tmp_path / "used" / "checkpoints" / "rows-of-mine").mkdir(parents=True)  # no checkpoint's name
    (tmp_path / "used" / "settings.json").write_text("{}")
    return {
        "broken": tmp_path / "broken.py",
        "used": tmp_path / "used",
        "new": tmp_path / "new",
    }


@pytest.mark.parametrize("name", SETTINGS)
def test_launch_refuses_wrong_settings(name, paths, monkeypatch):
    wrong_settings, fault = SETTINGS[name]
    monkeypatch.chdir(SUPPORT)
    settings = {"folder": str(paths["new"]), **MODEL, **wrong_settings}
    settings = {
        key: value.format(**paths) if isinstance(value, str) else value
        for key, value in settings.items()
        if value is not None
    }
    with raises(SettingsError, fault):
        resolve_settings([settings])
    assert not paths["new"].exists()


def test_launch_refuses_unimportable_file_names(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v1.2").mkdir()
    for name in ("v1.2/my_net.py", "net.v2.py", "random.py", "numpy.py"):
        (tmp_path / name).write_text("class Net: pass\n")
    settings = {"modelclass": "Net", "devices": "cpu", "folder": "run"}
    for name in ("net.v2.py", "random.py", "numpy.py"):
        with raises(SettingsError, "modelfile", name):
            resolve_settings([{**settings, "modelfile": name}])
    resolved = resolve_settings([{**settings, "modelfile": "v1.2/my_net.py"}])
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert import_model_class(resolved.pythonpath, resolved.modelfile, "Net").__module__ == "my_net"


def test_model_files_name_the_extra_of_lasagne_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "lasagne", None)
    for package in ("lasagne", "no_such_package"):
        (tmp_path / f"net_of_{package}.py").write_text(f"import {package}\n")
    with pytest.raises(
        ModelInterfaceError, match=r"^net_of_lasagne needs lasagne: pip install 'synkhronos\[lasagne\]'$"
    ):
        import_model_class(str(tmp_path), "net_of_lasagne", "Net")
    with pytest.raises(ModuleNotFoundError, match="^No module named 'no_such_package'$"):
        import_model_class(str(tmp_path), "net_of_no_such_package", "Net")


def test_run_folder_that_cannot_be_made_is_named(tmp_path):
    settings = Settings("module", "Class", ".", ("cpu",), folder="/proc/no/folder")
    with pytest.raises(SettingsError, match="folder: /proc/no/folder can't be made or written: .*No such file"):
        create_and_lock_run_folder(settings, [])
    (tmp_path / "file").touch()
    for folder, words in (
        ("file", "File exists"),
        ("file/run", "Not a directory"),
        ("x" * 300, "File name too long"),
    ):
        with pytest.raises(SettingsError, match=f"folder: .* can't be made or written: .*{words}"):
            create_and_lock_run_folder(dataclasses.replace(settings, folder=str(tmp_path / folder)), [])
    (tmp_path / "settings.json").mkdir()
    with pytest.raises(SettingsError, match="folder: .* can't be written: .*Is a directory"):
        create_and_lock_run_folder(dataclasses.replace(settings, folder=str(tmp_path)), [])


def test_run_folder_without_results_is_reused(monkeypatch, tmp_path):
    monkeypatch.chdir(SUPPORT)
    sources = [{**MODEL, "folder": str(tmp_path)}]
    settings = resolve_settings(sources)
    with create_and_lock_run_folder(settings, []):
        with raises(SettingsError, "folder"):
            create_and_lock_run_folder(settings, [])
    for name in ("failure.txt", "rank-0.log", "processes.json"):
        (tmp_path / name).touch()
    with create_and_lock_run_folder(resolve_settings(sources), []):
        assert not (tmp_path / "failure.txt").exists()
    for name in ("rank-1.jsonl", "reports.jsonl", "params.npz"):
        (tmp_path / name).touch()
        with raises(SettingsError, "folder"):
            resolve_settings(sources)
        (tmp_path / name).unlink()


def test_run_folder_of_another_run_than_the_resumed_one_is_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(SUPPORT)
    pytest.importorskip("safetensors")
    for name in ("a", "b"):
        (tmp_path / name / "checkpoints" / "rows-000000000001").mkdir(parents=True)
        (tmp_path / name / "checkpoints" / "rows-000000000001" / "meta.json").touch()
        (tmp_path / name / "settings.json").touch()
    resume = tmp_path / "a" / "checkpoints" / "rows-000000000001"
    with pytest.raises(SettingsError, match=f"folder: {tmp_path}/b has another run than {resume}: choose another"):
        resolve_settings([{**MODEL, "folder": f"{tmp_path}/b", "resume": str(resume)}])
    for folder in ("a", "new"):
        assert resolve_settings([{**MODEL, "folder": str(tmp_path / folder), "resume": str(resume)}]).resume


def test_session_file_expands_tilde(monkeypatch, tmp_path):
    monkeypatch.chdir(SUPPORT)
    monkeypatch.setenv("HOME", str(tmp_path))
    stored = tmp_path / "old" / "checkpoints" / "rows-000000000001"
    stored.mkdir(parents=True)
    (stored / "meta.json").touch()
    pytest.importorskip("safetensors")
    resolved = resolve_settings([{**MODEL, "folder": "~/new", "resume": "~/old/checkpoints/rows-000000000001"}])
    assert resolved.folder == str(tmp_path / "new") and resolved.resume == str(stored)


@pytest.mark.parametrize("name", FILES)
def test_launch_refuses_wrong_session_files(name, tmp_path):
    file, text = FILES[name]
    if text is not None:
        (tmp_path / file).write_text(text)
    with raises(SettingsError, file) as caught:
        read_session_file(tmp_path / file)
    assert text is None or str(caught.value).count(file) == 1  # the error of a missing file has its name already


@pytest.mark.skipif(GPUS > 0, reason="is about machines without GPUs")
def test_command_line_errors_are_one_line(tmp_path):
    for arguments, words in (
        (["train", "--set", "epochs"], "synkhronos train: --set: expected KEY=VALUE, got 'epochs'"),
        (
            ["train", "--set", "epoch=3"],
            "synkhronos train: --set: 'epoch' is not a setting; similar: epochs; for an argument",
        ),
        (["train", "none.toml"], "synkhronos train: none.toml: expected a session file: "),
        (["train", "--ranks", "x"], "argument --ranks: invalid int value: 'x'"),
        (["check", "mlp.py"], "model: expected FILE:CLASS, got 'mlp.py'"),
    ):
        done = run(*arguments, status=2, cwd=tmp_path)
        assert words in done.stderr + done.stdout
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def checked():
    """Check all classes in one process, so that the graph library is imported once; give the outputs by name."""
    code = f"""
from synkhronos.launcher.check_model import check_class
for name in {list(CLASSES_TO_CHECK)}:
    print("-- case", name)
    print("-- status", check_class(f"launch_models/mlp_variants.py:{{name}}"))
"""
    return run_cases(code)


@pytest.mark.parametrize("name", CLASSES_TO_CHECK)
def test_check_names_missing_parts_of_a_class(checked, name):
    assert re.search(CLASSES_TO_CHECK[name], checked[name]), checked[name]
    assert checked[name].endswith("-- status 1\n")


def test_check_runs_classes_on_one_rank_and_on_two():
    run("check", "launch_models/mlp_variants.py:WithoutData", status=1, cwd=SUPPORT)
    run(
        "check", "launch_models/mlp_variants.py:NoEpochs", "--set", "epochs=2", cwd=SUPPORT
    )  # as the message of the check advises
    output = run("check", "launch_models.mlp:MLP", cwd=SUPPORT).stdout
    assert re.search(r"^epoch 1, iteration 3, .*; [\d,]+ rows/s\n", output)
    assert output.endswith("MLP: no problem found, on one rank and on two\n")


def test_recorder_counts_batches_without_a_batch_size(capsys):
    for rows, unit in ((1, "batches"), (20, "rows")):
        recorder = ModelRecorder(0, rows_per_step=rows)
        recorder.train_error(1, 0.5, 0.1)
        recorder.count_iteration()
        recorder.write_line()
        assert capsys.readouterr().out.endswith(f" {unit}/s\n")


@pytest.mark.parametrize("name", CLASSES_TO_RUN)
@pytest.mark.slow
def test_launch_names_missing_parts_of_a_class(name, tmp_path):
    settings, words = CLASSES_TO_RUN[name]
    done = train(tmp_path, name, status=1, **settings)
    assert re.search(words, done.stderr) and "Traceback" not in done.stderr, done.stderr


def test_start_run_refuses_wrong_settings(monkeypatch, tmp_path):
    monkeypatch.chdir(SUPPORT)
    model = {"devices": ["cpu"], "modelfile": "launch_models.mlp", "modelclass": "MLP"}
    folder = str(tmp_path / "run")
    with raises(SettingsError, "modelclass"):
        start_run(exchange_rules.EASGD(), **{**model, "modelclass": "Nobody"}, folder=folder)
    with raises(SettingsError, "period"):
        start_run(exchange_rules.EASGD(period=lambda step: 3), **model, folder=folder)
    with raises(SettingsError, "on_deth"):
        start_run(exchange_rules.EASGD(), **model, folder=folder, on_deth="stop")
    assert not (tmp_path / "run").exists()


def test_start_run_takes_defaults_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.chdir(SUPPORT)
    monkeypatch.setenv("SYNKHRONOS_MODEL", "launch_models/mlp.py:Nobody")
    with raises(SettingsError, "modelclass"):
        start_run(exchange_rules.BSP(), ["cpu"], folder=str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (exchange_rules.BSP(), {}),  # the model class decides what ranks exchange
        (exchange_rules.BSP("gradient"), {"average": "gradient"}),
        (exchange_rules.LocalSGD(10), {"period": 10, "state": "keep"}),
    ],
    ids=repr,
)
def test_start_run_passes_the_options_of_its_rule(monkeypatch, rule, options):
    monkeypatch.setenv("SYNKHRONOS_RULE", "LocalSGD")
    monkeypatch.setenv("SYNKHRONOS_RULE_OPTIONS", "{period = 5}")
    merged = []

    def merge_and_stop(sources, source_path):
        merged.append(merge_sources(sources))
        raise SettingsError

    monkeypatch.setattr(background_run, "resolve_settings", merge_and_stop)
    with pytest.raises(SettingsError):
        start_run(rule)
    assert merged[0].get("rule_options", {}) == options


@pytest.mark.parametrize("text", ["2024", "2026-11-27", "true", "1e3"])
def test_texts_like_numbers_and_dates_are_texts_where_expected(text):
    assert parse_set_option(f"folder={text}") == {"folder": text}
    assert read_environment({"SYNKHRONOS_RESUME": text}) == {"resume": text}


def test_values_in_quotation_marks_and_dates_are_texts():
    assert parse_set_option("folder='a b'") == {"folder": "a b"}
    assert parse_set_option("config.day=2026-11-27") == {"config": {"day": "2026-11-27"}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("False", False),
        ("None", None),
        (" .5 ", 0.5),
        ("-1.", -1.0),
        ("[True, .5]", [True, 0.5]),
        ("a b", "a b"),
        ("007", "007"),
        ("(1, 2)", "(1, 2)"),
        ("1,2", "1,2"),
        (r"'\d+'x", r"'\d+'x"),
        ("1#2", "1#2"),
        (".5 # a half", ".5 # a half"),
        ("'#'", "#"),
        ("1\ny = 2", "1\ny = 2"),
        ("[1,\n2]", [1, 2]),
    ],
)
def test_values_may_have_python_spelling(text, value, recwarn):
    parsed = parse_set_option(f"config.x={text}")["config"]["x"]
    assert parsed == value and type(parsed) is type(value) and not recwarn.list


# -- precedence of settings ----------------------------------------------------------------------------------


def test_command_line_precedes_environment_and_file(tmp_path, monkeypatch):
    monkeypatch.chdir(SUPPORT)
    (tmp_path / "session.toml").write_text(
        textwrap.dedent("""
        rule = "EASGD"
        model = "launch_models/mlp_variants.py:RenamedMLP"
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
    file = read_session_file(tmp_path / "session.toml")
    environment = read_environment(
        {"SYNKHRONOS_EPOCHS": "8", "SYNKHRONOS_SEED": "6", "SYNKHRONOS_THEANO": "pytensor", "HOME": "x"}
    )
    assert environment == {"epochs": 8, "seed": 6}
    others = "DEVICE", "NCCL_CALLS", "PLATOON", "PLATOON_HOSTS", "MESSAGES", "TEST", "TEST_DEVICE", "TEST_HOSTS"
    assert not read_environment({f"SYNKHRONOS_{name}": "x" for name in (*others, "TEST_RANKS")})
    for name, setting in (("EPOCH", "epochs"), ("DEVICS", "devices"), ("CHECKPOINTS", "checkpoint")):
        with raises(SettingsError, f"SYNKHRONOS_{name} is not a setting; similar: {setting}"):
            read_environment({f"SYNKHRONOS_{name}": "3"})
    command_line = [
        parse_set_option("epochs=9"),
        parse_set_option("rule_options.period=2"),
        parse_set_option("config.name=a b"),
    ]
    resolved = resolve_settings([file, environment, *command_line])
    assert (resolved.epochs, resolved.seed, resolved.modelclass, resolved.devices) == (9, 6, "RenamedMLP", ("cpu",) * 3)
    assert resolved.rule_options == {"period": 2, "beta": 0.5} and resolved.config == {"depth": 3, "name": "a b"}
    assert vars(resolved.make_exchange_rule())["period"] == 2
    assert resolve_settings([file, {"ranks": 2}]).devices == ("cpu", "cpu")
    assert resolve_settings([file, {"ranks": 4}, {"devices": "cpu"}]).devices == ("cpu",)
    assert resolve_settings([file, {"modelfile": "launch_models.mlp", "modelclass": "MLP"}]).modelclass == "MLP"
    with raises(SettingsError, "modelclass"):  # the file's class stays
        resolve_settings([file, {"modelfile": "launch_models.mlp"}])


def test_set_option_with_a_quoted_key_is_refused():
    with pytest.raises(SettingsError, match="--set: expected a key without quotation marks, got "):
        parse_set_option('config."a.b"=1')


def test_set_options_of_nested_tables_are_merged():
    file = {**MODEL, "config": {"optimizer": {"lr": 1.0, "momentum": 0.9}, "depth": 3}}
    merged = merge_tables([file, parse_set_option("config.optimizer.lr=0.1"), parse_set_option("config.a.b = c")])
    assert merged["config"] == {"optimizer": {"lr": 0.1, "momentum": 0.9}, "depth": 3, "a": {"b": "c"}}
    with raises(SettingsError, "--set"):
        parse_set_option("config..lr=0.1")


def test_command_line_order_does_not_matter():
    for words in (
        ["--set=ranks=2", "--devices=cpu"],
        ["--set=devices=cpu", "--ranks=2"],
        ["--set=ranks=2", "--set=devices=cpu"],
        ["--set=devices=cpu", "--set=ranks=2"],
    ):
        output = run("train", "--set=model=launch_models/mlp.py:MLP", "--dry-run", *words, cwd=SUPPORT).stdout
        assert json.loads(output)["devices"] == ["cpu", "cpu"], words


@pytest.mark.parametrize(("name", "key"), [("session.toml", "rule"), ("session.cfg", "RULE")])
def test_session_files_are_utf_8_in_any_locale(tmp_path, name, key):
    """A byte order mark, as editors on Windows write it, is not part of the first name."""
    (tmp_path / name).write_text(f'{key}="\u00fc"\r\n', "utf-8-sig")
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    try:
        assert read_session_file(tmp_path / name) == {"rule": "\xfc"}
    finally:
        locale.setlocale(locale.LC_CTYPE, before)


def test_device_names_of_gpus(monkeypatch):
    monkeypatch.setattr("synkhronos.launcher.configuration.placement.get_n_gpu", lambda: 4)
    monkeypatch.chdir(SUPPORT)
    model = {"model": "launch_models/mlp.py:MLP"}
    assert resolve_settings([model]).devices == ("cuda0", "cuda1", "cuda2", "cuda3")
    assert resolve_settings([model, {"ranks": 2}]).devices == ("cuda0", "cuda1")
    assert resolve_settings([model, {"devices": "gpu2, cuda0"}]).devices == ("cuda2", "cuda0")
    assert resolve_settings([model, {"devices": ["cpu"], "ranks": 2}]).devices == ("cpu", "cpu")
    for devices, words in (
        ({"devices": "gpu1,cuda1"}, "devices: expected each GPU once, got gpu1, cuda1"),
        ({"devices": "cuda4"}, "cuda4 is not available: this machine has cuda0 to cuda3"),
        ({"ranks": 5}, "ranks: expected at most 4, one for each GPU, got 5; or devices = 'cpu'"),
    ):
        with pytest.raises(SettingsError, match=words):
            resolve_settings([model, devices])


def test_checkpoint_requirements_are_checked_at_start(monkeypatch):
    monkeypatch.chdir(SUPPORT)
    monkeypatch.setattr("synkhronos.launcher.configuration.resolve.find_spec", lambda name: None)
    with raises(SettingsError, "checkpoint"):
        resolve_settings([{**MODEL, "checkpoint": 2}])
    with raises(SettingsError, "resume"):
        resolve_settings([{**MODEL, "resume": "latest"}])


# -- doctor --------------------------------------------------------------------------------------------------


def test_doctor_describes_the_machine():
    text = doctor.describe_machine()
    assert re.search(r"^cores +\d+ for this process, \d+ in all$", text, re.MULTILINE)
    assert re.search(rf"^GPUs +{GPUS or 'none'}$", text, re.MULTILINE)
    assert re.search(r"^(pytensor|Theano) +\d", text, re.MULTILINE)
    # The libraries need different versions of NumPy, so users of one must not be told to install the other.
    assert "synkhronos[theano]" not in text and "synkhronos[pytensor]" not in text


def test_doctor_names_the_first_step(monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "get_n_gpu", lambda: 0)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    first, optional = doctor.describe_machine().split("\nDo first\n")[1].split("\nOptional\n")
    assert first.splitlines() == [
        "  1. install a graph library; without one nothing runs: pip install 'synkhronos[pytensor]'",
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
    monkeypatch.setattr(doctor, "find_spec", lambda name: name if name == library else None)
    monkeypatch.setattr(doctor, "get_n_gpu", lambda: 0)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 8 << 30}))
    required, optional = doctor.describe_machine().split("\nOptional\n")
    assert "Do first" not in required and f"\nReady: {ready}" in required and absent not in optional


def test_doctor_says_that_gpus_without_their_packages_are_not_used(monkeypatch):
    from synkhronos.devices import JAX

    monkeypatch.setattr(doctor, "find_spec", lambda name: name if name == "pytensor" else None)
    monkeypatch.setattr(doctor, "get_n_gpu", lambda: 2)
    monkeypatch.setattr(JAX, "list_missing_requirements", lambda: ["jax", "nccl4py"])
    monkeypatch.setattr(doctor, "_describe_gpus", lambda count: ["  cuda0: a card", "  cuda1: a card"])
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 8 << 30}))
    text = doctor.describe_machine()
    facts, optional = text.split("\nOptional\n")
    assert "cuda1: a card\n\nReady: PyTensor's functions run on the cores; synkhronos.fork() starts " in facts
    assert optional.startswith("  ranks on GPUs, which need jax, nccl4py: pip install 'synkhronos[gpu]'\n")


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
        assert resolve_settings([file, merge_tables(map(parse_set_option, sets))]).rule_options == options
    without = {**MODEL, "folder": str(tmp_path), "rule_options": {"period": 4}}
    assert resolve_settings([without, parse_set_option("rule=LocalSGD")]).rule_options == {"period": 4}
