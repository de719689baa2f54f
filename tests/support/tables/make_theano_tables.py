"""Write a table of results of Theano 1.0.5, for tests/compat and tests/lasagne_demos to compare with.

    THEANO_FLAGS=blas.ldflags= PYTHONPATH=. python tests/support/tables/make_theano_tables.py TABLE

Run it in the Theano environment.  The tables are:

``cases``     results of ``compat/cases.py``: outputs, and the gradients of a weighted sum of them
``programs``  losses of the first steps of ``compat/programs``, in float32 and Theano's default mode
``zoo``       losses of the first steps and a validation of the networks of ``lasagne_demos/zoo_cases.py``, in that mode
"""

import importlib
import json
import sys
from pathlib import Path

import numpy as np

TESTS = Path(__file__).resolve().parents[2]
COMPAT, LASAGNE = TESTS / "compat", TESTS / "lasagne_demos"
sys.path[:0] = [str(COMPAT), str(LASAGNE)]

import synkhronos.compat  # noqa: E402 - before Theano, which it prepares


def write_losses(target, losses):
    """Write losses by name."""
    rounded = {name: [float(f"{float(loss):.8g}") for loss in values] for name, values in losses.items()}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(values)}" for name, values in rounded.items())
    target.write_text(f"{{\n{lines}\n}}\n")


def write_cases():
    import cases
    import theano

    # Few rewrites, and Ops in C where Theano has them: some of those in Python are too old for this NumPy.
    mode = theano.Mode(linker="c|py", optimizer="fast_compile")
    # One array and an index: an archive with a member for each would be headers for the most part.
    index, values = {}, []
    for case in cases.CASES:
        try:
            computed = case.compute(mode)
        except ImportError:  # its C needs a BLAS library
            computed = case.compute(theano.Mode(linker="py", optimizer="fast_compile"))
        index[case.name] = {kind: [list(np.shape(value)) for value in results] for kind, results in computed.items()}
        values += [np.asarray(value, "float32").ravel() for results in computed.values() for value in results]
    np.savez_compressed(COMPAT / "theano_cases.npz", index=json.dumps(index), values=np.concatenate(values))


def write_programs():
    import theano

    theano.config.floatX = "float32"
    import programs

    losses = {}
    for name, arguments in [*((name, {}) for name in programs.NAMES), *programs.SMALLER.items()]:
        module = importlib.import_module(f"programs.{name}")
        losses[f"{name}, smaller" if arguments else name] = module.run(programs.STEPS, **arguments)
    write_losses(COMPAT / "theano_programs.json", losses)


def write_zoo():
    from zoo_cases import NETWORKS, Recorder, disable_dropout, make_network_for_table, train_and_validate

    disable_dropout()
    losses = {}
    for name in NETWORKS:
        recorder = Recorder()
        train_and_validate(make_network_for_table(name), recorder)
        losses[name] = recorder.losses
    write_losses(LASAGNE / "zoo_losses.json", losses)


if __name__ == "__main__":
    if synkhronos.compat.library != "theano":
        raise SystemExit("this has to run with Theano itself")
    {"cases": write_cases, "programs": write_programs, "zoo": write_zoo}[sys.argv[1]]()
