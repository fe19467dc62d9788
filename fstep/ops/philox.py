"""Counter-based noise: Philox-4x32-10, and the Gumbel noise made of it.

Philox (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a counter of four
32-bit words and a key of two into four random words, with integer arithmetic alone. The code below uses operators
that NumPy and torch share, so both give the same words: 32-bit words in int64 arrays, whose products wrap where an
unsigned one would not, which the masks undo.

The noise of a token is keyed by what it is for, never by when it is drawn: key = the request's seed; counter =
(token id // 4, position in the sequence, stream, sample index); word = token id % 4.
"""

from __future__ import annotations

from typing import Any

_MASK = 0xFFFFFFFF
_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

TARGET = 0  #: the stream of the tokens that are drawn
LANES = 4  #: words of one call
UNIFORM_BITS = 24

#: No noise lies above this: -log(-log(1 - 2**-25)), rounded up. Nor below `LOWEST_GUMBEL`.
HIGHEST_GUMBEL = 17.33
LOWEST_GUMBEL = -2.86


def philox4x32(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Four random 32-bit words for each counter and key: int64 arrays (NumPy or torch) of words, broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIER[0], c2 * _MULTIPLIER[1]
        c0, c1, c2, c3 = (
            (product1 >> 32 & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 32 & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(upper: Any) -> Any:
    """The upper `UNIFORM_BITS` of a word, given as float64, as a number in (0, 1), never 0 and never 1."""
    return (2.0 * upper + 1.0) / 2.0 ** (UNIFORM_BITS + 1)
