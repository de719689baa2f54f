"""Sources of settings: the session file, environment variables, and ``--set`` of the command line."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import tomllib
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from datetime import date, time
from pathlib import Path
from typing import Any

from synkhronos.checks import format_similar
from synkhronos.launcher.configuration import theano_mpi_session
from synkhronos.launcher.configuration.placement import parse_devices
from synkhronos.launcher.configuration.settings import SETTING_KEYS, Settings, SettingsError, merge_tables

#: Prefix of environment variables that are settings.
ENVIRONMENT_PREFIX = "SYNKHRONOS_"
#: Errors of `tomllib.loads` and `ast.literal_eval`.
_PARSE_ERRORS = ValueError, SyntaxError, MemoryError, RecursionError
#: Settings whose values are strings.
_STRING_SETTINGS = {"model"} | {setting.name for setting in fields(Settings) if setting.type in ("str", "str | None")}


def read_session_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a session file: ``.toml``, ``.json`` as `Settings.save` writes it, or else Theano-MPI's KEY=VALUE."""
    path = Path(path)
    try:
        text = path.read_text("utf-8-sig")  # TOML is UTF-8 in any locale; editors on Windows write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: expected a session file: {error}") from None
    if path.suffix not in (".json", ".toml"):
        try:
            return theano_mpi_session.to_settings(theano_mpi_session.parse_session(text))
        except ValueError as error:
            raise SettingsError(f"{path}: {error}") from None
    try:
        settings = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise SettingsError(f"{path}: {error}") from None
    if not isinstance(settings, dict):
        raise SettingsError(f"{path}: expected settings by name, got {settings!r}")
    check_setting_names(settings, str(path))
    return settings


def check_setting_names(settings: Mapping[str, Any], source: str) -> None:
    """Raise SettingsError for a name that is not a setting.  ``source`` is the source of the names."""
    for key in settings:
        if key not in SETTING_KEYS:
            raise SettingsError(
                f"{source}: {key!r} is not a setting{format_similar(key, SETTING_KEYS)}; for an argument of the class, "
                f"config.{key}. Settings are {', '.join(sorted(SETTING_KEYS))}"
            )


def parse_set_options(texts: Iterable[str]) -> dict[str, Any]:
    """Parse the values of all options ``--set`` of a command line."""
    return merge_tables(map(parse_set_option, texts))


def parse_set_option(text: str) -> dict[str, Any]:
    """Parse ``key=value``, or ``key.name=value`` for one entry of a table.  As in TOML, tables can be nested.

    Examples
    --------
    >>> parse_set_option("rule_options.period=4")
    {'rule_options': {'period': 4}}
    >>> parse_set_option("config.optimizer.lr=0.1")
    {'config': {'optimizer': {'lr': 0.1}}}
    """
    key, equals, value = text.partition("=")
    names = [name.strip() for name in key.split(".")]
    if not equals or not all(names):
        raise SettingsError(f"--set: expected KEY=VALUE, got {text!r}")
    if set(key) & set("'\""):
        raise SettingsError(f"--set: expected a key without quotation marks, got {text!r}")
    check_setting_names({names[0]: None}, "--set")
    parsed = _parse_value(value, names[0])
    for name in reversed(names):
        parsed = {name: parsed}
    return parsed


def _parse_value(text: str, setting: str) -> Any:
    """Parse the value of a setting, or of an entry of one: in TOML, or Python's True, False, None, number or list.

    Return dates, and any other text, unchanged.
    """
    value = text = text.strip()
    for parse in (_parse_toml, _parse_literal):
        with contextlib.suppress(*_PARSE_ERRORS):
            if not _ends_in_comment(text, parse):
                value = parse(text)
                break
    # Unquoted, a folder may be named as a number or a date.
    is_text = setting in _STRING_SETTINGS and not isinstance(value, str) or isinstance(value, date | time)
    return text if is_text else value


def _parse_toml(text: str) -> Any:
    table = tomllib.loads(f"value = {text}")
    if len(table) > 1:
        raise ValueError(f"expected one value, got {text!r}")
    return table["value"]


def _parse_literal(text: str) -> Any:
    with warnings.catch_warnings(action="ignore"):  # of the text's escape sequences
        literal = ast.literal_eval(text)
    return literal if isinstance(literal, bool | int | float | list | None) else text


def _ends_in_comment(text: str, parse: Callable[[str], Any]) -> bool:
    """Whether a parser ignores the end of a text, which may be part of a name such as ``1#2``."""
    with contextlib.suppress(*_PARSE_ERRORS):
        parse(f"{text} ]")
        return True
    return False


def read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings in environment variables such as SYNKHRONOS_DEVICES.

    Raise SettingsError for a variable whose name differs from a setting's by about a letter.
    """
    settings = {}
    for name, value in environment.items():
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
        if key in SETTING_KEYS:
            settings[key] = _parse_value(value, key)
        # Names unlike any setting are those of variables that other packages read.
        elif name != "SYNKHRONOS_DEVICE" and (similar := format_similar(key, SETTING_KEYS, 0.8)):
            raise SettingsError(f"environment: {name} is not a setting{similar}")
    return settings


def merge_sources(sources: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge settings of several sources.  Later sources override earlier ones, as in `merge_tables`.

    If a later source names another rule, the options of an earlier source's rule are dropped.  If a later source names
    devices, an earlier source's number of ranks is dropped.  If it has a number of ranks, an earlier source's GPUs are
    dropped, but not the device ``cpu``.
    """
    merged: dict[str, Any] = {}
    for source in map(_split_model, sources):
        rule = merged.get("rule")
        if rule is not None and "rule" in source and str(source["rule"]).lower() != str(rule).lower():
            merged.pop("rule_options", None)  # options of another rule
        if "devices" in source:
            merged.pop("ranks", None)
        elif "ranks" in source and merged.get("devices") is not None:  # the number of ranks determines the devices
            merged["devices"] = "cpu" if set(parse_devices(merged["devices"])) == {"cpu"} else None
        merged = merge_tables([merged, source])
    return merged


def _split_model(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add ``modelfile`` and ``modelclass`` to settings with ``model``, ``FILE:CLASS``."""
    if "model" not in source:
        return source
    name, _, class_name = str(source["model"]).rpartition(":")
    if not name:
        raise SettingsError(f"model: expected FILE:CLASS, got {source['model']!r}")
    return {**source, "modelfile": name, "modelclass": class_name}
