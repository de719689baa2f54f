"""Options of a training step that training functions, trainers and the launcher's models have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from synkhronos.checks import check_at_least, check_choice, check_flag, check_number, check_positive


@dataclass(frozen=True)
class StepOptions:
    """Options of a training step, checked; each is described at `make_train_function` or `make_trainer`."""

    clip_norm: float | None = None
    num_slices: int = 1
    ema: float | None = None
    validate_ema: bool = False
    loss_scale: str | None = None
    shard_optimizer: bool = False

    def __post_init__(self) -> None:
        check_step_options(asdict(self))
        if self.validate_ema and self.ema is None:
            raise ValueError("validate_ema: needs ema, the decay of the averages")

    @property
    def non_defaults(self) -> dict[str, Any]:
        """Options that differ from their defaults, by name."""
        return {name: value for name, value in asdict(self).items() if value != _DEFAULTS[name]}


_DEFAULTS = {option.name: option.default for option in fields(StepOptions)}


def check_step_options(options: Mapping[str, Any]) -> None:
    """Check the type and the range of each option."""
    values = {**_DEFAULTS, **options}
    if values["clip_norm"] is not None:
        check_positive(values["clip_norm"], "clip_norm")
    check_at_least(values["num_slices"], "num_slices", 1)
    ema = values["ema"]
    if ema is not None and not 0 < check_number(ema, "ema", "a number between 0 and 1") < 1:
        raise ValueError(f"ema: expected a number between 0 and 1, such as 0.999, got {ema!r}")
    if values["loss_scale"] is not None:
        check_choice(values["loss_scale"], "loss_scale", ("dynamic",))
    for name in ("validate_ema", "shard_optimizer"):
        check_flag(values[name], name)
