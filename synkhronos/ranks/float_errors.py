"""Synchronisation of NumPy's floating-point error handling: workers use the master's settings."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from synkhronos.ranks import Command, Rank, Session


class _SetFloatErrorsFields(NamedTuple):
    settings: tuple[tuple[str, str], ...]


class _SetFloatErrors(_SetFloatErrorsFields, Command):
    """Apply the master's `numpy.geterr` on the workers."""

    __slots__ = ()

    def run(self, rank: Rank) -> None:
        if not rank.is_master:
            # "call" and "log" need a function or file of the master, which workers lack.
            np.seterr(**{kind: "warn" if how in ("call", "log") else how for kind, how in self.settings})  # type: ignore[arg-type]


class _SentSettings:
    """Record of the settings that were last sent to the workers.

    Attributes
    ----------
    settings : dict or None
        As `numpy.geterr` returns it; None if nothing was sent to the present workers.
    """

    def __init__(self) -> None:
        self.settings: Any = None

    @classmethod
    def create(cls, session: Session) -> _SentSettings:
        """Return a record that is cleared when workers are replaced."""
        sent = cls()
        session.add_replacement_callback(sent, cls._clear)
        return sent

    def _clear(self) -> None:
        self.settings = None


def sync_float_errors(session: Session) -> None:
    """Send the master's settings (`numpy.seterr`, `numpy.errstate`) to the workers if they have changed."""
    if session.size == 1:
        return
    settings = np.geterr()
    sent = session.registry.get(_SentSettings, lambda: _SentSettings.create(session))
    if sent.settings != settings:
        session.run(_SetFloatErrors(tuple((kind, str(how)) for kind, how in settings.items())))
        sent.settings = settings
