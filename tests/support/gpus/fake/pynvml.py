"""Stands for NVIDIA's library that counts GPUs."""

import os
import types


class NVMLError(Exception):
    pass


def nvmlInit():  # noqa: N802 - NVIDIA's name
    pass


def nvmlShutdown():  # noqa: N802 - NVIDIA's name
    pass


def nvmlDeviceGetCount():  # noqa: N802 - NVIDIA's name
    try:
        with open("/dev/shm/fake_gpus") as file:  # some were lost on this simulated host
            return int(file.read())
    except FileNotFoundError:
        return int(os.environ["FAKE_GPUS"])


def nvmlDeviceGetHandleByIndex(index):  # noqa: N802 - NVIDIA's name
    return index


def nvmlDeviceGetPciInfo(handle):  # noqa: N802 - NVIDIA's name
    return types.SimpleNamespace(busId=f"0000:{handle}")
