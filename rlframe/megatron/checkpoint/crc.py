"""CRC-32 of a file from those of its parts, which may be computed at the same time. Imports no torch.

Source: Mark Adler, `crc32_combine` of zlib 1.2.12, which Python does not offer.
"""

from functools import lru_cache

POLYNOMIAL = 0xEDB88320
"""Polynomial of zlib's CRC-32. The highest bit is the constant term."""
ONE = 1 << 31


def combined(first: int, second: int, length: int) -> int:
    """Returns the CRC-32 of two stretches, one after the other.

    Args:
        first: CRC-32 of the first.
        second: CRC-32 of the second by itself.
        length: number of bytes of the second.

    Example:
        >>> combined(zlib.crc32(b"ab"), zlib.crc32(b"cde"), 3) == zlib.crc32(b"abcde")
        True
    """
    return _product(_shift(length), first) ^ second


@lru_cache(maxsize=4096)
def _shift(length: int) -> int:
    """Returns x to the power of the number of bits in `length` bytes."""
    result, power, left = ONE, ONE >> 1, 8 * length
    while left:
        if left & 1:
            result = _product(power, result)
        power, left = _product(power, power), left >> 1
    return result


def _product(one: int, other: int) -> int:
    """Returns the product of two polynomials, modulo the CRC's."""
    result = 0
    while one:
        if one & ONE:
            result ^= other
        one = (one << 1) & 0xFFFFFFFF
        other = (other >> 1) ^ POLYNOMIAL if other & 1 else other >> 1
    return result
