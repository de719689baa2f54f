"""What workers do about floating-point errors: what the master does.

`follow`
    Has the workers take over what the user has set by `numpy.seterr` or `numpy.errstate`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from synkhronos.ranks import Command, Rank, Session


class _TreatFields(NamedTuple):
    errors: tuple[tuple[str, str], ...]


class _Treat(_TreatFields, Command):
    """Treat errors from now on as the master does."""

    __slots__ = ()

    def run(self, rank: Rank) -> None:
        if not rank.is_master:
            # What the master calls, or writes to, is not here.
            np.seterr(**{kind: "warn" if how in ("call", "log") else how for kind, how in self.errors})  # type: ignore[arg-type]


class _Told(dict[str, Any]):
    """What the workers were told last."""


def follow(session: Session) -> None:
    """Tell the workers how the master treats floating-point errors, if that has changed."""
    if session.size == 1:  # there is nobody to tell
        return
    errors = np.geterr()
    told = session.registry.get(_Told)
    if told != errors:
        session.run(_Treat(tuple((kind, str(how)) for kind, how in errors.items())))
        told.update(errors)
