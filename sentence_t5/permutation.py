"""Random permutations that are never listed: where one sends a position, at once.

Everything is a pure function of integers, the same on every machine and with every
version of numpy, since a run that is resumed must find the order that it left.
"""

import numpy as np

_ROUNDS = 6


def mix(*numbers: int) -> int:
    """Hashes integers to one of 64 bits (splitmix64, one number after the other)."""
    mask = (1 << 64) - 1
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state


def permute(positions: np.ndarray, num: int, key: int) -> np.ndarray:
    """Returns where a random permutation of range(num) sends some positions.

    A Feistel network over the next power of four above `num`; a result beyond `num` is
    sent through it again until it falls inside. Nothing of size `num` is ever made.

    Args:
      positions: int [b], each in range(num).
      num: how many there are.
      key: chooses the permutation, 64 bits.

    Returns:
      int64 [b], in range(num).
    """
    half = np.uint64(max(1, ((num - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(mix(key, i)) for i in range(_ROUNDS)]
    result = positions.astype(np.uint64)
    outside = np.ones(result.shape, bool)
    while outside.any():
        value = result[outside]
        left, right = value >> half, value & low
        for round_key in keys:
            left, right = right, left ^ (_scramble(right ^ round_key) & low)
        result[outside] = (left << half) | right
        outside = result >= np.uint64(num)
    return result.astype(np.int64)


def _scramble(values: np.ndarray) -> np.ndarray:
    """Mixes the bits of uint64 values (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
