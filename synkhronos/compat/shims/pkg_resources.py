"""Shim of the part of setuptools' ``pkg_resources`` by which packages find their own version."""

import importlib.metadata

__all__ = ["Distribution", "DistributionNotFound", "get_distribution"]


class DistributionNotFound(Exception):  # noqa: N818 - the lost module's name
    """A package is not installed."""


class Distribution:
    """An installed package.

    Parameters
    ----------
    project_name : str

    Attributes
    ----------
    version : str
    """

    def __init__(self, project_name: str):
        self.project_name = project_name
        try:
            self.version = importlib.metadata.version(project_name)
        except importlib.metadata.PackageNotFoundError:
            raise DistributionNotFound(project_name) from None


def get_distribution(dist: str) -> Distribution:
    """Return the installed package of this name.

    Examples
    --------
    >>> get_distribution("numpy").project_name
    'numpy'
    """
    return Distribution(dist)
