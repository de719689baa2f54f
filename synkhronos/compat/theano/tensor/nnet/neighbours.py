"""The module ``theano.tensor.nnet.neighbours``, on PyTensor: images as matrices of neighbourhoods."""

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.raise_op import Assert

from synkhronos.compat.ops.windows import to_integer


def images2neibs(ten4: Any, neib_shape: Any, neib_step: Any = None, mode: str = "valid") -> Any:
    """Return a matrix with a row for each neighbourhood in images; by default the step is a neighbourhood's shape.

    With mode 'valid' neighbourhoods have to fill the images exactly, with 'ignore_borders' they need not; with 'half'
    and 'full' they extend over the edges, onto zeros, by half of their length or by all but one element; with
    'wrap_centered' they are centred on each element, and continued at the opposite edge.

    Examples
    --------
    >>> T.nnet.neighbours.images2neibs(np.arange(4.0).reshape(1, 1, 2, 2), (1, 2)).eval()
    array([[0., 1.],
           [2., 3.]])
    """
    x = pt.as_tensor_variable(ten4)
    shape = _to_integers(neib_shape)
    step = shape if neib_step is None else _to_integers(neib_step)
    if mode in ("half", "full"):
        pad = [n // 2 if mode == "half" else n - 1 for n in shape]
        x = pt.pad(x, [(0, 0), (0, 0), (pad[0], pad[0]), (pad[1], pad[1])])
    elif mode == "wrap_centered":
        if any(n % 2 == 0 for n in shape):
            raise TypeError(f"neib_shape: expected odd lengths with mode={mode!r}, got {shape}")
    elif mode not in ("valid", "ignore_borders"):
        raise NotImplementedError(f"images2neibs: unknown mode {mode!r}")
    # Indexes of all neighbourhoods' elements on each axis: (neighbourhoods, positions within).
    index = []
    for axis, (n, s) in enumerate(zip(shape, step, strict=True)):
        length = x.shape[2 + axis]
        if mode == "wrap_centered":
            starts = pt.arange((length + s - 1) // s) * s - n // 2
            index.append((starts[:, None] + np.arange(n)) % length)
            continue
        if mode != "ignore_borders":
            message = f"images2neibs: expected a length of {n} + {s} * k on axis {2 + axis} with mode={mode!r}"
            length = Assert(message)(length, pt.eq((length - n) % s, 0))
        index.append((pt.arange((length - n) // s + 1) * s)[:, None] + np.arange(n))
    rows, columns = index
    picked = x[:, :, rows[:, None, :, None], columns[None, :, None, :]]
    return picked.reshape((-1, shape[0] * shape[1]))


def neibs2images(neibs: Any, neib_shape: Any, original_shape: Any, mode: str = "valid") -> Any:
    """Return the images of shape ``original_shape`` from a matrix of `images2neibs` with the default step.

    With ``mode="ignore_borders"``, borders outside of all neighbourhoods are zero.
    """
    if mode not in ("valid", "ignore_borders"):
        raise NotImplementedError(f"neibs2images: unknown mode {mode!r}")
    h, w = _to_integers(neib_shape)
    a, b, rows, columns = (original_shape[i] for i in range(4))
    neibs = pt.as_tensor_variable(neibs)
    parts = neibs.reshape((a, b, rows // h, columns // w, h, w)).dimshuffle(0, 1, 2, 4, 3, 5)
    images = parts.reshape((a, b, rows // h * h, columns // w * w))
    if mode == "valid":
        return images
    result = pt.zeros((a, b, rows, columns), dtype=neibs.dtype)
    return pt.set_subtensor(result[:, :, : rows // h * h, : columns // w * w], images)


def _to_integers(pair: Any) -> tuple[int, int]:
    return to_integer(pair[0]), to_integer(pair[1])
