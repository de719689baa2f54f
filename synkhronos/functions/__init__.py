"""Functions that run on all ranks at once.

A call passes through five layers, from its arguments to its results::

    Function            returns the outputs in the requested form     master
    Dispatcher          checks the arguments, and makes the command   master
    CallInputWriter     writes input arrays into shared memory        master
    Call                computes a rank's rows by its Computation     every rank
    RankOutputs         reduces the outputs over ranks                every rank
"""

from synkhronos.functions.function import Function, distribute, function, get_dispatcher

__all__ = ["Function", "distribute", "function", "get_dispatcher"]
