"""A process with one data plane, for tests that need a second (or a dying) process. Speaks lines over its standard streams.

Start it as `python -m tests.fakes.plane_peer SCHEME NAME REGION_BYTES SEED`. It prints one line with its description
(base64), obeys `read <base64 description>` (reads that peer's region for ever, printing `reading` after the first fetch)
and `close` (closes the plane, prints `closed`, ends), and ends with its parent.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import mmap
import os
import signal
import sys

import numpy as np

from kvtransfer.planes.select import open_plane

SECRET = b"a cluster secret that only tests know"


def pattern(num_bytes: int, seed: int) -> np.ndarray:
    """Bytes that differ at every offset that could be confused with another one (a period of 2^16 words)."""
    words = np.arange(-(-num_bytes // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    return words.view(np.uint8)[:num_bytes]


async def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    scheme, name, region_bytes, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    region = mmap.mmap(-1, region_bytes)
    region[:] = pattern(region_bytes, seed).tobytes()
    plane = open_plane(scheme, name=name, secret=SECRET)
    await plane.start(memoryview(region))
    print(base64.b64encode(plane.describe()).decode(), flush=True)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := (await lines.readline()).decode().split():
        if line[0] == "close":
            await plane.close()
            print("closed", flush=True)
            break
        assert line[0] == "read"
        await plane.connect("target", base64.b64decode(line[1]))
        await plane.fetch("target", 0, 0, region_bytes).done
        print("reading", flush=True)
        while True:
            await asyncio.gather(*(plane.fetch("target", 0, 0, region_bytes).done for _ in range(4)))
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
