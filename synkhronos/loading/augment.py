"""What happens to a row on the way.

`CropMirror`
    Crops, mirrors, and subtracts a mean.
`generator`
    The random numbers of one row.

An augmentation is anything that is called with a row, a tuple of arrays, and a generator of random numbers, and returns
a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from synkhronos.casts import as_numbers, cast, check_cast
from synkhronos.checks import at_least, flag, number


def generator(seed: int, epoch: int, row: int) -> np.random.Generator:
    """Return the random numbers of a row in an epoch; they depend on nothing else."""
    return np.random.default_rng((seed, epoch, row, 1))  # (seed, epoch) is that of the order of rows


class CropMirror:
    """Cuts a window out of each picture, mirrors half of them at random, and subtracts a mean.

    A picture is the first array of a row, channels first: of shape ``(channels, height, width)``.

    Parameters
    ----------
    crop : int, optional
        The window's height and width.  By default all of the picture.
    mirror : bool
        Whether half of the pictures, at random, are turned left to right.
    mean : number or array_like, optional
        What to subtract: a number, one for each channel, or a picture of the size before the crop.
    scale : number, optional
        The factor by which the result is multiplied.
    center : bool
        Whether the window is in the middle, as for validation, and not at a random place.

    Notes
    -----
    With ``mean`` or ``scale`` pictures become float32, which has to hold their numbers (float64 is rounded); else they
    keep their dtype.  Where a window is, and whether it is mirrored, follows from the seed, the epoch and the row.

    Examples
    --------
    >>> import numpy as np
    >>> cut = CropMirror(crop=2, mean=1, center=True)
    >>> picture, label = cut((np.arange(16, dtype="uint8").reshape(1, 4, 4), 3), None)
    >>> picture[0].tolist(), label
    ([[4.0, 5.0], [8.0, 9.0]], 3)
    """

    def __init__(
        self,
        crop: int | None = None,
        mirror: bool = False,
        mean: npt.ArrayLike | None = None,
        scale: float | None = None,
        center: bool = False,
    ):
        self.crop = None if crop is None else at_least(crop, "crop", 1)
        self.mirror, self.center = flag(mirror, "mirror"), flag(center, "center")
        self.scale = None if scale is None else np.float32(cast(number(scale, "scale"), np.float32, "scale"))
        self.mean = None if mean is None else cast(mean, np.float32, "mean")
        if self.mean is not None and self.mean.ndim not in (0, 1, 3):
            raise ValueError(
                f"mean: expected a number, one for each channel, or a picture, got an array of shape {self.mean.shape}"
            )
        if self.mean is not None and self.mean.ndim == 1:
            self.mean = self.mean[:, None, None]

    def __call__(self, row: tuple[Any, ...], random: np.random.Generator) -> tuple[Any, ...]:
        """Return a row with another picture."""
        picture, rest = as_numbers(row[0], "CropMirror"), row[1:]
        if picture.ndim != 3:
            raise ValueError(
                f"CropMirror: expected pictures of shape (channels, height, width), got shape {picture.shape}"
            )
        height, width = picture.shape[1:]
        crop_height, crop_width = (height, width) if self.crop is None else (self.crop, self.crop)
        if crop_height > height or crop_width > width:
            raise ValueError(f"crop: expected at most the pictures' {height} x {width}, got {self.crop}")
        mean = self.mean
        whole = mean is not None and mean.shape == picture.shape
        if mean is not None and not whole and mean.shape not in ((), (len(picture), 1, 1)):
            raise ValueError(f"mean: expected one for pictures of shape {picture.shape}, got shape {mean.shape}")
        if self.center:
            top, left = (height - crop_height) // 2, (width - crop_width) // 2
        else:
            top, left = random.integers((height - crop_height + 1, width - crop_width + 1)).tolist()
        window = np.s_[:, top : top + crop_height, left : left + crop_width]
        cut = picture[window]
        if mean is not None or self.scale is not None:
            check_cast(cut, np.float32, "CropMirror")
        if mean is not None:
            cut = np.subtract(cut, mean[window] if whole else mean, dtype=np.float32)
        if self.scale is not None:
            cut = np.multiply(cut, self.scale, dtype=np.float32)
        if self.mirror and random.integers(2):
            cut = cut[:, :, ::-1]
        return (cut, *rest)
