"""Least squares without negative coefficients, for a handful of terms."""

from itertools import combinations
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]


def not_negative(products: Array, sums: Array) -> Array:
    """The coefficients x >= 0 with the least |Ax - y|, from A'A [n, n] and A'y [n]: of all terms, or of the best set.

    Looks at every set of terms where one coefficient would be negative, so n is to be small.
    """
    whole = np.linalg.lstsq(products, sums, rcond=1e-10)[0]
    if (whole >= 0).all():
        return np.asarray(whole)
    best, least = np.zeros(len(sums)), 0.0
    for size in range(1, len(sums)):
        for terms in combinations(range(len(sums)), size):
            chosen = list(terms)
            square = products[np.ix_(chosen, chosen)]
            x = np.linalg.lstsq(square, sums[chosen], rcond=1e-10)[0]
            loss = float(x @ square @ x - 2 * x @ sums[chosen])
            if (x >= 0).all() and loss < least:
                best, least = np.zeros(len(sums)), loss
                best[chosen] = x
    return best
