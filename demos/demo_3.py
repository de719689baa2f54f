"""Shared variables and collectives.

Each rank has its own copy of every shared variable of a function. A call updates each copy from the rank's own rows.
Collectives combine the copies on all ranks, or in the master.
"""

from __future__ import annotations

import argparse

import numpy as np

import synkhronos as synk

try:
    import pytensor as library
    import pytensor.tensor as T
except ImportError:
    import theano as library
    import theano.tensor as T


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: %(default)s)")
    n = synk.fork(parser.parse_args().ranks, use_gpu=False)
    print(f"{n} ranks")

    x = T.dmatrix("x")
    s = library.shared(np.zeros(2), "s")
    f = synk.function([x], updates=[(s, s + x.sum(axis=0))])
    synk.distribute()
    rows = np.arange(4.0 * n).reshape(2 * n, 2)

    print("\n1. A call updates each rank's copy from its own rows")
    f(rows)
    print(f"   master: {s.get_value()}; all ranks: {synk.gather(s).tolist()}")
    assert (synk.gather(s) == rows.reshape(n, 2, 2).sum(axis=1)).all()

    print("\n2. reduce: into the master's copy, or as a returned value")
    total = synk.reduce(s, op="sum", in_place=False)
    print(f"   sum {total}, the serial function {rows.sum(axis=0)}")
    assert (total == rows.sum(axis=0)).all()

    print("\n3. all_reduce: into every copy")
    synk.all_reduce(s, op="sum")
    print(f"   {synk.gather(s).tolist()}")
    assert (synk.gather(s) == rows.sum(axis=0)).all()

    print("\n4. broadcast: send the master's value, or a given value, to all ranks")
    s.set_value(np.array([1.0, 2.0]))  # the graph library's method: changes the master's copy only
    synk.broadcast(s)
    assert (synk.gather(s) == [1, 2]).all()
    synk.broadcast(s, np.zeros(2))
    f.as_theano(rows)  # the serial function: updates the master's copy from all rows
    print(f"   after a broadcast of zeros and a call in the master only: {synk.gather(s).tolist()}")
    assert (synk.gather(s)[0] == rows.sum(axis=0)).all() and not synk.gather(s)[1:].any()

    print("\n5. get_value and set_value: the copy of one rank")
    last = n - 1
    synk.set_value(last, s, [7.0, 8.0])
    print(f"   rank {last} has {synk.get_value(last, s)}")
    assert (synk.get_value(last, s) == [7, 8]).all()

    print("\n6. scatter and gather: copies may differ in shape")
    v = library.shared(np.zeros(1), "v")
    g = synk.function([], [(v.sum(), "sum"), (v * 10, "gather")])
    synk.scatter(v, np.arange(2.0 * n + 1))  # the first rank gets one more row
    print(f"   shapes {synk.get_shapes(v)}, lengths {synk.get_lengths(v)}")
    print(f"   a function of them: sum and gather {[np.asarray(out).tolist() for out in g()]}")
    stacked, joined = synk.gather(v), synk.gather(v, nd_up=0)
    kind = "an array" if n == 1 else "a list, since the shapes differ"
    print(f"   stacked: {kind}; joined along axis 0: {joined}")
    assert (joined == np.arange(2.0 * n + 1)).all()
    assert isinstance(stacked, list) == (n > 1)
    if n > 1:
        try:
            synk.all_reduce(v)
        except ValueError as error:
            print(f"   all_reduce: ValueError: {error}")
        else:
            raise AssertionError("different shapes were reduced")

    print("\n7. all_gather: all copies, joined, on every rank")
    synk.all_gather(v)
    print(f"   lengths {synk.get_lengths(v)}")
    assert (synk.gather(v) == np.arange(2.0 * n + 1)).all()
    synk.close()


if __name__ == "__main__":
    main()
