"""Placement of ranks: the device of each rank of this host, and the other hosts with ranks."""

from __future__ import annotations

import re
from typing import Any

from synkhronos.gpus import get_n_gpu
from synkhronos.hosts import MAX_RANKS_PER_HOST, Host, check_single_process, parse_hosts
from synkhronos.launcher.configuration.settings import SettingsError, convert_to_settings_error
from synkhronos.ranks import count_available_cores


def choose_placement(devices: Any, hosts: Any, n_ranks: int | None) -> tuple[tuple[str, ...], list[Host]]:
    """Check the settings ``devices``, ``hosts`` and ``ranks``.  Choose values for those that are not set.

    Return the device of each rank of this host, and the hosts with ranks, this one first.  The list of hosts is empty
    for this host alone.
    """
    parsed_hosts = _parse_hosts(hosts, n_ranks)
    if parsed_hosts:
        chosen_devices = _choose_devices_of_first_host(parsed_hosts[0], devices)
        parsed_hosts[0] = Host(parsed_hosts[0].name, len(chosen_devices))
    else:
        chosen_devices = _choose_devices(devices, n_ranks)
    if len(chosen_devices) > MAX_RANKS_PER_HOST:
        raise SettingsError(f"devices: expected at most {MAX_RANKS_PER_HOST}, got {len(chosen_devices)}")
    return chosen_devices, parsed_hosts


def parse_devices(devices: Any) -> list[str]:
    """Return the names of devices in a setting, a list or a text with commas.  Raise SettingsError for other values."""
    if isinstance(devices, str):
        devices = devices.split(",")
    if not isinstance(devices, list | tuple) or not all(isinstance(name, str) for name in devices):
        raise SettingsError(f"devices: expected names such as cuda0 and cpu, got {devices!r}")
    return [name.strip() for name in devices if name.strip()]


def _choose_devices(devices: Any, n_ranks: int | None) -> tuple[str, ...]:
    """Choose the device of each rank.  The default is a rank for each visible GPU, or without GPUs for each core."""
    n_gpu = get_n_gpu()
    if devices is None:
        if n_gpu and n_ranks is not None and n_ranks > n_gpu:
            raise SettingsError(f"ranks: expected at most {n_gpu}, one for each GPU, got {n_ranks}; or devices = 'cpu'")
        return tuple(f"cuda{i}" for i in range(n_gpu)[:n_ranks]) or ("cpu",) * (n_ranks or count_available_cores())
    names = parse_devices(devices)
    if not names:
        raise SettingsError(f"devices: expected at least one name, such as cuda0 or cpu, got {devices!r}")
    if names == ["cpu"] and n_ranks is not None:
        names *= n_ranks
    if n_ranks is not None and n_ranks != len(names):
        raise SettingsError(f"ranks: expected {len(names)}, the number of devices, got {n_ranks}")
    if set(names) == {"cpu"}:
        return tuple(names)
    chosen_devices = []
    for name in names:
        match = re.fullmatch(r"(?:cuda|gpu)(\d+)", name)
        if ":" in name:
            raise SettingsError(
                f"devices: {name!r} is on another host: devices are those of this machine; hosts = ['a', 'b:3'] names "
                "machines, with their numbers of ranks"
            )
        if match is None:
            hint = "; cpu can't be mixed with GPUs" if name == "cpu" else ""
            raise SettingsError(f"devices: expected cuda0, gpu0 and so on, or cpu alone, got {name!r}{hint}")
        if int(match[1]) >= n_gpu:
            present_gpus = f"cuda0 to cuda{n_gpu - 1}" if n_gpu else "no GPU"
            raise SettingsError(
                f"devices: {name} is not available: this machine has {present_gpus}; cpu,cpu computes on two of its "
                "cores"
            )
        chosen_devices.append(f"cuda{int(match[1])}")
    if len(set(chosen_devices)) != len(chosen_devices):
        raise SettingsError(f"devices: expected each GPU once, got {', '.join(names)}")
    return tuple(chosen_devices)


def _parse_hosts(hosts: Any, n_ranks: int | None) -> list[Host]:
    """Return the hosts and their numbers of ranks, None if unset, or an empty list for this host alone."""
    if isinstance(hosts, str) and hosts != "all":
        hosts = [host for host in hosts.split(",") if host.strip()]
    with convert_to_settings_error():
        parsed_hosts = parse_hosts([] if hosts is None else hosts)
        if parsed_hosts:
            check_single_process()
    return [Host(host.name, host.n_ranks or n_ranks) for host in parsed_hosts]


def _choose_devices_of_first_host(first: Host, devices: Any) -> tuple[str, ...]:
    """Choose the device of each rank on the first of several hosts.  Other hosts use devices of the same kind."""
    if devices is not None and parse_devices(devices) == ["cpu"]:
        return ("cpu",) * (first.n_ranks or count_available_cores())
    chosen_devices = _choose_devices(devices, first.n_ranks)
    if set(chosen_devices) != {"cpu"} and chosen_devices != tuple(f"cuda{i}" for i in range(len(chosen_devices))):
        raise SettingsError(
            f"devices: expected cpu, or cuda0 to cuda{len(chosen_devices) - 1} in this order, for several hosts, got "
            f"{', '.join(chosen_devices)}: each host's CUDA_VISIBLE_DEVICES selects its GPUs"
        )
    return chosen_devices
