"""Checkpoints of format 2, in which some entries of trainers and of runs had other names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: Present names by the names in format 2, for each entry of ``meta`` with renamed keys.
_RENAMED_KEYS = {
    "stop": {"measure": "label", "best": "cost", "since": "n_reports_since_best"},
    "schedule": {"made": "identity", "since": "n_bad_reports"},
}


def convert_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``meta`` of a checkpoint of format 2 with the present names."""
    renamed = {
        entry: {names.get(key, key): value for key, value in meta[entry].items()}
        for entry, names in _RENAMED_KEYS.items()
        if _is_of_training(meta) and entry in meta
    }
    return {**meta, **renamed}


def convert_arrays(arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of a checkpoint of format 2 by their present names."""
    if not _is_of_training(meta):
        return dict(arrays)
    return {re.sub(r"^(\d+)\.since$", r"\1.steps_since_exchange", name): array for name, array in arrays.items()}


def _is_of_training(meta: Mapping[str, Any]) -> bool:
    """Return whether the library wrote the checkpoint, rather than a call of `CheckpointFolder.save` by a user."""
    return meta.get("kind") in ("trainer", "run")
