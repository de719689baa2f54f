"""Synchronization of the graph libraries' settings, such as ``config.floatX``, which users may change after `fork`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from synkhronos.graph_libraries import apply_settings, list_settings
from synkhronos.ranks import Command, Rank, Session


@dataclass(frozen=True, slots=True)
class _SetSettings(Command):
    """Apply the master's settings of each graph library, by import name, on the workers."""

    settings: dict[str, dict[str, Any]]

    def run(self, rank: Rank) -> None:
        if not rank.is_master:
            apply_settings(self.settings)


class _SentSettings(dict[str, Any]):
    """Settings as last sent to the workers, empty before the first time."""


def sync_settings(session: Session) -> None:
    """Send the master's settings to the workers if they have changed; each rank compiles with its own settings."""
    if session.size == 1:
        return
    # The rank's registry, which is empty in a new group: its workers may have older settings.
    settings, sent = list_settings(), session.rank.registry.get_or_create(_SentSettings)
    if sent != settings:
        session.run(_SetSettings(settings))
        sent.clear()
        sent.update(settings)
