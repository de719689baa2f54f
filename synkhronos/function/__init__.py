"""Functions that run on all ranks at once.

A call passes through four layers, from the user's arguments to a result::

    Function.__call__   checks the arguments                          master
    CallInputs          puts input arrays into shared memory          master
    Call                computes a rank's rows with its Program       every rank
    RankOutputs         reduces the outputs over ranks                every rank
"""

from synkhronos.function.function import Function, distribute, function

__all__ = ["Function", "distribute", "function"]
