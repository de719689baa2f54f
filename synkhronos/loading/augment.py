"""Augmentation of rows.

An augmentation is a callable ``augment(row, random)``: it takes a row, a tuple of arrays, and a
`numpy.random.Generator`, and returns a row.  The generator depends on the seed, the epoch and the row alone, so results
do not depend on the number of ranks or of loader processes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from synkhronos.casts import as_numbers, cast, check_cast
from synkhronos.checks import check_at_least, check_flag, check_number, suggest_keywords


def make_row_generator(seed: int, epoch: int, row_number: int) -> np.random.Generator:
    """Return the generator for the augmentation of one row in one epoch."""
    return np.random.default_rng((seed, epoch, row_number, 1))  # the order of rows is seeded by (seed, epoch)


def augment_row(row: Any, augment: Callable[..., Any] | None, seed: int, epoch: int, number: int) -> tuple[Any, ...]:
    """Return the arrays of a row, augmented unless ``augment`` is None.

    The user's function gets copies: a source may return its own arrays, and the function may write to its argument.
    """
    arrays = tuple(row) if isinstance(row, tuple | list) else (row,)
    if augment is None:
        return arrays
    if type(augment) is not CropMirror:
        arrays = tuple(copy.deepcopy(value) if isinstance(value, np.ndarray | list) else value for value in arrays)
    return tuple(augment(arrays, make_row_generator(seed, epoch, number)))


class CropMirror:
    """Augmentation that crops a picture, mirrors it at random, subtracts a mean and scales it.

    A picture is the first array of a row, of shape ``(channels, height, width)``.

    Parameters
    ----------
    crop : int, optional
        Height and width of the crop, in pixels.  By default the picture is not cropped.
    mirror : bool
        Whether to flip each picture left to right with probability 1/2.
    mean : number or array_like, optional
        Value to subtract: a number, an array with one number per channel, or an array of the picture's shape before
        the crop.
    scale : number, optional
        Factor for the result.
    center : bool
        Whether to crop the centre, as for validation, instead of a random window.

    Notes
    -----
    With ``mean`` or ``scale`` the result is float32.  float64 is rounded; other dtypes whose values float32 can't hold
    are an error.  Otherwise the dtype does not change.  The window and the flip depend on the seed, the epoch and the
    row alone.

    Examples
    --------
    >>> import numpy as np
    >>> cut = CropMirror(crop=2, mean=1, center=True)
    >>> picture, label = cut((np.arange(16, dtype="uint8").reshape(1, 4, 4), 3), None)
    >>> picture[0].tolist(), label
    ([[4.0, 5.0], [8.0, 9.0]], 3)
    """

    @suggest_keywords
    def __init__(
        self,
        crop: int | None = None,
        mirror: bool = False,
        mean: npt.ArrayLike | None = None,
        scale: float | None = None,
        center: bool = False,
    ):
        self.crop = None if crop is None else check_at_least(crop, "crop", 1)
        self.mirror, self.center = check_flag(mirror, "mirror"), check_flag(center, "center")
        self.scale = None if scale is None else np.float32(cast(check_number(scale, "scale"), np.float32, "scale"))
        self.mean = None if mean is None else cast(mean, np.float32, "mean")
        if self.mean is not None and self.mean.ndim not in (0, 1, 3):
            raise ValueError(
                "mean: expected a number, one per channel, or an array of a picture's shape, got shape "
                f"{self.mean.shape}"
            )
        if self.mean is not None and self.mean.ndim == 1:
            self.mean = self.mean[:, None, None]

    def __call__(self, row: tuple[Any, ...], random: np.random.Generator) -> tuple[Any, ...]:
        """Return the row with its picture augmented."""
        picture, other_arrays = as_numbers(row[0], "CropMirror"), row[1:]
        if picture.ndim != 3:
            raise ValueError(
                f"CropMirror: expected pictures of shape (channels, height, width), got shape {picture.shape}"
            )
        height, width = picture.shape[1:]
        crop_height, crop_width = (height, width) if self.crop is None else (self.crop, self.crop)
        if crop_height > height or crop_width > width:
            raise ValueError(f"crop: expected at most the pictures' {height} x {width}, got {self.crop}")
        mean = self.mean
        is_per_pixel = mean is not None and mean.shape == picture.shape
        if mean is not None and not is_per_pixel and mean.shape not in ((), (len(picture), 1, 1)):
            raise ValueError(f"mean: does not fit pictures of shape {picture.shape}: got shape {mean.shape}")
        if self.center:
            top, left = (height - crop_height) // 2, (width - crop_width) // 2
        else:
            top, left = random.integers((height - crop_height + 1, width - crop_width + 1)).tolist()
        window = np.s_[:, top : top + crop_height, left : left + crop_width]
        window_values = picture[window]
        if mean is not None or self.scale is not None:
            check_cast(window_values, np.float32, "CropMirror")
        if mean is not None:
            window_values = np.subtract(window_values, mean[window] if is_per_pixel else mean, dtype=np.float32)
        if self.scale is not None:
            window_values = np.multiply(window_values, self.scale, dtype=np.float32)
        if self.mirror and random.integers(2):
            window_values = window_values[:, :, ::-1]
        return (window_values, *other_arrays)
