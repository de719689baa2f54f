"""Write the losses of programs on Theano 1.0.5, for tests/compat to compare with.

    THEANO_FLAGS=blas.ldflags= PYTHONPATH=. python tests/support/tables/make_program_losses.py

Run it in the Theano environment.  The programs are those in ``tests/compat_theano/programs``; written are the losses of their
first steps in float32 and Theano's default mode, to ``tests/compat_theano/theano_programs.json``.
"""

import importlib
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "compat_theano"))

import synkhronos.compat  # noqa: E402, F401  # isort: skip - before Theano, which it prepares
import theano  # noqa: E402

theano.config.floatX = "float32"

import programs  # noqa: E402

TARGET = HERE.parents[1] / "compat_theano" / "theano_programs.json"


def main():
    """Write the losses of all programs under Theano itself."""
    if theano.__file__ is None or "compat" in theano.__file__:
        raise SystemExit("this has to run with Theano itself")
    table = {}
    for name, arguments in [*((name, {}) for name in programs.NAMES), *programs.SMALLER.items()]:
        losses = importlib.import_module(f"programs.{name}").run(programs.STEPS, **arguments)
        name = f"{name}, smaller" if arguments else name
        table[name] = [float(f"{float(loss):.8g}") for loss in losses]
        print(name, table[name][:4], flush=True)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(losses)}" for name, losses in table.items())
    TARGET.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
