"""What `Data` objects share that can't be changed.

`FixedData`
    Refuses changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy.typing as npt

from synkhronos import ranks
from synkhronos.data.array import Data


class FixedData(Data):
    """A `Data` object whose content and shape stay as they are."""

    #: Where the rows come from, as errors say it.
    origin: str

    def _lie_fixed_in(self, segment: ranks.Segment, shape: tuple[int, ...], offset: int = 0) -> None:
        """Be the array of a segment that ranks know already, or hear of with the next command; in a turn."""
        self._lie_in(segment)
        self._array = segment.array(shape, self.dtype, offset)
        self._array.flags.writeable = False

    def _key(self) -> int:
        """Return the segment's key, if it has not been freed."""
        self._check()
        if self._segment is None:
            raise ValueError(f"{self.origin}: this Data object's memory was freed: make a new one")
        return self._segment.key

    def _refuse(self) -> NoReturn:
        raise ValueError(f"{self.origin}: this Data can't be changed: synkhronos.data(array) is a copy that can")

    def __setitem__(self, key: Any, value: Any) -> None:
        self._refuse()

    def set_value(self, x: npt.ArrayLike, force_cast: bool = False, oversize: float = 1) -> None:
        """Refuse: the content stays."""
        self._refuse()

    def set_shape(self, shape: int | Sequence[int], oversize: float = 1) -> None:
        """Refuse: the shape stays."""
        self._refuse()
