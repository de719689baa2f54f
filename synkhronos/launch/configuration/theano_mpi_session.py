"""Parser of Theano-MPI's session files, ``KEY=VALUE``.

Theano-MPI runs them in bash.  Here assignments are parsed, and nothing is expanded or run.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from typing import Any

#: Values of the two keys for BSP's exchange, and the settings that they stand for.
_SYNC_TYPES: dict[str, dict[str, Any]] = {
    "avg": {"rule_options": {"average": "params"}},
    "cdd": {"rule_options": {"average": "gradient"}},
    "swap": {"rule": "Swap"},
}
_STRATEGIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("ar", "nccl32", "asa32", "copper"), {}),
    **dict.fromkeys(("nccl16", "asa16", "copper16"), {"rule_options": {"precision": "float16"}}),
}
#: Names of these keys in all versions of Theano-MPI, in lower case and without "_".
_EXCHANGE_KEYS = {
    **dict.fromkeys(("bspsynctype", "synctype", "syncrule"), _SYNC_TYPES),
    **dict.fromkeys(("bspexchstrategy", "exchstrategy", "exchstrat", "strategy"), _STRATEGIES),
}
#: Other keys, and their settings.
_KEYS = {"rule": "rule", "modelfile": "modelfile", "modelclass": "modelclass", "bind": "bind", "session": "folder"}
#: A quoted string, an escape, or a character of a word; "#" within a word is added where this is used.
_WORD_PART = r"""'[^']*'|"(?:[^"\\]|\\.)*"|\\.|[^\s'"\\();\#]"""
_TOKEN = re.compile(
    r"(?P<space>[ \t\r\f\v]+|\\\n)|(?P<end>[\n;])|(?P<comment>\#[^\n]*)|(?P<bracket>[()])"
    rf"|(?P<word>(?:{_WORD_PART})(?:{_WORD_PART}|\#)*)",
    re.DOTALL,
)


def parse_exchange_option(key: str, value: str) -> dict[str, Any]:
    """Return the settings for a value of Theano-MPI's ``sync_type`` or ``exch_strategy``.

    Parameters
    ----------
    key : str
        ``"sync_type"``, ``"exch_strategy"``, or the key of a session file.
    value : str

    Raises
    ------
    ValueError
        If the value is unknown.

    Examples
    --------
    >>> parse_exchange_option("exch_strategy", "nccl16")
    {'rule_options': {'precision': 'float16'}}
    """
    known = _EXCHANGE_KEYS[_normalize_key(key)]
    if value.lower() not in known:
        raise ValueError(f"{key}: expected one of {', '.join(known)}, got {value!r}")
    return known[value.lower()]


def parse_session(text: str) -> dict[str, str | list[str]]:
    r"""Return the assignments of a session file: a string per key, or a list for an array.

    Raises
    ------
    ValueError
        If a line is no assignment; the message begins with its number.

    Examples
    --------
    >>> parse_session("RULE='BSP' # this one\nDEVICES=(a:cuda0\n  b:cuda0,cuda1)")
    {'RULE': 'BSP', 'DEVICES': ['a:cuda0', 'b:cuda0,cuda1']}
    """
    assignments: dict[str, str | list[str]] = {}
    for number, words in _split_statements(text):
        try:
            key, value = _parse_assignment(words)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        assignments[key] = value
    return assignments


def to_settings(assignments: Mapping[str, str | list[str]]) -> dict[str, Any]:
    """Convert assignments to settings.

    Raises
    ------
    ValueError
        If a key is unknown, or its value is wrong.
    """
    values = {_normalize_key(key): (key, value) for key, value in assignments.items() if value}
    settings: dict[str, Any] = {}
    exchange: list[dict[str, Any]] = []
    for name, (key, value) in values.items():
        if name == "devices":
            settings |= parse_devices([value] if isinstance(value, str) else value)
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
        elif name in _KEYS:
            settings[_KEYS[name]] = value
        else:
            raise ValueError(
                f"{key!r} is not a setting: expected RULE, MODELFILE, MODELCLASS, DEVICES, SIZE, BIND, SESSION, "
                "BSP_SYNC_TYPE or BSP_EXCH_STRATEGY; take a .toml file for others"
            )
    if str(settings.get("rule", "BSP")).upper() == "BSP":
        for part in exchange:
            options = {**settings.get("rule_options", {}), **part.get("rule_options", {})}
            settings |= part | ({"rule_options": options} if options else {})
    return settings


def parse_devices(values: list[str]) -> dict[str, Any]:
    """Return the settings for a list of devices, ``cuda0,cuda1``, or for one list per host, ``node0:cuda0,cuda1``.

    Raises
    ------
    ValueError
        If only some lists name a host, or a host's devices are not its first ones in order.

    Examples
    --------
    >>> parse_devices(["a:cuda0", "b:cuda0,cuda1"])
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
    (first, devices), *others = by_host
    if not others and first in (platform.node(), platform.node().partition(".")[0], "localhost"):
        return {"devices": ",".join(devices)}
    for host, names_of_host in by_host:
        known = [[f"{kind}{i}" for i in range(len(names_of_host))] for kind in ("cuda", "gpu")]
        if names_of_host not in known and set(names_of_host) != {"cpu"}:
            raise ValueError(
                f"DEVICES: expected cuda0, cuda1 and so on in this order for host {host}, or cpu, got "
                f"{','.join(names_of_host)}: a host's CUDA_VISIBLE_DEVICES chooses among its GPUs"
            )
    # Several cores of a host are set as "cpu"; the host has the number.
    names = "cpu" if devices[0] == "cpu" else ",".join(devices)
    return {"hosts": [f"{host}:{len(host_devices)}" for host, host_devices in by_host], "devices": names}


# -- reading -------------------------------------------------------------------------------------------------


def _normalize_key(key: str) -> str:
    return key.lower().replace("_", "")


def _split_statements(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each statement: the number of its first line, and its words and brackets."""
    at, first, is_open = 0, 1, False
    words: list[str] = []
    while at < len(text):
        number = text.count("\n", 0, at) + 1
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"line {number}: a quotation mark is not closed")
        at = match.end()
        kind, token = match.lastgroup, match[0]
        if kind == "end" and not is_open:
            if words:
                yield first, words
            words = []
        elif kind in ("word", "bracket"):
            first = first if words else number
            is_open = token == "(" if kind == "bracket" else is_open
            words.append(token)
    if is_open:
        raise ValueError(f"line {first}: a bracket is not closed")
    if words:
        yield first, words


def _parse_assignment(words: list[str]) -> tuple[str, str | list[str]]:
    """Parse a statement into its key and value."""
    statement = " ".join(words)
    if words[0] == "export" and len(words) > 1:
        words = words[1:]
    match = re.fullmatch(r"([A-Za-z_]\w*)(=?)(.*)", words[0], re.DOTALL)
    key, rest = (match[1], [match[2] + match[3], *words[1:]]) if match else ("", [])
    rest = [word for word in rest if word]
    if not match or (not match[2] and match[3]) or not rest or not rest[0].startswith("="):
        raise ValueError(f"expected KEY=VALUE, or a .toml file, got {statement!r}")
    values = [rest[0][1:], *rest[1:]] if rest[0] != "=" else rest[1:]
    if values and values[0] == "(":
        if values[-1] != ")" or "(" in values[1:] or ")" in values[1:-1]:
            raise ValueError(f"expected KEY=(VALUE ...), got {statement!r}")
        return key, [_unquote(word) for word in values[1:-1]]
    if len(values) > 1 or set(values) & {"(", ")"}:
        raise ValueError(f"expected one value, in quotation marks if it has spaces, got {statement!r}")
    return key, _unquote(values[0]) if values else ""


def _unquote(word: str) -> str:
    """Remove the quotation marks and escapes of a word, as bash does; refuse expansions and operators."""

    def value(match: re.Match[str]) -> str:
        piece = match[0]
        if piece[0] == "'":
            return piece[1:-1]
        if re.search(r"(?<!\\)(?:\\\\)*[$`]", piece) or piece in "&|<>":
            raise ValueError(f"{word}: only values are read, nothing is expanded or run")
        if piece[0] == '"':
            return re.sub(r"\\([\"\\$`\n])", lambda m: "" if m[1] == "\n" else m[1], piece[1:-1])
        return piece[1:].replace("\n", "") if piece[0] == "\\" else piece

    return re.sub(rf"{_WORD_PART}|\#", value, word, flags=re.DOTALL)
