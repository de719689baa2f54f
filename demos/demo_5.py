"""Rows of shared variables: batch_s.

Data that is used repeatedly can stay on the ranks, in shared variables. `batch_s` selects rows of each rank's own copy,
after the data has been scattered; `batch` selects rows of the inputs, before they are scattered.
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

    points, labels = library.shared(np.zeros((1, 2)), "points"), library.shared(np.zeros(1), "labels")
    score = points.sum(axis=1) * labels
    f = synk.function([], [(score, "gather"), (score.mean(), "mean")], sliceable_shareds=[points, labels])

    # The serial function, on one array.
    p, q = T.dmatrix("p"), T.dvector("q")
    plain = library.function([p, q], [score, score.mean()], givens=[(points, p), (labels, q)])

    all_points, all_labels = np.arange(12.0 * n).reshape(6 * n, 2), np.arange(6.0 * n)
    synk.scatter([points, labels], [all_points, all_labels])
    print(f"each rank has {synk.get_lengths(points)[0]} of {len(all_points)} rows")
    # Indexes of each rank's rows in the complete data.
    whole = np.array_split(np.arange(6 * n), n)

    def check_rows(batch_s: Any, chosen_by_rank: list[Any]) -> None:
        index = np.concatenate([rows[chosen] for rows, chosen in zip(whole, chosen_by_rank, strict=True)])
        gathered, mean = f(batch_s=batch_s)
        print(f"   batch_s={batch_s!r}: {gathered.tolist()}")
        expected, expected_mean = plain(all_points[index], all_labels[index])
        assert np.array_equal(gathered, expected) and np.isclose(mean, expected_mean)

    print("\n1. Without batch_s: all rows of each rank")
    gathered, mean = f()
    expected, expected_mean = plain(all_points, all_labels)
    assert np.array_equal(gathered, expected) and np.isclose(mean, expected_mean)
    print(f"   {len(gathered)} rows, mean {float(mean):.2f}")

    print("\n2. One slice or list for all ranks, each of its own rows")
    check_rows(slice(1, 4), [slice(1, 4)] * n)
    check_rows([5, 0], [[5, 0]] * n)

    print("\n3. A list of slices or lists, one for each rank")
    slices: list[Any] = [slice(r % 3, r % 3 + 2) for r in range(n)]
    check_rows(slices, slices)
    lists: list[Any] = [[r % 6, 5 - r % 6] for r in range(n)]
    check_rows(lists, lists)

    print("\n4. An epoch over shuffled rows: each rank shuffles its own")
    rng = np.random.default_rng(0)
    orders = [rng.permutation(6) for _ in range(n)]
    results = [f(batch_s=[order[i : i + 3] for order in orders])[0] for i in (0, 3)]
    assert np.array_equal(np.sort(np.concatenate(results)), np.sort(expected))
    print(f"   two steps of {len(results[0])} rows")

    print("\n5. num_slices: the same rows in pieces, to save memory")
    sliced, mean = f(num_slices=3)
    assert np.array_equal(sliced, expected) and np.isclose(mean, expected_mean)
    print(f"   mean {float(mean):.2f}")

    print("\n6. batch and batch_s together: rows of an input, and rows of shared variables")
    x = T.dvector("x")
    g = synk.function([x], (x + labels, "gather"), sliceable_shareds=[labels])
    serial = library.function([x, q], x + labels, givens=[(labels, q)])
    inputs = np.arange(100.0, 100 + 4 * n)
    result = g(inputs, batch=slice(2 * n), batch_s=[0, 1])
    print(f"   {result.tolist()}")
    first_two = np.concatenate([rows[:2] for rows in whole])
    assert np.array_equal(result, serial(inputs[: 2 * n], all_labels[first_two]))
    synk.close()


if __name__ == "__main__":
    main()
