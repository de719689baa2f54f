"""Options of a `Model`'s training step, which its class or the setting ``model_options`` has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from synkhronos.checks import check_at_least, check_choice, check_flag, check_positive
from synkhronos.training.updates.average import check_decay

#: Names of the options, and the values that change nothing.
DEFAULTS: dict[str, Any] = {
    "clip_norm": None,
    "num_slices": 1,
    "ema": None,
    "validate_ema": False,
    "loss_scale": None,
}


def check_options(options: Mapping[str, Any]) -> None:
    """Check names, types and ranges of options.

    Raises
    ------
    TypeError, ValueError
        If one is unknown or wrong; the message begins with its name.

    Examples
    --------
    >>> check_options({"clip_norm": 1.0, "ema": 0.999})
    >>> check_options({"clip_norm": 0})
    Traceback (most recent call last):
    ValueError: clip_norm: expected a positive number, got 0
    """
    for name in options:
        if name not in DEFAULTS:
            raise ValueError(f"{name}: unknown option, expected one of {', '.join(DEFAULTS)}")
    found = {**DEFAULTS, **options}
    if found["clip_norm"] is not None:
        check_positive(found["clip_norm"], "clip_norm")
    check_at_least(found["num_slices"], "num_slices", 1)
    if found["ema"] is not None:
        check_decay(found["ema"])
    check_flag(found["validate_ema"], "validate_ema")
    if found["loss_scale"] is not None:
        check_choice(found["loss_scale"], "loss_scale", ("dynamic",))
