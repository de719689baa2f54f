"""Parser of Theano-MPI's session files, ``KEY=VALUE``.

Theano-MPI runs session files in bash.  This parser reads only the assignments: it expands nothing and runs nothing.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from typing import Any

from synkhronos.launcher.configuration.settings import merge_tables

#: Settings for each value of the two keys that describe BSP's exchange.
_SYNC_TYPES: dict[str, dict[str, Any]] = {
    "avg": {"rule_options": {"average": "params"}},
    "cdd": {"rule_options": {"average": "gradient"}},
    "swap": {"rule": "Swap"},
}
_EXCH_STRATEGIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("ar", "nccl32", "asa32", "copper"), {}),
    **dict.fromkeys(("nccl16", "asa16", "copper16"), {"rule_options": {"precision": "float16"}}),
}
#: Names of these keys in all versions of Theano-MPI, in lower case and without "_".
_EXCHANGE_KEYS = {
    **dict.fromkeys(("bspsynctype", "synctype", "syncrule"), _SYNC_TYPES),
    **dict.fromkeys(("bspexchstrategy", "exchstrategy", "exchstrat", "strategy"), _EXCH_STRATEGIES),
}
#: Name of the setting for each other key.
_SETTINGS_BY_KEY = {
    "rule": "rule",
    "modelfile": "modelfile",
    "modelclass": "modelclass",
    "bind": "bind",
    "session": "folder",
}
#: A quoted string, an escape, or a character of a word.
_WORD_PART = r"""'[^']*'|"(?:[^"\\]|\\.)*+"|\\.|[^\s'"\\();\#]"""
_WORD = rf"(?:{_WORD_PART})(?:{_WORD_PART}|\#)*+"
_SPACE = r"(?:[ \t\r\f\v]|\\\n)*+"
_COMMENT = r"\#[^\n]*"
#: Bash takes a "#" for the beginning of a comment, except within a word, such as just after "=".
_VALUE = rf"(?P<word>(?:(?<==)\#)?{_WORD}|(?<==)\#)?|\((?P<words>(?:\s|\\\n|{_COMMENT}|{_WORD})*+)\)"
#: An assignment with its end, or space and comments between assignments, or a line that is neither.
_STATEMENT = re.compile(
    rf"(?:export[ \t]{_SPACE})?(?P<key>[A-Za-z_]\w*+){_SPACE}={_SPACE}(?:{_VALUE}){_SPACE}"
    rf"(?:(?<!=){_COMMENT})?(?:[;\n]|\Z)|[\s;]|\\\n|{_COMMENT}|(?P<wrong>[^\n]+)",
    re.DOTALL,
)


def parse_exchange_option(key: str, value: str) -> dict[str, Any]:
    """Return the settings for ``sync_type`` or ``exch_strategy``, by its name in Theano-MPI or in a session file.

    Raise ValueError if the value is unknown.

    Examples
    --------
    >>> parse_exchange_option("exch_strategy", "nccl16")
    {'rule_options': {'precision': 'float16'}}
    """
    settings_by_value = _EXCHANGE_KEYS[_normalize_key(key)]
    if value.lower() not in settings_by_value:
        raise ValueError(f"{key}: expected one of {', '.join(settings_by_value)}, got {value!r}")
    return settings_by_value[value.lower()]


def parse_session(text: str) -> dict[str, str | list[str]]:
    r"""Return the assignments of a session file: a string per key, or a list for an array.

    Raise ValueError if a line is not an assignment; the message begins with its number.

    Examples
    --------
    >>> parse_session("RULE='BSP' # this one\nDEVICES=(a:cuda0\n  b:cuda0,cuda1)")
    {'RULE': 'BSP', 'DEVICES': ['a:cuda0', 'b:cuda0,cuda1']}
    """
    assignments: dict[str, str | list[str]] = {}
    for match in _STATEMENT.finditer(text):
        key, word, words, wrong = match.groups()
        try:
            if wrong:
                raise ValueError(
                    "expected KEY=VALUE or KEY=(VALUE ...), with quotation marks around a value that has spaces, or a "
                    f".toml file, got {wrong!r}"
                )
            if words is not None:
                found = re.finditer(rf"{_COMMENT}|({_WORD})", words, re.DOTALL)
                assignments[key] = [_unquote(item[1]) for item in found if item[1]]
            elif key:
                assignments[key] = _unquote(word or "")
        except ValueError as error:
            number = text.count("\n", 0, match.start()) + 1
            raise ValueError(f"line {number}: {error}") from None
    return assignments


def to_settings(assignments: Mapping[str, str | list[str]]) -> dict[str, Any]:
    """Convert assignments to settings.  Raise ValueError if a key is unknown, or its value is wrong."""
    values = {_normalize_key(key): (key, value) for key, value in assignments.items() if value}
    settings: dict[str, Any] = {}
    exchange: list[dict[str, Any]] = []
    for name, (key, value) in values.items():
        if name == "devices":
            settings |= parse_device_lists([value] if isinstance(value, str) else value)
            continue
        if not isinstance(value, str):
            raise ValueError(f"{key}: expected one value, got {' '.join(value)}")
        if name in _EXCHANGE_KEYS:
            exchange.append(parse_exchange_option(key, value))
        elif name == "size":
            if "devices" not in values:  # else tmlauncher counts the devices
                if not value.isdecimal():
                    raise ValueError(f"{key}: expected a number of ranks, got {value!r}")
                settings["ranks"] = int(value)
        elif name in _SETTINGS_BY_KEY:
            settings[_SETTINGS_BY_KEY[name]] = value
        else:
            raise ValueError(
                f"{key!r} is not a setting: expected RULE, MODELFILE, MODELCLASS, DEVICES, SIZE, BIND, SESSION, "
                "BSP_SYNC_TYPE or BSP_EXCH_STRATEGY; take a .toml file for others"
            )
    is_bsp = str(settings.get("rule", "BSP")).upper() == "BSP"
    return merge_tables([settings, *exchange]) if is_bsp else settings


def parse_device_lists(values: list[str]) -> dict[str, Any]:
    """Return the settings for a list of devices, ``cuda0,cuda1``, or for one list per host, ``node0:cuda0,cuda1``.

    Raise ValueError if only some lists name a host, or a host's devices are not its first ones in order.

    Examples
    --------
    >>> parse_device_lists(["a:cuda0", "b:cuda0,cuda1"])
    {'hosts': ['a:1', 'b:2'], 'devices': 'cuda0'}
    """
    if not any(":" in value for value in values):
        return {"devices": ",".join(values)}
    by_host: list[tuple[str, list[str]]] = []
    for value in values:
        host, colon, names = value.partition(":")
        if not colon or not host:
            raise ValueError(f"DEVICES: expected HOST:DEVICE,DEVICE for each of several hosts, got {value!r}")
        by_host.append((host, [name.strip() for name in names.split(",")]))
    (first_host, devices), *other_hosts = by_host
    if not other_hosts and first_host in (platform.node(), platform.node().partition(".")[0], "localhost"):
        return {"devices": ",".join(devices)}
    for host, names_of_host in by_host:
        gpus_in_order = [[f"{kind}{i}" for i in range(len(names_of_host))] for kind in ("cuda", "gpu")]
        if names_of_host not in gpus_in_order and set(names_of_host) != {"cpu"}:
            raise ValueError(
                f"DEVICES: expected cuda0, cuda1 and so on in this order for host {host}, or cpu, got "
                f"{','.join(names_of_host)}: a host's CUDA_VISIBLE_DEVICES chooses among its GPUs"
            )
    # Several cores of a host are set as "cpu"; the host has the number.
    names = "cpu" if devices[0] == "cpu" else ",".join(devices)
    return {"hosts": [f"{host}:{len(host_devices)}" for host, host_devices in by_host], "devices": names}


def _normalize_key(key: str) -> str:
    return key.lower().replace("_", "")


def _unquote(word: str) -> str:
    """Remove the quotation marks and escapes of a word, as bash does.  Refuse expansions and operators."""

    def unquote_piece(match: re.Match[str]) -> str:
        piece = match[0]
        if piece[0] == "'":
            return piece[1:-1]
        if re.search(r"(?<!\\)(?:\\\\)*[$`]", piece) or piece in "&|<>":
            raise ValueError(f"{word}: only values are read, nothing is expanded or run")
        if piece[0] == '"':
            return re.sub(r"\\([\"\\$`\n])", lambda m: "" if m[1] == "\n" else m[1], piece[1:-1])
        return piece[1:].replace("\n", "") if piece[0] == "\\" else piece

    return re.sub(rf"{_WORD_PART}|\#", unquote_piece, word, flags=re.DOTALL)
