"""The module ``theano.tensor.nnet.neighbours``, on PyTensor: images as matrices of neighbourhoods."""

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.raise_op import Assert

from synkhronos.compat.ops.windows import to_window_parameter


def images2neibs(ten4: Any, neib_shape: Any, neib_step: Any = None, mode: str = "valid") -> Any:
    """Return a matrix with a row for each neighbourhood in images (batch, channels, rows, columns).

    By default the step between neighbourhoods is their shape.  With mode 'valid' they have to fill the images exactly,
    with 'ignore_borders' they need not.  With 'half' and 'full' they extend over the edges, onto zeros, by half of
    their length or by all but one element.  With 'wrap_centered' they are centered on each element, and continued at
    the opposite edge.

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
        padding = [n // 2 if mode == "half" else n - 1 for n in shape]
        x = pt.pad(x, [(0, 0), (0, 0), *((n, n) for n in padding)])
    elif mode == "wrap_centered":
        if any(n % 2 == 0 for n in shape):
            raise TypeError(f"neib_shape: expected odd lengths with mode={mode!r}, got {shape}")
    elif mode not in ("valid", "ignore_borders"):
        raise NotImplementedError(f"images2neibs: unknown mode {mode!r}")
    # For rows and for columns: indexes of all neighbourhoods' elements, of shape (neighbourhoods, elements of one).
    indexes = []
    for axis, (n, s) in enumerate(zip(shape, step, strict=True)):
        length = x.shape[2 + axis]
        if mode == "wrap_centered":
            starts = pt.arange((length + s - 1) // s) * s - n // 2
            indexes.append((starts[:, None] + np.arange(n)) % length)
            continue
        if mode != "ignore_borders":
            message = f"images2neibs: expected a length of {n} + {s} * k on axis {2 + axis} with mode={mode!r}"
            length = Assert(message)(length, pt.eq((length - n) % s, 0))
        indexes.append((pt.arange((length - n) // s + 1) * s)[:, None] + np.arange(n))
    rows, columns = indexes
    neighbourhoods = x[:, :, rows[:, None, :, None], columns[None, :, None, :]]
    return neighbourhoods.reshape((-1, shape[0] * shape[1]))


def neibs2images(neibs: Any, neib_shape: Any, original_shape: Any, mode: str = "valid") -> Any:
    """Return the images of shape ``original_shape`` from a matrix of `images2neibs` with the default step.

    With ``mode="ignore_borders"``, borders outside of all neighbourhoods are zero.
    """
    if mode not in ("valid", "ignore_borders"):
        raise NotImplementedError(f"neibs2images: unknown mode {mode!r}")
    height, width = _to_integers(neib_shape)
    batch, channels, rows, columns = (original_shape[i] for i in range(4))
    n_down, n_across = rows // height, columns // width
    neibs = pt.as_tensor_variable(neibs).reshape((batch, channels, n_down, n_across, height, width))
    images = neibs.dimshuffle(0, 1, 2, 4, 3, 5).reshape((batch, channels, n_down * height, n_across * width))
    if mode == "valid":
        return images
    result = pt.zeros((batch, channels, rows, columns), dtype=neibs.dtype)
    return pt.set_subtensor(result[:, :, : n_down * height, : n_across * width], images)


def _to_integers(pair: Any) -> tuple[int, int]:
    return to_window_parameter(pair[0]), to_window_parameter(pair[1])
