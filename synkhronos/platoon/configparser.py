"""Hosts and devices from Platoon's environment variables and files.

Sources in order of precedence: ``PLATOON_DEVICES`` or ``PLATOON_HOSTS``, the files of ``PLATOONRC`` from the last to
the first, ``./.platoonrc``, ``~/.platoonrc``.
"""

from __future__ import annotations

import configparser
import os


def fetch_devices_for_host(host: str) -> list[str]:
    """Return the devices of a host; raise KeyError if no source names them (section ``devices`` of a file)."""
    return _fetch_names("PLATOON_DEVICES", "devices", host)


def fetch_hosts() -> list[str]:
    """Return the hosts of an experiment; raise KeyError if no source names them (section ``platoon`` of a file)."""
    return _fetch_names("PLATOON_HOSTS", "platoon", "hosts")


def _fetch_names(variable: str, section: str, key: str) -> list[str]:
    names = os.environ.get(variable, "")
    if not names:
        parser = configparser.RawConfigParser()
        parser.optionxform = str  # type: ignore[assignment, method-assign]
        files = ["~/.platoonrc", "./.platoonrc", *filter(None, os.environ.get("PLATOONRC", "").split(os.pathsep))]
        parser.read([os.path.expanduser(file) for file in files])  # later files override earlier ones
        try:
            names = parser.get(section, key)
        except configparser.Error:
            raise KeyError(key) from None
    return names.replace(",", " ").split()
