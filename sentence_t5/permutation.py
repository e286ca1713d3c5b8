"""Random permutations that are never listed: where one sends a position, at once.

Everything is a pure function of integers, the same on every machine and with every
version of numpy, since a run that is resumed must find the order that it left.
"""

import numpy as np

_ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(*numbers: int | np.ndarray) -> int | np.ndarray:
    """Hashes integers to one of 64 bits (splitmix64, one number after the other).

    Args:
      numbers: integers, or arrays of them that broadcast.

    Returns:
      An int; with arrays among the numbers a uint64 array, one hash for each place.
    """
    state = np.zeros(1, np.uint64)  # scalars would warn where they overflow
    for number in numbers:
        state = _scramble(state + np.asarray(number).astype(np.uint64) + _GOLDEN)
    return int(state[0]) if all(map(np.isscalar, numbers)) else state


def permute(
    positions: np.ndarray, num: int | np.ndarray, key: int | np.ndarray
) -> np.ndarray:
    """Returns where random permutations of range(num) send some positions.

    A Feistel network over the next power of four above `num`; a result beyond `num` is
    sent through it again until it falls inside. Nothing of size `num` is ever made.

    Args:
      positions: int [..., b], each in range(num).
      num: how many there are, an int below 2 ** 53, or an array of them that broadcasts
        with positions.
      key: chooses the permutation, 64 bits; or an array of keys that broadcasts.

    Returns:
      int64 [..., b], in range(num).
    """
    num, key = np.atleast_1d(num), np.atleast_1d(key)
    num_bits = np.frexp((num - 1).astype(np.float64))[1]
    half = np.maximum(1, (num_bits + 1) // 2).astype(np.uint64)
    low = (np.uint64(1) << half) - np.uint64(1)
    keys = [mix(key, i) for i in range(_ROUNDS)]
    shape = np.broadcast_shapes(positions.shape, num.shape, key.shape)
    fields = [np.broadcast_to(field, shape) for field in (half, low, *keys)]
    num = num.astype(np.uint64)
    result = np.broadcast_to(positions, shape).astype(np.uint64)
    outside = np.ones(shape, bool)
    while outside.any():
        value = result[outside]
        half, low, *keys = (field[outside] for field in fields)
        left, right = value >> half, value & low
        for round_key in keys:
            left, right = right, left ^ (_scramble(right ^ round_key) & low)
        result[outside] = (left << half) | right
        outside = result >= num
    return result.astype(np.int64)


def _scramble(values: np.ndarray) -> np.ndarray:
    """Mixes the bits of uint64 values (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
