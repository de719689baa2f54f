"""Write the results of Theano 1.0.5 in random cases, as the reference of compat_theano.

    THEANO_FLAGS=blas.ldflags= PYTHONPATH=. python tests/support/tables/make_compat_cases.py

Run it in the Theano environment.  The cases are those of ``tests/compat_theano/cases.py``: each names a function, its
arguments and its inputs, and builds the same graph with either library.  Written are the outputs, and the gradients of
a weighted sum of them, to ``tests/compat_theano/theano_cases.npz``.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "compat_theano"))

import cases  # noqa: E402
import numpy as np  # noqa: E402
import theano  # noqa: E402

TARGET = HERE.parents[1] / "compat_theano" / "theano_cases.npz"


def main():
    """Write the results of Theano itself for all cases."""
    if theano.__file__ is None or "compat" in theano.__file__:
        raise SystemExit("this has to run with Theano itself")
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
        print(case.name, flush=True)
    np.savez_compressed(TARGET, index=json.dumps(index), values=np.concatenate(values))
    print(f"{len(cases.CASES)} cases, {TARGET.stat().st_size / 1000:.0f} kB in {TARGET}")


if __name__ == "__main__":
    main()
