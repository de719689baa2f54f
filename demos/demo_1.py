"""Functions: reductions and slices.

A function made with synk.function runs on all ranks. Each rank computes its share of the rows, and each output is
reduced over the ranks by its op. The demo compares every op with the graph library's own function on all rows.
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
    print(f"{n} ranks: this process is the master; workers: {n - 1}")

    x, scale = T.dmatrix("x"), T.dscalar("scale")
    y = x * scale
    outputs = {
        "avg": y.mean(),  # equal weight for each rank: exact only for equal numbers of rows
        "mean": y.mean(),  # weighted by rows: always exact
        "sum": y.sum(axis=0),
        "prod": T.prod(y / 3),
        "min": y.min(axis=0),
        "max": y.max(axis=0),
        "gather": y[:, 0],  # one output row for each input row
    }

    print("\n1. Each op, equal to the serial function on all rows")
    plain = library.function([x, scale], list(outputs.values()))
    f = synk.function([x], [(out, op) for op, out in outputs.items()], bcast_inputs=[scale])
    rows = np.random.default_rng(0).normal(size=(6 * n, 2)) + 3
    for (op, expected), result in zip(zip(outputs, plain(rows, 2.0), strict=True), f(rows, 2.0), strict=True):
        print(f"   {op:7} {np.array2string(np.asarray(result), precision=3, threshold=6)}")
        assert np.allclose(result, expected), op

    print("\n2. Uneven shares: 'mean' is exact, 'avg' is not")
    few = np.arange(2.0 * (2 * n + 1)).reshape(-1, 2)
    avg, mean = f(few, 1.0, output_subset=[0, 1])  # only these two outputs are computed
    print(f"   {len(few)} rows: avg {float(avg):.3f}, mean {float(mean):.3f}, NumPy {few.mean():.3f}")
    assert np.isclose(mean, few.mean())
    assert n == 1 or not np.isclose(avg, few.mean())

    print("\n3. Op None: the output of the master's rows only")
    count_rows = synk.function([x], (x.shape[0], None))
    print(f"   {int(count_rows(rows))} of {len(rows)} rows")
    assert count_rows(rows) == len(rows) // n

    print("\n4. num_slices: each rank computes its rows in pieces, with less memory and the same result")
    for num_slices in (1, 2, 5):
        total, gathered = f(rows, 2.0, num_slices=num_slices, output_subset=[2, 6])
        print(f"   num_slices={num_slices}: sum {total.round(3)}, gather of {len(gathered)} rows")
        assert np.allclose(total, plain(rows, 2.0)[2])
        assert np.allclose(gathered, plain(rows, 2.0)[6])

    print("\n5. Updates: each rank changes its own copy; with slices, every piece reads the old values")
    count = library.shared(np.zeros(2), "count")
    g = synk.function([x], updates=[(count, count + x.sum(axis=0), "sum")])
    g(np.ones((4 * n, 2)), num_slices=2)
    print(f"   copies on all ranks: {synk.gather(count).tolist()}")
    assert (synk.gather(count) == 4).all()

    print("\n6. as_theano: the serial function, in the master only")
    print(f"   shapes of its outputs: {[str(np.shape(out)) for out in f.as_theano(rows, 2.0)]}")
    for result, expected in zip(f.as_theano(rows, 2.0), plain(rows, 2.0), strict=True):
        assert np.allclose(result, expected)
    synk.close()


if __name__ == "__main__":
    main()
