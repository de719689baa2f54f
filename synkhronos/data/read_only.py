"""Base class of `Data` objects that can't be changed."""

from __future__ import annotations

from typing import Any, NoReturn

from synkhronos import ranks
from synkhronos.data.array import Data


class ReadOnlyData(Data):
    """A `Data` object whose content and shape can't be changed."""

    #: Source of the rows in errors, such as a path.
    _source: str

    def _map_segment(self, segment: ranks.Segment, shape: tuple[int, ...], offset: int = 0) -> None:
        """Set the content to the array that begins at byte ``offset`` of a segment.  The call lock is held."""
        self._replace_segment(segment)
        self._array = segment.view_array(shape, self.dtype, offset)
        self._array.flags.writeable = False

    def _get_segment_key(self) -> int:
        """Return the segment's key; raise ValueError if the memory was freed."""
        self._check_open()
        if self._segment is None:
            raise ValueError(f"{self._source}: this Data object's memory was freed: make a new one")
        return self._segment.key

    def __setitem__(self, key: object, value: Any) -> None:
        self._raise_read_only()

    def _reshape_under_lock(self, *arguments: Any, **options: Any) -> NoReturn:
        self._raise_read_only()

    def _raise_read_only(self) -> NoReturn:
        raise ValueError(f"{self._source}: this Data can't be changed: synkhronos.data(array) is a copy that can")
