"""The chained SHA-256 digests of a prompt's pages. Compiled, as a call of hashlib for each page takes far longer.

The compiled form follows FIPS 180-4. Its constants are, as there, the first 32 fractional bits of roots of the first
primes. The interpreted form calls hashlib.
"""

from __future__ import annotations

from array import array
from hashlib import sha256
from math import isqrt

import cython
import numpy as np
from numpy.typing import NDArray

_DIGEST_BYTES = cython.declare(cython.Py_ssize_t, 32)
_BLOCK_BYTES = cython.declare(cython.Py_ssize_t, 64)


def _cube_root(number: int) -> int:
    """Return the largest integer with a cube of at most `number`, by Newton's method from above."""
    root = 1 << -(-number.bit_length() // 3)
    while root**3 > number:
        root = (2 * root + number // root**2) // 3
    return root


_PRIMES = [number for number in range(2, 312) if all(number % each for each in range(2, isqrt(number) + 1))]
_START = array("I", [isqrt(prime << 64) & 0xFFFFFFFF for prime in _PRIMES[:8]]).tobytes()  # the first state
_ROUNDS = array("I", [_cube_root(prime << 96) & 0xFFFFFFFF for prime in _PRIMES]).tobytes()  # a constant of each round


def chain_pages(
    ids: bytes,
    page_bytes: cython.Py_ssize_t,
    tail: bytes,
    prior: bytes,
    skipped: cython.Py_ssize_t,
    stride: cython.Py_ssize_t,
    /,
) -> NDArray[np.int64]:
    """Return the first 64 bits, signed, of the digests of every `stride`-th page, after the first `skipped` ones.

    The digest of a page is SHA-256 of the digest before it, the page's bytes and `tail`.

    Args:
        ids: whole pages of packed ids.
        tail: a few bytes, at the end of each page.
        prior: the digest before the first page: 32 bytes, or none.

    Raises:
        ValueError: the ids are not whole pages, or another argument is out of range.
    """
    if page_bytes < 1 or len(ids) % page_bytes or skipped < 0 or stride < 1 or len(prior) not in (0, 32):
        raise ValueError(
            f"ids must be whole pages of {page_bytes} bytes, the stride at least 1, and the digest before them 32 "
            f"bytes or none, not {len(ids)} bytes, {skipped} skipped, {stride} and {len(prior)} bytes"
        )
    count: cython.Py_ssize_t = len(ids) // page_bytes
    found = np.empty(max(0, -(-(count - skipped) // stride)), np.int64)
    if not cython.compiled:
        last = prior
        for number in range(count):
            last = sha256(last + ids[number * page_bytes : (number + 1) * page_bytes] + tail).digest()
            if number >= skipped and (number - skipped) % stride == 0:
                found[(number - skipped) // stride] = int.from_bytes(last[:8], "big", signed=True)
        return found
    _chain(ids, page_bytes, tail, prior, skipped, stride, found)
    return found


@cython.cfunc
@cython.boundscheck(False)
@cython.wraparound(False)
@cython.cdivision(True)
def _chain(
    ids: bytes,
    page_bytes: cython.Py_ssize_t,
    tail: bytes,
    prior: bytes,
    skipped: cython.Py_ssize_t,
    stride: cython.Py_ssize_t,
    found: cython.slonglong[::1],
) -> None:
    """Fill `found` as `chain_pages` describes. All arguments were checked."""
    num_blocks: cython.Py_ssize_t = (_DIGEST_BYTES + page_bytes + len(tail) + 9 + _BLOCK_BYTES - 1) // _BLOCK_BYTES
    room: bytearray = bytearray(num_blocks * _BLOCK_BYTES)
    work: bytearray = bytearray(4 * (8 + 64))
    message: cython.p_uchar = cython.cast(cython.p_uchar, cython.cast(cython.p_char, room))
    state: cython.p_uint = cython.cast(cython.p_uint, cython.cast(cython.p_char, work))
    words: cython.p_uint = state + 8
    first: cython.p_uint = cython.cast(cython.p_uint, cython.cast(cython.p_char, _START))
    source: cython.p_uchar = cython.cast(cython.p_uchar, cython.cast(cython.p_char, ids))
    end: cython.p_uchar = cython.cast(cython.p_uchar, cython.cast(cython.p_char, tail))
    before: cython.p_uchar = cython.cast(cython.p_uchar, cython.cast(cython.p_char, prior))
    tail_bytes: cython.Py_ssize_t = len(tail)
    start: cython.Py_ssize_t = len(prior)  # of a page, in its message
    size: cython.Py_ssize_t
    number: cython.Py_ssize_t
    i: cython.Py_ssize_t
    next_one: cython.Py_ssize_t = skipped
    filled: cython.Py_ssize_t = 0
    high: cython.ulonglong
    for i in range(start):
        message[i] = before[i]
    for number in range(len(ids) // page_bytes):
        size = start + page_bytes + tail_bytes
        if number < 2:  # later messages are as long as the second
            num_blocks = (size + 9 + _BLOCK_BYTES - 1) // _BLOCK_BYTES
            for i in range(tail_bytes):
                message[start + page_bytes + i] = end[i]
            message[size] = 0x80
            for i in range(size + 1, num_blocks * _BLOCK_BYTES - 8):
                message[i] = 0
            for i in range(8):
                message[num_blocks * _BLOCK_BYTES - 1 - i] = ((8 * size) >> (8 * i)) & 0xFF
        for i in range(page_bytes):
            message[start + i] = source[i]
        source += page_bytes
        for i in range(8):
            state[i] = first[i]
        for i in range(num_blocks):
            _compress(state, words, message + i * _BLOCK_BYTES)
        start = _DIGEST_BYTES
        for i in range(8):
            message[4 * i] = (state[i] >> 24) & 0xFF
            message[4 * i + 1] = (state[i] >> 16) & 0xFF
            message[4 * i + 2] = (state[i] >> 8) & 0xFF
            message[4 * i + 3] = state[i] & 0xFF
        if number == next_one:
            high = state[0]
            found[filled] = cython.cast(cython.longlong, (high << 32) | state[1])
            filled += 1
            next_one += stride


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _turned(word: cython.uint, count: cython.int) -> cython.uint:
    """Return a word, rotated to the right."""
    return (word >> count) | (word << (32 - count))


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _mixed(e: cython.uint, f: cython.uint, g: cython.uint) -> cython.uint:
    """Return the part of a round that chooses bits of `f` or `g` by those of `e`."""
    return (_turned(e, 6) ^ _turned(e, 11) ^ _turned(e, 25)) + (g ^ (e & (f ^ g)))


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _majority(a: cython.uint, b: cython.uint, c: cython.uint) -> cython.uint:
    """Return the part of a round with the bits that two of three words have."""
    return (_turned(a, 2) ^ _turned(a, 13) ^ _turned(a, 22)) + ((a & b) | (c & (a | b)))


@cython.cfunc
def _compress(state: cython.p_uint, words: cython.p_uint, block: cython.p_uchar) -> None:
    """Take a block of 64 bytes into the state. There is room for 64 words."""
    rounds: cython.p_uint = cython.cast(cython.p_uint, cython.cast(cython.p_char, _ROUNDS))
    i: cython.int
    a: cython.uint = state[0]
    b: cython.uint = state[1]
    c: cython.uint = state[2]
    d: cython.uint = state[3]
    e: cython.uint = state[4]
    f: cython.uint = state[5]
    g: cython.uint = state[6]
    h: cython.uint = state[7]
    one: cython.uint
    two: cython.uint
    for i in range(16):
        words[i] = (
            (cython.cast(cython.uint, block[4 * i]) << 24)
            | (cython.cast(cython.uint, block[4 * i + 1]) << 16)
            | (cython.cast(cython.uint, block[4 * i + 2]) << 8)
            | block[4 * i + 3]
        )
    for i in range(16, 64):
        one, two = words[i - 15], words[i - 2]
        one = _turned(one, 7) ^ _turned(one, 18) ^ (one >> 3)
        two = _turned(two, 17) ^ _turned(two, 19) ^ (two >> 10)
        words[i] = words[i - 16] + one + words[i - 7] + two
    for i in range(0, 64, 8):  # eight rounds, after which each word has its name again
        h += _mixed(e, f, g) + rounds[i] + words[i]
        d += h
        h += _majority(a, b, c)
        g += _mixed(d, e, f) + rounds[i + 1] + words[i + 1]
        c += g
        g += _majority(h, a, b)
        f += _mixed(c, d, e) + rounds[i + 2] + words[i + 2]
        b += f
        f += _majority(g, h, a)
        e += _mixed(b, c, d) + rounds[i + 3] + words[i + 3]
        a += e
        e += _majority(f, g, h)
        d += _mixed(a, b, c) + rounds[i + 4] + words[i + 4]
        h += d
        d += _majority(e, f, g)
        c += _mixed(h, a, b) + rounds[i + 5] + words[i + 5]
        g += c
        c += _majority(d, e, f)
        b += _mixed(g, h, a) + rounds[i + 6] + words[i + 6]
        f += b
        b += _majority(c, d, e)
        a += _mixed(f, g, h) + rounds[i + 7] + words[i + 7]
        e += a
        a += _majority(b, c, d)
    state[0] += a
    state[1] += b
    state[2] += c
    state[3] += d
    state[4] += e
    state[5] += f
    state[6] += g
    state[7] += h
