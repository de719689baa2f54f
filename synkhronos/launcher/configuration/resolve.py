"""Resolution of settings: merges their sources, fills in defaults, and checks all values before any rank starts."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from synkhronos.checks import check_at_least, check_choice, is_number
from synkhronos.hosts import MAX_RANKS_PER_HOST
from synkhronos.launcher.configuration.model_file import locate_model_class
from synkhronos.launcher.configuration.placement import choose_placement
from synkhronos.launcher.configuration.settings import (
    SETTINGS_FILE,
    Settings,
    SettingsError,
    check_model_options,
    convert_to_settings_error,
    normalize_exchange_rule_name,
)
from synkhronos.launcher.configuration.sources import merge_sources
from synkhronos.training.checkpoints.checkpoint_folder import is_in_folder, list_checkpoints
from synkhronos.training.monitoring.best_cost import parse_monitored_metric

_TRUE_WORDS = {"true", "yes", "on", "1"}
_FALSE_WORDS = {"false", "no", "off", "0"}
#: Entries of a model class's config that the run sets, and a hint for the error if the user sets them.
_RESERVED_CONFIG = {
    "rank": "each rank has its own",
    "size": "set the number of ranks by 'ranks'",
    "verbose": "it is true on rank 0",
    "seed": "use the setting 'seed'",
    "mname": "it is the class's name",
}
#: Metrics of an epoch: the mean training cost, and the metrics of `ModelRecorder.val_error`.
_METRICS = ("loss", "cost", "error", "top5")
#: Files of results.  A run may use a folder that has settings but none of these.
_RESULT_FILES = ("rank-*.jsonl", "reports.jsonl", "params.npz", "checkpoints")


def resolve_settings(
    sources: Sequence[Mapping[str, Any]], source_path: str | os.PathLike[str] | None = None
) -> Settings:
    """Merge and check the settings of the session file, the environment and the command line.

    The last overrides the others; `merge_sources` has the rules.  The folder of ``source_path``, a session
    file or script, is also searched for the model file.  Raise SettingsError if a setting is missing or wrong; the
    message begins with its name.
    """
    merged = merge_sources(sources)
    with convert_to_settings_error():
        parsed = {key: parse(merged[key], key) for key, parse in _PARSERS.items() if merged.get(key) is not None}
    values = {key: value for key, value in parsed.items() if value is not None}
    if "modelfile" not in values:
        raise SettingsError(
            "modelfile: expected the file to train: name a session file, or give --set model=FILE:CLASS"
        )
    if "modelclass" not in values:
        raise SettingsError("modelclass: expected the class to train; name a session file, or model = 'FILE:CLASS'")
    source_folder = source_path and os.path.dirname(os.path.abspath(source_path))
    folders = [os.fspath(folder) for folder in (values.get("pythonpath"), os.getcwd(), source_folder) if folder]
    with convert_to_settings_error("modelfile: "):
        values["pythonpath"], values["modelfile"] = locate_model_class(
            values["modelfile"], values["modelclass"], folders
        )
    values["devices"], hosts = choose_placement(merged.get("devices"), merged.get("hosts"), values.pop("ranks", None))
    values["hosts"] = tuple(host.name if host.n_ranks is None else f"{host.name}:{host.n_ranks}" for host in hosts)
    rule = values.get("rule", Settings.rule)
    new_name = f"{values['modelclass']}-{rule}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    values["folder"] = os.path.abspath(values.get("folder", os.path.join("runs", new_name)))
    settings = Settings(**values)
    settings.make_exchange_rule()  # its arguments are checked before the ranks start, which make the rule again
    _check_checkpoint_settings(settings)
    with convert_to_settings_error("folder: "):
        _check_folder(settings)
    return settings


def _check_checkpoint_settings(settings: Settings) -> None:
    """Raise SettingsError if a setting needs a missing package, or checkpoints that the run does not write."""
    for name in ("checkpoint", "keep_best", "resume", "on_death"):
        value = getattr(settings, name)
        if value and value != "stop" and find_spec("safetensors") is None:
            raise SettingsError(f"{name}: needs safetensors: pip install 'synkhronos[training]'")
    if settings.restarts and not (settings.checkpoint or settings.keep_best):
        raise SettingsError("restarts: needs checkpoints: set 'checkpoint', the number of epochs between two")


def _check_folder(settings: Settings) -> None:
    """Raise SettingsError if the folder has another run than the one to resume, or no checkpoint to resume from."""
    folder, resume = Path(settings.folder), settings.resume
    if resume is None or resume != "latest" and not is_in_folder(resume, folder / "checkpoints"):
        if (folder / SETTINGS_FILE).exists() and any(any(folder.glob(pattern)) for pattern in _RESULT_FILES):
            found = "a run already" if resume is None else f"another run than {resume}"
            raise SettingsError(
                f"folder: {folder} has {found}: choose another folder, or continue the run with --resume"
            )
    elif resume == "latest" and not list_checkpoints(folder / "checkpoints"):
        raise SettingsError(
            f"resume: expected a checkpoint in {folder / 'checkpoints'}, found none; folder has to be that of the run "
            "to resume"
        )


# -- parsers: take the value of a setting and its key, and return a plain value, or None for an empty string -----------


def _parse_string(value: object, key: str) -> str | None:
    if isinstance(value, str):
        return value or None
    raise TypeError(f"{key}: expected a string, got {value!r}")


def _parse_path(value: object, key: str) -> str | None:
    path = _parse_string(value, key)
    return path and os.path.expanduser(path)


def _parse_rule(value: object, key: str) -> str | None:
    name = _parse_string(value, key)
    return name and normalize_exchange_rule_name(name)


def _parse_resume(value: object, key: str) -> str | None:
    """Return "latest", the absolute path of a checkpoint, or None."""
    path = _parse_path(value, key)
    if path in (None, "latest"):
        return path
    if not os.path.exists(os.path.join(path, "meta.json")):
        raise ValueError(f"{key}: expected 'latest' or a checkpoint's folder, got {path!r}")
    return str(Path(path).absolute())


def _parse_table(value: object, key: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{key}: expected a table of names and values, got {value!r}")
    with convert_to_settings_error(f"{key}: expected numbers, strings, lists and tables: "):
        json.dumps(value)  # `Settings.save` writes them
    _check_names(value, key)
    return dict(value)


def _check_names(value: object, key: str) -> None:
    """Raise TypeError for a name in a table, or in a table within it, that is not a string: JSON would make it one."""
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise TypeError(f"{key}: expected names that are strings, got {name!r}")
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            _check_names(item, key)


def _parse_keep_best(value: object, key: str) -> list[str]:
    name, mode = parse_monitored_metric(value, key)
    if name not in _METRICS:
        raise ValueError(f"{key}: expected one of {', '.join(_METRICS)}, got {name!r}")
    return [name, mode]


def _parse_config(value: object, key: str) -> dict[str, Any]:
    config = _parse_table(value, key)
    for name, hint in _RESERVED_CONFIG.items():
        if name in config:
            raise ValueError(f"{key}: {name!r} is set by the run: {hint}")
    return config


def _parse_model_options(value: object, key: str) -> dict[str, Any]:
    options = _parse_table(value, key)
    with convert_to_settings_error(f"{key}."):
        check_model_options(options)
    return options


def _parse_integer(value: object, key: str, minimum: int, maximum: int | None = None) -> int:
    checked = check_at_least(value, key, minimum)
    if maximum is not None and checked > maximum:
        raise ValueError(f"{key}: expected at most {maximum}, got {checked}")
    return checked


def _parse_seconds(value: Any, key: str) -> float:
    if not is_number(value) or not 0 <= value < math.inf:
        raise ValueError(f"{key}: expected a number of seconds, got {value!r}")
    return float(value)


def _parse_flag(value: object, key: str) -> bool:
    word = str(value).lower()
    if word not in _TRUE_WORDS | _FALSE_WORDS:
        raise ValueError(f"{key}: expected true or false, got {value!r}")
    return word in _TRUE_WORDS


_PARSERS: dict[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys(("modelfile", "modelclass"), _parse_string),
    **dict.fromkeys(("pythonpath", "folder"), _parse_path),
    "rule": _parse_rule,
    "resume": _parse_resume,
    "rule_options": _parse_table,
    "config": _parse_config,
    "model_options": _parse_model_options,
    "keep_best": _parse_keep_best,
    "ranks": partial(_parse_integer, minimum=1, maximum=MAX_RANKS_PER_HOST),
    **dict.fromkeys(("epochs", "every", "keep", "max_deaths", "patience"), partial(_parse_integer, minimum=1)),
    **dict.fromkeys(("checkpoint", "restarts"), partial(_parse_integer, minimum=0)),
    "seed": partial(_parse_integer, minimum=0, maximum=2**32 - 1),
    **dict.fromkeys(("bind", "scale_lr", "timeline", "warmup"), _parse_flag),
    "grace": _parse_seconds,
    "on_death": partial(check_choice, choices=("stop", "continue")),
}
# `choose_placement` parses these two.
assert _PARSERS.keys() - {"ranks"} == {setting.name for setting in fields(Settings)} - {"devices", "hosts"}
