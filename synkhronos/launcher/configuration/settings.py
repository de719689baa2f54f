"""The settings of a run, as `resolve_settings` makes them and as its ranks read them from ``settings.json``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from synkhronos import exchange_rules
from synkhronos.checks import format_similar
from synkhronos.training.train_function.step_options import StepOptions, check_step_options

#: File in a run's folder to which `Settings.save` writes.
SETTINGS_FILE = "settings.json"
#: Exchange rules by their names in lower case.
EXCHANGE_RULE_CLASSES: dict[str, type[exchange_rules.ExchangeRule]] = {
    name.lower(): kind
    for name, kind in vars(exchange_rules).items()
    if isinstance(kind, type)
    and issubclass(kind, exchange_rules.ExchangeRule)
    and kind is not exchange_rules.ExchangeRule
}
#: Names of the options of a model's step: attributes of its class, which the setting ``model_options`` overrides.
MODEL_OPTION_NAMES = tuple(option.name for option in dataclasses.fields(StepOptions))


class SettingsError(ValueError):
    """A setting or its source is wrong.  The message begins with the name of either."""


@contextmanager
def convert_to_settings_error(prefix: str = "") -> Iterator[None]:
    """Convert errors of argument checks in a ``with`` block to SettingsError, with a prefix of the message."""
    try:
        yield
    except SettingsError:
        raise
    except (TypeError, ValueError, OSError) as error:
        raise SettingsError(f"{prefix}{error}") from None


@dataclass(frozen=True)
class Settings:
    """Checked settings of a run; the table of docs/launcher.rst has the meaning of each.

    A new setting also needs a parser in `resolve._PARSERS`, and a row in the table.
    """

    #: Name under which Python imports the module with the model class, such as ``"models.mlp"``, even if the user's
    #: setting is a path.
    modelfile: str
    modelclass: str
    #: Folder to which the module's name is relative; ranks put it first in `sys.path`.
    pythonpath: str
    #: Device of each rank of this machine: all ``"cpu"``, or ``"cuda0"`` and so on.
    devices: tuple[str, ...]
    #: Names of the machines with ranks, this one first, with optional numbers of ranks: ``"b:3"``.  Empty for one
    #: machine.
    hosts: tuple[str, ...] = ()
    #: Name of the exchange rule's class, and the options that its constructor takes.
    rule: str = "BSP"
    rule_options: dict[str, Any] = field(default_factory=dict)
    #: Absolute path of the run's folder.
    folder: str = ""
    #: Number of epochs; None: the class's ``n_epochs``.
    epochs: int | None = None
    #: Seed of each rank's ``numpy.random`` and ``random``.
    seed: int = 0
    #: Whether ranks are bound to cores.
    bind: bool = True
    #: Entries of the class's argument ``config`` as the user gave them; the run adds others.
    config: dict[str, Any] = field(default_factory=dict)
    #: Values of `MODEL_OPTION_NAMES`, which override attributes of the class.
    model_options: dict[str, Any] = field(default_factory=dict)
    #: Interval between two lines of a rank's record, in steps.
    every: int = 40
    #: Interval between checkpoints in epochs; 0: no checkpoints.
    checkpoint: int = 0
    #: Number of checkpoints that are kept.
    keep: int = 3
    #: Seconds that ranks have to write a checkpoint after a scheduler's signal.  With 0, ranks are killed at once.
    grace: float = 30.0
    #: Number of times that the ranks are started again after a failure.
    restarts: int = 0
    #: Reaction to the death of a process: ``"stop"``, or ``"continue"`` from a memory checkpoint.
    on_death: str = "stop"
    #: Largest number of deaths from which ``on_death="continue"`` recovers; the next one ends the run.
    max_deaths: int = 100
    #: Number of epochs without an improvement after which the run stops; None without early stopping.
    patience: int | None = None
    #: Metric whose best checkpoint is kept, and "min" or "max".
    keep_best: list[str] | None = None
    #: Whether the class's ``scale_lr(size)`` is called.
    scale_lr: bool = False
    #: Whether ``shared_lr`` rises over epochs 1 to 5; None: depends on the exchange rule and the class.
    warmup: bool | None = None
    #: Whether a timeline is recorded.
    timeline: bool = False
    #: ``"latest"`` or the path of a checkpoint from which the run resumes; None: a new run.
    resume: str | None = None

    def make_exchange_rule(self) -> exchange_rules.ExchangeRule:
        """Make the exchange rule.  For BSP it is the rule that averages parameters.

        Ranks that exchange gradients replace it by `GradientSumRule`.
        """
        exchange_rule_class, options = EXCHANGE_RULE_CLASSES[self.rule.lower()], self.rule_options
        if exchange_rule_class is exchange_rules.EAMSGD:
            raise SettingsError("rule: EAMSGD needs the velocities, which a model class does not name: use EASGD")
        if exchange_rule_class is exchange_rules.BSP:
            # The instance on each rank determines whether gradients can be exchanged: `compile_model`.
            if options.get("average") not in (None, "gradient", "params"):
                raise SettingsError(
                    f"rule_options.average: expected 'gradient' or 'params', got {options['average']!r}"
                )
            options = {**options, "average": "params"}
        with convert_to_settings_error("rule_options: "):
            return exchange_rule_class(**options)

    @property
    def saves_on_signal(self) -> bool:
        """Whether ranks write a checkpoint at a scheduler's signal."""
        return bool(self.checkpoint and self.grace)

    @property
    def uses_gpus(self) -> bool:
        """Whether ranks compute on GPUs."""
        return self.devices[0] != "cpu"

    def save(self) -> None:
        """Write the settings into the run's folder, as a session file in JSON."""
        Path(self.folder, SETTINGS_FILE).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, folder: str) -> Settings:
        """Read the settings that `save` has written into a run's folder."""
        settings = json.loads(Path(folder, SETTINGS_FILE).read_text())
        return cls(**{**settings, "devices": tuple(settings["devices"]), "hosts": tuple(settings["hosts"])})


#: Keys of session files, the environment and ``--set``; ``model`` sets both ``modelfile`` and ``modelclass``.
SETTING_KEYS = ("model", "ranks", *(setting.name for setting in dataclasses.fields(Settings)))


def check_model_options(options: Mapping[str, Any]) -> None:
    """Check names, types and ranges of options.  Raise TypeError or ValueError, with the option's name first."""
    for name in options:
        if name not in MODEL_OPTION_NAMES:
            similar = format_similar(name, MODEL_OPTION_NAMES)
            raise ValueError(f"{name}: unknown option{similar}; options are {', '.join(MODEL_OPTION_NAMES)}")
    check_step_options(options)


def normalize_exchange_rule_name(name: str) -> str:
    """Return the name of an exchange rule's class from its name in upper or lower case."""
    if name.lower() not in EXCHANGE_RULE_CLASSES:
        names = ", ".join(
            sorted(kind.__name__ for kind in EXCHANGE_RULE_CLASSES.values() if kind is not exchange_rules.EAMSGD)
        )
        raise SettingsError(f"rule: expected one of {names}, got {name!r}")
    return EXCHANGE_RULE_CLASSES[name.lower()].__name__


def merge_tables(tables: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge settings.  Later tables override earlier ones, and nested tables are merged entry by entry."""
    merged: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
                value = merge_tables([merged[key], value])
            merged[key] = value
    return merged
