"""How far does PyTensor write out sums and products?

No further than helps, once this module is imported, in all functions that PyTensor compiles in this process.

Its canonical form of a sum of sums is one sum of all terms.  A variable that occurs twice is written out twice, so that
sums of sums of the same variables double, or worse, with each level.  The lengths that PyTensor computes for stacked
concatenations are such sums: six levels of four branches have 4096 terms, and took 13 seconds to compile.  Theano wrote
such a sum out only if that made it simpler.
"""

from __future__ import annotations

import copy
from typing import Any

from pytensor.tensor.rewriting.math import AlgebraicCanonizer, local_add_canonizer, local_mul_canonizer

#: What has no more terms than this is always written out, as PyTensor does by itself.
FEW = 8


class _Bounded:
    """Finds the terms of a sum, or the factors of a product, where these are not too many.

    The ``canonizer`` finds them without a bound.
    """

    def __init__(self, canonizer: AlgebraicCanonizer):
        self._canonizer = canonizer
        self._operations = {canonizer.main, canonizer.inverse, canonizer.reciprocal}

    def get_num_denum(self, variable: Any) -> tuple[list[Any], list[Any]]:
        """Return the terms with a plus and those with a minus; the variable itself where they would be too many.

        Too many are more than the inputs of the operations which they would replace: the graph would grow.
        """
        counts: dict[Any, int] = {}
        terms = self._count(variable, counts)
        if terms > FEW and terms > sum(len(node.inputs) for node in counts):
            return [variable], []
        return self._canonizer.get_num_denum(variable)

    def _count(self, variable: Any, counts: dict[Any, int]) -> int:
        """Return how many terms a variable has, and put those of the operations that it is made of into a dict."""
        node = variable.owner
        if node is None or node.op not in self._operations:
            return 1
        if node not in counts:
            counts[node] = sum(self._count(v, counts) for v in node.inputs)
        return counts[node]


for _canonizer in (local_add_canonizer, local_mul_canonizer):
    _canonizer.get_num_denum = _Bounded(copy.copy(_canonizer)).get_num_denum
