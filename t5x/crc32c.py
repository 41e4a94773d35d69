"""CRC-32C (Castagnoli), the checksum of TensorFlow's files, fast enough for hundreds of megabytes.

A message's first word can be cleared if what it becomes after n words of zeros is XORed into the word n further on.
So a long message is folded, many words at a time, onto its last few words. What each of their bytes alone makes of
the register is in a table; the register is the XOR of them all.
"""

import functools
from collections.abc import Iterable

import numpy as np

_POLYNOMIAL = 0x82F63B78  # bits reversed
_WIDTHS = (8192, 512)  # words that are folded at once: wide while the message is long, then narrow
_TAIL = 4 * _WIDTHS[-1]  # bytes


def crc32c(data: bytes | memoryview | np.ndarray) -> int:
    """The CRC-32C of a buffer.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    octets = np.frombuffer(data, np.uint8)
    if octets.size < 4:
        return _advance(0xFFFFFFFF, octets.tolist()) ^ 0xFFFFFFFF
    if octets.size <= _TAIL:
        tail = octets.copy()
        tail[:4] ^= 0xFF
    else:
        odd = octets.size % 4
        register = _advance(0xFFFFFFFF, octets[:odd].tolist())
        words = octets[odd:].view("<u4")
        for width in _WIDTHS:
            words = _fold(words, width, register)
            register = 0
        tail = words.view(np.uint8)
    table, rows = _tail_tables()
    return int(np.bitwise_xor.reduce(table.take(rows[-tail.size :] + tail))) ^ 0xFFFFFFFF


def mask(crc: int) -> int:
    """The form in which TensorFlow stores a CRC (a CRC over data that holds CRCs would be a weak one)."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _advance(register: int, octets: Iterable[int]) -> int:
    table = _byte_table()
    for octet in octets:
        register = table[(register ^ octet) & 0xFF] ^ (register >> 8)
    return register


def _fold(words: np.ndarray, width: int, register: int) -> np.ndarray:
    """At most `width` words that bring a zero register to where `words` bring `register`."""
    head = words.size % width or width
    state = words[:head].astype(np.uint32)
    state[0] ^= register
    if head == words.size:
        return state
    low, high = _zero_tables(width)
    state = np.concatenate([np.zeros(width - head, np.uint32), state])
    for row in words[head:].reshape(-1, width):
        state = low.take(state & 0xFFFF) ^ high.take(state >> 16)
        state ^= row
    return state


@functools.cache
def _byte_table() -> list[int]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table.tolist()


@functools.cache
def _tail_tables() -> tuple[np.ndarray, np.ndarray]:
    """What a byte makes of a zero register, zeros behind it: [_TAIL * 256]; and where its row begins, by its place."""
    table = np.empty((_TAIL, 256), np.uint32)
    table[0] = of_byte = np.array(_byte_table(), np.uint32)
    for zeros in range(1, _TAIL):
        table[zeros] = of_byte[table[zeros - 1] & 0xFF] ^ (table[zeros - 1] >> 8)
    return table.reshape(-1), np.arange(_TAIL - 1, -1, -1) * 256


@functools.cache
def _zero_tables(words: int) -> tuple[np.ndarray, np.ndarray]:
    """What `words` (a power of two) words of zeros make of a register: of its low 16 bits, and of its high ones."""
    images = np.array([_advance(1 << bit, bytes(4)) for bit in range(32)], np.uint32)
    while True:
        low, high = (_all_sums(images[bits]) for bits in (slice(16), slice(16, 32)))
        if words == 1:
            return low, high
        images = low[images & 0xFFFF] ^ high[images >> 16]
        words //= 2


def _all_sums(images: np.ndarray) -> np.ndarray:
    """[2**n]: the XOR of those of n images whose bit is set in the index."""
    sums = np.zeros(1, np.uint32)
    for image in images:
        sums = np.concatenate([sums, sums ^ image])
    return sums
