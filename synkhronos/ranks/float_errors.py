"""Synchronisation of NumPy's floating-point error handling: workers use the master's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from synkhronos.ranks import Command, Rank, Session


@dataclass(frozen=True, slots=True)
class _SetFloatErrors(Command):
    """Apply the master's `numpy.geterr` on the workers."""

    settings: tuple[tuple[str, str], ...]

    def run(self, rank: Rank) -> None:
        if not rank.is_master:
            # "call" and "log" need a function or file of the master, which workers lack.
            np.seterr(**{kind: "warn" if how in ("call", "log") else how for kind, how in self.settings})  # type: ignore[arg-type]


class _SentSettings(dict[str, Any]):
    """The settings that were last sent to the workers; empty before."""


def sync_float_errors(session: Session) -> None:
    """Send the master's settings (`numpy.seterr`, `numpy.errstate`) to the workers if they have changed."""
    if session.size == 1:
        return
    settings, sent = np.geterr(), session.rank.registry.get_or_create(_SentSettings)
    if sent != settings:
        session.run(_SetFloatErrors(tuple((kind, str(how)) for kind, how in settings.items())))
        sent.update(settings)
