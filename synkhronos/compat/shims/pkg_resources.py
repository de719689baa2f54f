"""Shim of the part of setuptools' ``pkg_resources`` by which packages find their own version."""

from importlib.metadata import PackageNotFoundError as DistributionNotFound
from importlib.metadata import distribution as get_distribution

__all__ = ["DistributionNotFound", "get_distribution"]
