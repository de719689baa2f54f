"""Write the losses of the zoo's networks on Theano 1.0.5, for tests/lasagne_demos to compare with.

    THEANO_FLAGS=blas.ldflags= PYTHONPATH=. python tests/support/tables/make_zoo_losses.py

Run it in the Theano environment.  The networks are those of ``tests/lasagne_demos/zoo_cases.py``; written are what their first
steps and a validation say in Theano's default mode, to ``tests/lasagne_demos/zoo_losses.json``.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "lasagne_demos"))

from zoo_cases import NETWORKS, Recorder, make_network_for_table, train_and_validate, without_dropout  # noqa: E402

import synkhronos.compat  # noqa: E402

TARGET = HERE.parents[1] / "lasagne_demos" / "zoo_losses.json"


def main():
    """Write the losses of all networks under Theano itself."""
    if synkhronos.compat.library != "theano":
        raise SystemExit("this has to run with Theano itself")
    without_dropout()
    table = {}
    for name in NETWORKS:
        recorder = Recorder()
        train_and_validate(make_network_for_table(name), recorder)
        table[name] = [float(f"{loss:.8g}") for loss in recorder.losses]
        print(name, table[name], flush=True)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(losses)}" for name, losses in table.items())
    TARGET.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
