"""The module ``theanompi.rules``: rules with Theano-MPI's names and class attributes."""

from synkhronos import exchange_rules
from synkhronos.exchange_rules import ASGD, EASGD, GOSGD

__all__ = ["ASGD", "BSP", "EASGD", "GOSGD"]


class BSP(exchange_rules.BSP):
    """Bulk-synchronous training; set the class attributes before ``init``.

    Attributes
    ----------
    sync_type : {"cdd", "avg", "swap"}
        Values that ranks exchange after each step: gradients, or parameters; with ``"swap"`` pairs swap parameters.
    exch_strategy : str
        ``"nccl32"`` or ``"ar"``; ``"nccl16"`` exchanges in float16.
    """

    sync_type = "cdd"
    exch_strategy = "nccl32"
