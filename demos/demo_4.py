"""Rows of the inputs: batch and minibatch.

`batch` selects rows of the complete data before they are scattered. Each rank copies its own share, so that shuffled
batches are gathered by all ranks in parallel.
"""

from __future__ import annotations

import argparse
from typing import Any

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

    x, y = T.dmatrix("x"), T.lvector("y")
    f = synk.function([x, y], [(x.sum(axis=1) * y, "gather"), (y.sum(), "sum")])
    plain = library.function([x, y], [x.sum(axis=1) * y, y.sum()])
    rng = np.random.default_rng(0)
    points, labels = rng.integers(0, 9, (12, 2)).astype(float), np.arange(12)
    x_data, y_data = f.build_inputs(points, labels)

    def check(batch: Any, index: Any) -> None:
        gathered, total = f(x_data, y_data, batch=batch)
        print(f"   batch={batch!r}: labels' sum {int(total)}, {len(gathered)} rows")
        for result, expected in zip((gathered, total), plain(points[index], labels[index]), strict=True):
            assert np.array_equal(result, expected)

    print("\n1. An int, a slice, a list of indexes, a mask")
    check(5, slice(5))  # the first five
    check(slice(2, None, 3), slice(2, None, 3))
    check([11, 0, 3, 3], [11, 0, 3, 3])
    mask = labels % 4 == 1
    check(mask.tolist(), mask)

    print("\n2. An epoch over shuffled rows, without a copy in the master")
    n_rows = 0
    for rows in np.array_split(rng.permutation(12), 3):
        check(rows.tolist(), rows)
        n_rows += len(rows)
    assert n_rows == 12

    print("\n3. Fewer rows than ranks: the other ranks compute nothing")
    check([6], [6])

    print("\n4. minibatch=True: Data that holds only the rows of the batch, in the order of a slice or of a list")
    part = synk.data(var=x, minibatch=True)
    for batch in (slice(4, 8), [7, 4, 5]):
        part.set_value(points[batch])
        print(f"   {part} together with {y_data}")
        gathered, total = f(part, y_data, batch=batch)
        print(f"   batch={batch!r}: {gathered.tolist()}")
        assert np.array_equal(gathered, plain(points[batch], labels[batch])[0])

    print("\n5. All inputs are minibatches: their rows are the batch")
    x_part, y_part = f.build_inputs(points[:4], labels[:4], minibatch=True)
    for start in range(0, 12, 4):  # as if read from a file that is larger than memory
        x_part.set_value(points[start : start + 4])
        y_part.set_value(labels[start : start + 4])
        gathered, total = f(x_part, y_part)
        print(f"   rows from {start}: labels' sum {int(total)}")
        assert np.array_equal(gathered, plain(points[start : start + 4], labels[start : start + 4])[0])

    print("\n6. An index out of range is an error before any rank starts")
    try:
        f(x_data, y_data, batch=[3, 12])
    except IndexError as error:
        print(f"   IndexError: {error}")
    else:
        raise AssertionError("index 12 of 12 rows was accepted")
    synk.close()


if __name__ == "__main__":
    main()
