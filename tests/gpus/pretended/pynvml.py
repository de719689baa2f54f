"""Stands for NVIDIA's library that counts GPUs."""

import os


class NVMLError(Exception):
    pass


def nvmlInit():  # noqa: N802 - NVIDIA's name
    pass


def nvmlShutdown():  # noqa: N802 - NVIDIA's name
    pass


def nvmlDeviceGetCount():  # noqa: N802 - NVIDIA's name
    return int(os.environ["PRETENDED_GPUS"])
