"""Theano-MPI's session files and its launcher's options."""

import importlib
import json
import os
import platform
import shlex
import subprocess
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT, SUPPORT
from system import LIMIT_SECONDS

from synkhronos.launcher import SettingsError, tmlauncher
from synkhronos.launcher.configuration import theano_mpi_session
from synkhronos.launcher.configuration.sources import read_session_file

#: Settings of session files by their text, in bash's syntax.
SETTINGS_BY_TEXT = {
    "RULE=BSP\nMODELFILE='models.mlp'\nMODELCLASS=\"MLP\"\nDEVICES=cpu,cpu": {
        "rule": "BSP", "modelfile": "models.mlp", "modelclass": "MLP", "devices": "cpu,cpu",
    },
    "BSP_EXCH_STRATEGY='ar'\nBSP_SYNC_TYPE=cdd": {"rule_options": {"average": "gradient"}},
    "RULE=BSP\nBSP_SYNC_TYPE=avg\nBSP_EXCH_STRATEGY=nccl16": {
        "rule": "BSP", "rule_options": {"average": "params", "precision": "float16"},
    },
    "RULE=BSP\nBSP_SYNC_TYPE=swap": {"rule": "Swap"},
    "RULE=BSP\nSYNC_TYPE=swap\nEXCH_STRATEGY=ar": {"rule": "Swap"},
    "SYNC_TYPE=cdd\nRULE=BSP\nEXCH_STRATEGY=nccl16": {
        "rule": "BSP", "rule_options": {"average": "gradient", "precision": "float16"},
    },
    "RULE=EASGD\nBSP_SYNC_TYPE=avg": {"rule": "EASGD"},
    "SIZE=3": {"ranks": 3},
    "SIZE=3\nDEVICES=cpu,cpu": {"devices": "cpu,cpu"},
    "RULE=GOSGD\nRULE=EASGD": {"rule": "EASGD"},
    "RULE=": {},
    'DEVICES=("node0:cuda0"\n\t\t # the other\n "node1:cuda0,cuda1,cuda2")': {
        "hosts": ["node0:1", "node1:3"], "devices": "cuda0",
    },
    "DEVICES=(a:cpu,cpu b:cpu)": {"hosts": ["a:2", "b:1"], "devices": "cpu"},
    "DEVICES=(cpu cpu)": {"devices": "cpu,cpu"},
    f"DEVICES={platform.node()}:cuda1,cuda0": {"devices": "cuda1,cuda0"},
    "export RULE=BSP; BIND=True # bound\n": {"rule": "BSP", "bind": "True"},
    "MODELFILE=a\\ b'c d'\"e \\\"f\\\"\"#g": {"modelfile": 'a bc de "f"#g'},
    "MODELFILE=a\\\nb": {"modelfile": "ab"},
    "MODELFILE='$HOME'": {"modelfile": "$HOME"},
}  # fmt: skip

#: Messages for wrong session files by their text, as patterns.
MESSAGES_BY_TEXT = {
    "RULE=BSP\nsource other.cfg": r"line 2: expected KEY=VALUE or KEY=\(VALUE ...\), with quotation marks around a value that has spaces, or a .toml file, got 'source other.cfg'",
    "RULE=BSP 3": r"line 1: expected KEY=VALUE .* got 'RULE=BSP 3'",
    "\nMODELFILE=$HOME/x": r"line 2: \$HOME/x: only values are read, nothing is expanded or run",
    'MODELFILE="`pwd`"': r"line 1: .*only values are read",
    "RULE=BSP & rm": r"line 1: ",
    "DEVICES=(cuda0\nRULE=BSP": r"line 1: expected KEY=VALUE .* got 'DEVICES=\(cuda0'",
    "DEVICES=(a (b))": r"line 1: expected KEY=VALUE .* got 'DEVICES=\(a \(b\)\)'",
    "RULE=BSP)": r"line 1: expected KEY=VALUE .* got 'RULE=BSP\)'",
    "RULE='BSP": r"line 1: expected KEY=VALUE .* got \"RULE='BSP\"",
    "RULE=(BSP EASGD)": r"RULE: expected one value, got BSP EASGD",
    "SIZE=many": r"SIZE: expected a number of ranks, got 'many'",
    "BSP_SYNC_TYPE=max": r"BSP_SYNC_TYPE: expected one of avg, cdd, swap, got 'max'",
    "BSP_EXCH_STRATEGY=pigeon": r"BSP_EXCH_STRATEGY: expected one of .* got 'pigeon'",
    "DEVICES=(a:cuda0 cuda1)": r"DEVICES: expected HOST:DEVICE,DEVICE for each of several hosts, got 'cuda1'",
    "DEVICES=(a:cuda1,cuda0 b:cuda0)": r"DEVICES: expected cuda0, cuda1 and so on in this order for host a, or cpu, got cuda1,cuda0",
    "COLOUR=red": r"'COLOUR' is not a setting: expected RULE, MODELFILE",
}  # fmt: skip


#: Prints name, attributes ("a" for an array), number of values and values of each variable that a file has set.
BASH_SCRIPT = """
source "$0"
for name in "$@"; do
    declare -n variable=$name
    printf '%s\\0' "$name" "${variable@a}" "${#variable[@]}" "${variable[@]}"
done
"""


def read_in_bash(path, names):
    """Return the values of variables that bash has after it has run a file."""
    words = ["bash", "-c", BASH_SCRIPT, str(path), *names]
    done = subprocess.run(words, env={"PATH": os.defpath}, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0 and not done.stderr, done.stderr
    printed, variables = iter(done.stdout.split("\0")[:-1]), {}
    for name in printed:
        attributes, n_values = next(printed), int(next(printed))
        values = [next(printed) for _ in range(n_values)]
        variables[name] = values if "a" in attributes else values[0]
    return variables


@pytest.mark.parametrize("text", SETTINGS_BY_TEXT)
def test_session_file_sets_the_values_that_bash_sets(text, tmp_path):
    path = tmp_path / "session.cfg"
    path.write_text(text)
    assignments = theano_mpi_session.parse_session(text)
    assert assignments == read_in_bash(path, assignments)
    assert read_session_file(path) == SETTINGS_BY_TEXT[text]


def test_session_file_may_have_spaces_around_the_equals_sign(tmp_path):
    # Bash refuses them: it would take the key for a command.
    (tmp_path / "session.cfg").write_text("MODELFILE = 'models.mlp'")
    assert read_session_file(tmp_path / "session.cfg") == {"modelfile": "models.mlp"}


@pytest.mark.parametrize("text", MESSAGES_BY_TEXT)
def test_wrong_session_file_names_the_line(text, tmp_path):
    (tmp_path / "session.cfg").write_text(text)
    with pytest.raises(SettingsError, match=f"session.cfg: {MESSAGES_BY_TEXT[text]}"):
        read_session_file(tmp_path / "session.cfg")


values = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
keys = st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True).filter(lambda key: key != "export")


@given(
    st.dictionaries(keys, values | st.lists(values, min_size=1, max_size=3), max_size=4),
    st.sampled_from(["\n", ";", "  # x\n"]),
)
def test_session_file_reads_quoted_values(assignments, end):
    text = ""
    for key, value in assignments.items():
        words = f"({' '.join(map(shlex.quote, value))})" if isinstance(value, list) else shlex.quote(value)
        text += f"{key}={words}{end}"
    assert theano_mpi_session.parse_session(text) == assignments


@given(st.text(st.sampled_from("AB='\"()#;\\ \n\t$`x,:")) | st.text())
def test_session_file_reads_or_refuses_any_text(text):
    try:
        settings = theano_mpi_session.parse_session(text)
    except ValueError as error:
        assert str(error).startswith("line ")
    else:
        assert all(isinstance(value, str | list) for value in settings.values())


def read_options(text):
    return tmlauncher.parse_options(text.split())


def test_tmlauncher_accepts_theano_mpis_options(capsys):
    options = read_options(
        "-file=models.mlp --modelclass=MLP -r=BSP -s=2 -bsp_sync_type=avg -bsp_exch_strategy=nccl16 -b"
    )
    assert theano_mpi_session.to_settings(options) == {
        "modelfile": "models.mlp", "modelclass": "MLP", "rule": "BSP", "ranks": 2, "bind": "True",
        "rule_options": {"average": "params", "precision": "float16"},
    }  # fmt: skip
    options = read_options("--modelfile=models.mlp -class=MLP --rule=BSP --size=2 --config=a.cfg -bind")
    assert options == {
        "config": "a.cfg", "MODELFILE": "models.mlp", "MODELCLASS": "MLP", "RULE": "BSP", "SIZE": "2", "BIND": "True",
    }  # fmt: skip
    for wrong in ("-x", "-cfg", "session.cfg", "-b=1"):
        with pytest.raises(SystemExit, match="2"):
            read_options(wrong)
        assert "usage: tmlauncher" in capsys.readouterr().err


@pytest.fixture
def started_runs(tmp_path, monkeypatch):
    """Return the list of settings and commands of the runs that tmlauncher starts; their status is 7."""
    runs = []
    monkeypatch.setattr(tmlauncher, "run_training", lambda settings, words: runs.append((settings, words)) or 7)
    monkeypatch.chdir(SUPPORT)
    monkeypatch.setenv("SYNKHRONOS_FOLDER", str(tmp_path / "run"))
    return runs


def test_session_file_precedes_options(started_runs, tmp_path, monkeypatch):
    session = tmp_path / "session.cfg"
    session.write_text("RULE=BSP\nBSP_SYNC_TYPE=avg\nMODELFILE=launch_models.mlp\nMODELCLASS=MLP\n")
    monkeypatch.setenv("DEVICES", "cpu,cpu,cpu")
    assert tmlauncher.main([f"-cfg={session}", "-r=EASGD", "-class=Other"]) == 7
    ((settings, words),) = started_runs
    assert (settings.rule, settings.modelclass, settings.devices) == ("BSP", "MLP", ("cpu",) * 3)
    assert settings.rule_options == {"average": "params"} and settings.folder == str(tmp_path / "run")
    assert words[1:3] == ["-m", "synkhronos.launcher.tmlauncher"]


def test_wrong_options_are_named(started_runs, capsys):
    assert tmlauncher.main(["-file=launch_models.mlp", "-class=Nobody", "-r=BSP"]) == 2
    assert "tmlauncher: modelclass: " in capsys.readouterr().err
    assert tmlauncher.main(["-r=BSP", "-bsp_sync_type=max"]) == 2
    assert "expected one of avg, cdd, swap" in capsys.readouterr().err
    assert not started_runs


def test_usage_is_printed_for_help_and_without_options(started_runs, capsys):
    for arguments, status in ((["--help"], 0), ([], 2)):
        with pytest.raises(SystemExit, match=str(status)):
            tmlauncher.main(arguments)
        assert "usage: tmlauncher" in capsys.readouterr()[status > 0]
    assert not started_runs


def test_fault_of_a_run_is_not_reported_as_a_wrong_setting(started_runs, monkeypatch):
    def fail(*_):
        raise ValueError("a fault of the run")

    monkeypatch.setattr(tmlauncher, "run_training", fail)
    with pytest.raises(ValueError, match="a fault of the run"):
        tmlauncher.main(["-file=launch_models.mlp", "-class=MLP", "-r=BSP"])


def test_tmlauncher_console_script_runs_a_session(tmp_path, monkeypatch):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, name = project["scripts"]["tmlauncher"].split(":")
    (tmp_path / "session.cfg").write_text("RULE=BSP\nMODELFILE=launch_models.mlp\nMODELCLASS=MLP\nDEVICES=cpu,cpu\n")
    monkeypatch.chdir(SUPPORT)
    monkeypatch.setenv("SYNKHRONOS_FOLDER", str(tmp_path / "run"))
    monkeypatch.setenv("SYNKHRONOS_EPOCHS", "1")
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setattr("sys.argv", ["tmlauncher", f"-cfg={tmp_path / 'session.cfg'}"])
    with pytest.raises(SystemExit) as caught:
        getattr(importlib.import_module(module), name)()
    assert caught.value.code == 0
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == 0 and (tmp_path / "run" / "params.npz").exists()
