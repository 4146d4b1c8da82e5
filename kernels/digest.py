"""The payload digest of gathered and scattered KV bytes: cheap enough to compute in the copy, stable across implementations.

Owns the definition (numpy is the specification, the native copy kernels compute the same); knows bytes, not blocks. It finds
corruption and misplacement of words; authenticity comes from the keyed frame digest that the fabric puts around it.

Definition: the bytes, zero-padded to rows of 64, are rows of 8 little-endian 64-bit words. Each of the 8 lanes keeps, modulo
2^64, `a` (sum of its words) and `b` (sum of `a` after each row, as in Fletcher's checksum, so that order matters). The digest is
BLAKE2b-128 over a[8], b[8] and the number of bytes.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

DIGEST_BYTES = 16
ROW_BYTES = 64
_ROWS_PER_PASS = 1 << 15  # 2 MiB at a time: the weighted copy stays small


def payload_digest(payload: bytes | bytearray | memoryview) -> bytes:
    """The digest of any contiguous buffer of bytes."""
    data = np.frombuffer(payload, dtype=np.uint8)
    num_bytes = data.size
    lanes_a = np.zeros(8, dtype=np.uint64)
    lanes_b = np.zeros(8, dtype=np.uint64)
    num_whole = num_bytes // ROW_BYTES
    whole = data[: num_whole * ROW_BYTES].view("<u8").reshape(num_whole, 8)
    for start in range(0, num_whole, _ROWS_PER_PASS):
        _add_rows(whole[start : start + _ROWS_PER_PASS], lanes_a, lanes_b)
    if num_bytes % ROW_BYTES:
        tail = np.zeros(ROW_BYTES, dtype=np.uint8)
        tail[: num_bytes % ROW_BYTES] = data[num_whole * ROW_BYTES :]
        _add_rows(tail.view("<u8").reshape(1, 8), lanes_a, lanes_b)
    return finish_digest(lanes_a.tobytes() + lanes_b.tobytes(), num_bytes)


def finish_digest(lanes: bytes, num_bytes: int) -> bytes:
    """Turns the 128 bytes of lane sums (a[8] then b[8], little-endian) and the payload's length into the digest."""
    return hashlib.blake2b(lanes + num_bytes.to_bytes(8, "little"), digest_size=DIGEST_BYTES).digest()


def _add_rows(rows: npt.NDArray[np.uint64], lanes_a: npt.NDArray[np.uint64], lanes_b: npt.NDArray[np.uint64]) -> None:
    """Continues the running sums: word i of n rows enters b (n - i) times, the sum before them n times."""
    count = rows.shape[0]
    weights = np.arange(count, 0, -1, dtype=np.uint64)[:, None]
    lanes_b += lanes_a * np.uint64(count) + (rows * weights).sum(axis=0, dtype=np.uint64)
    lanes_a += rows.sum(axis=0, dtype=np.uint64)
