"""The module ``theanompi``: its rules start runs of this library."""

import pkgutil

# All other modules are in the user's copy of Theano-MPI, which may be later in the search path than this package.
__path__ = pkgutil.extend_path(__path__, __name__)

from .rules import ASGD, BSP, EASGD, GOSGD

__all__ = ["ASGD", "BSP", "EASGD", "GOSGD"]
