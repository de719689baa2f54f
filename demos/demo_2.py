"""Data: arrays that all ranks see.

A Data object is an array in shared memory. A function call with Data objects copies nothing: each rank reads its rows
in place. The dtype and the number of dimensions are fixed; the shape and the content may change.
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

    x, y = T.fmatrix("x"), T.fvector("y")
    f = synk.function([x, y], (T.dot(y, x), "sum"))
    plain = library.function([x, y], T.dot(y, x))

    print("\n1. Three ways to make one: from a value, from a variable, by a function for its inputs")
    d = synk.data(np.arange(12, dtype="float32").reshape(6, 2))
    empty = synk.data(var=x)
    x_data, y_data = f.build_inputs(np.ones((5, 2), "float32"), np.arange(5, dtype="float32"))
    for data in (d, empty, x_data, y_data):
        print(f"   {data}")
    print(f"   f(x_data, y_data) = {f(x_data, y_data)}")
    assert np.allclose(f(x_data, y_data), plain(x_data.data, y_data.data))

    print("\n2. Reading and writing as with a NumPy array; ranks use the new values in the next call")
    x_data[0] = [10, 20]
    x_data[1:3, 1] += 1
    y_data[:] = 1
    print(f"   {np.asarray(x_data).tolist()}")
    print(f"   f(x_data, y_data) = {f(x_data, y_data)}")
    assert np.allclose(f(x_data, y_data), x_data.data.sum(axis=0))

    print("\n3. New shapes: remaining rows are kept, new rows are zero")
    d.set_length(4)
    print(f"   4 of the 6 rows: {d.data.tolist()}, memory for {d.alloc_size} items")
    d.set_length(7)
    assert d.shape == (7, 2) and (d[:4].ravel() == np.arange(8)).all() and not d[4:].any()
    d.set_shape((2, 3))
    assert d.shape == (2, 3)
    print(f"   {d}")

    print("\n4. oversize: allocate more memory, so that the data can grow without a new allocation")
    grows = synk.data(np.zeros((100, 2), "float32"), oversize=1.5)
    print(f"   {grows.size} items, memory for {grows.alloc_size}")
    grows.set_length(150)
    assert grows.alloc_size == 300

    print("\n5. A cast that may change values needs force_cast=True")
    d.set_value(np.array([[1, 2]], dtype="int8"))  # float32 holds every int8
    try:
        d.set_value(np.array([[0.1, 0.2]]))  # float64
    except TypeError as error:
        print(f"   TypeError: {error}")
    else:
        raise AssertionError("float64 was cast without force_cast")
    d.set_value(np.array([[0.1, 0.2]]), force_cast=True)
    assert d.condition_data(np.array([[0.5]]), force_cast=True).dtype == np.float32
    print(f"   with force_cast=True: {d.data}")

    print("\n6. NumPy arrays as inputs: the library copies them into shared memory")
    values = np.ones((3, 2), "float32"), np.ones(3, "float32")
    print(f"   f(array, array) = {f(*values)}")
    assert np.allclose(f(*values), plain(*values))

    print("\n7. free_memory: release the memory before the object is deleted")
    d.free_memory()
    print(f"   {d}, memory for {d.alloc_size} items")
    assert d.size == d.alloc_size == 0
    synk.close()


if __name__ == "__main__":
    main()
