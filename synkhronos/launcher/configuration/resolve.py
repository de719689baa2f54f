"""Resolution of settings: merges their sources, fills in defaults, and checks all values before any rank starts."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from synkhronos.checks import check_at_least, check_choice, is_number
from synkhronos.hosts import MAX_RANKS_PER_HOST
from synkhronos.launcher.configuration.model_file import find_module
from synkhronos.launcher.configuration.placement import choose_placement
from synkhronos.launcher.configuration.settings import (
    SETTINGS_FILE,
    Settings,
    SettingsError,
    check_model_options,
    convert_to_settings_error,
    normalize_rule_name,
)
from synkhronos.launcher.configuration.sources import merge_sources
from synkhronos.training.checkpoints.checkpoint import list_checkpoints
from synkhronos.training.monitoring.early_stopping import parse_monitored_metric

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
    """Merge and check the settings of the command line, the environment and the session file.

    The command line overrides the environment; `merge_sources` has the rules.  The folder of ``source_path``, a session
    file or script, is also searched for the model file.  Raise SettingsError if a setting is missing or wrong; the
    message begins with its name.
    """
    merged = merge_sources(sources)
    name, class_name = _read_string(merged, "modelfile"), _read_string(merged, "modelclass")
    if not name:
        raise SettingsError(
            "modelfile: expected the file to train: name a session file, or give --set model=FILE:CLASS"
        )
    if not class_name:
        raise SettingsError("modelclass: expected the class to train; name a session file, or model = 'FILE:CLASS'")
    source_folder = source_path and os.path.dirname(os.path.abspath(source_path))
    folders = [_read_expanded_path(merged, "pythonpath"), os.getcwd(), source_folder]
    pythonpath, module = find_module(name, class_name, [os.fspath(folder) for folder in folders if folder])
    n_ranks = None if merged.get("ranks") is None else _parse_integer(merged["ranks"], "ranks", 1, MAX_RANKS_PER_HOST)
    devices, hosts = choose_placement(merged.get("devices"), merged.get("hosts"), n_ranks)
    rule = normalize_rule_name(_read_string(merged, "rule") or Settings.rule)
    new_name = f"{class_name}-{rule}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    plain_values = {key: parse(merged[key], key) for key, parse in _PARSERS.items() if merged.get(key) is not None}
    settings = Settings(
        modelfile=module,
        modelclass=class_name,
        pythonpath=pythonpath,
        devices=devices,
        hosts=tuple(host.name if host.n_ranks is None else f"{host.name}:{host.n_ranks}" for host in hosts),
        rule=rule,
        rule_options=_parse_table(merged, "rule_options"),
        folder=os.path.abspath(_read_expanded_path(merged, "folder") or os.path.join("runs", new_name)),
        config=_parse_config(merged),
        model_options=_parse_model_options(merged),
        keep_best=_parse_keep_best(merged.get("keep_best")),
        resume=_parse_resume(_read_expanded_path(merged, "resume")),
        **plain_values,
    )
    settings.make_rule()  # its arguments are checked before the ranks start, which make the rule again
    _check_checkpoint_settings(settings)
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
    """Raise SettingsError if the run's folder can't be used for a new run, or has no checkpoint to resume from."""
    folder = Path(settings.folder)
    if (folder / "checkpoints").exists() and not (folder / "checkpoints").is_dir():
        raise SettingsError(f"folder: {folder / 'checkpoints'} has to be a folder, or nothing yet")
    if settings.resume is None:
        if (folder / SETTINGS_FILE).exists() and any(any(folder.glob(pattern)) for pattern in _RESULT_FILES):
            raise SettingsError(
                f"folder: {folder} has a run already: choose another folder, or continue the run with --resume"
            )
    elif settings.resume == "latest" and not list_checkpoints(folder / "checkpoints"):
        raise SettingsError(
            f"resume: expected a checkpoint in {folder / 'checkpoints'}, found none; folder has to be that of the run "
            "to resume"
        )


def _parse_resume(value: str | None) -> str | None:
    """Return "latest", the absolute path of a checkpoint, or None."""
    if value in (None, "latest"):
        return value
    path = Path(value).absolute()
    if not (path / "meta.json").exists():
        raise SettingsError(f"resume: expected 'latest' or a checkpoint's folder, got {value!r}")
    return str(path)


def _read_string(settings: Mapping[str, Any], key: str) -> str | None:
    value = settings.get(key)
    if value is None or isinstance(value, str):
        return value or None
    raise SettingsError(f"{key}: expected a string, got {value!r}")


def _read_expanded_path(settings: Mapping[str, Any], key: str) -> str | None:
    path = _read_string(settings, key)
    return path and os.path.expanduser(path)


def _parse_table(settings: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = settings.get(key, {})
    if not isinstance(value, Mapping):
        raise SettingsError(f"{key}: expected a table of names and values, got {value!r}")
    with convert_to_settings_error(f"{key}: expected numbers, strings, lists and tables: "):
        json.dumps(value)  # `Settings.save` writes them
    return dict(value)


def _parse_keep_best(value: object) -> list[str] | None:
    if value is None:
        return None
    with convert_to_settings_error():
        name, mode = parse_monitored_metric(value, "keep_best")
    if name not in _METRICS:
        raise SettingsError(f"keep_best: expected one of {', '.join(_METRICS)}, got {name!r}")
    return [name, mode]


def _parse_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    config = _parse_table(settings, "config")
    for key, hint in _RESERVED_CONFIG.items():
        if key in config:
            raise SettingsError(f"config: {key!r} is set by the run: {hint}")
    return config


def _parse_model_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    options = _parse_table(settings, "model_options")
    with convert_to_settings_error("model_options."):
        check_model_options(options)
    return options


def _parse_integer(value: object, key: str, minimum: int, maximum: int | None = None) -> int:
    with convert_to_settings_error():
        checked = check_at_least(value, key, minimum)
    if maximum is not None and checked > maximum:
        raise SettingsError(f"{key}: expected at most {maximum}, got {checked}")
    return checked


def _parse_seconds(value: Any, key: str) -> float:
    if not is_number(value) or not 0 <= value < math.inf:
        raise SettingsError(f"{key}: expected a number of seconds, got {value!r}")
    return float(value)


def _parse_flag(value: object, key: str) -> bool:
    word = str(value).lower()
    if word not in _TRUE_WORDS | _FALSE_WORDS:
        raise SettingsError(f"{key}: expected true or false, got {value!r}")
    return word in _TRUE_WORDS


def _parse_on_death(value: object, key: str) -> str:
    with convert_to_settings_error():
        return check_choice(value, key, ("stop", "continue"))


#: Parsers of settings with single values: take the value and its key, and return the value in a plain type.
_PARSERS: dict[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys(("epochs", "every", "keep", "max_deaths", "patience"), partial(_parse_integer, minimum=1)),
    **dict.fromkeys(("checkpoint", "restarts"), partial(_parse_integer, minimum=0)),
    "seed": partial(_parse_integer, minimum=0, maximum=2**32 - 1),
    **dict.fromkeys(("bind", "scale_lr", "timeline", "warmup"), _parse_flag),
    "grace": _parse_seconds,
    "on_death": _parse_on_death,
}
