"""Starts runs as a user does, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("SYNKHRONOS_")},
    "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}",
    # With a compiler Theano would fold constants by C++, in each process after a look at all that it has ever compiled.
    "THEANO_FLAGS": f"{os.environ.get('THEANO_FLAGS', '')},cxx=".lstrip(","),
    "PYTHONWARNINGS": "ignore::UserWarning:theano.configdefaults",  # which says that there is none
}


def command(*arguments):
    return [sys.executable, "-m", "synkhronos", *map(str, arguments)]


def run(*arguments, status=0, cwd=None, **environment):
    """Run a command of the library's to its end."""
    done = subprocess.run(
        command(*arguments), cwd=cwd, env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    return done


def train(folder, model="MLP", *arguments, status=0, **settings):
    """Train a class of launch_models on two ranks."""
    module = "mlp" if model == "MLP" else "others"
    sets = [f"--set={name.replace('__', '.')}={value}" for name, value in settings.items()]
    where = ["--set", f"model='launch_models/{module}.py:{model}'", "--folder", folder]
    return run(
        "train",
        *where,
        *([] if any("devices" in str(a) for a in arguments) else ["--devices=cpu,cpu"]),
        *sets,
        *arguments,
        status=status,
        cwd=TESTS,
    )


def lines(folder, name):
    return [json.loads(line) for line in (Path(folder) / f"{name}.jsonl").read_text().splitlines()]
