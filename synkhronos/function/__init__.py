"""What does a call compute?

`Function`, `function`, `distribute`
    What users call (`function`).
`build`
    Checks the arguments of `function` and makes a program of them.
`inputs`
    Checks a call's inputs and puts them where all ranks find them.
`program`
    What a function computes, on any rank, and the variants in which it is compiled.
`call`
    The command that runs a program on all ranks.
`combine`, `reduce`
    How results of ranks and slices become one.
"""

from synkhronos.function.function import Function, distribute, function

__all__ = ["Function", "distribute", "function"]
