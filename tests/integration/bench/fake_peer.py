"""A scripted OpenAI-compatible server as a process of its own. Prints its address, serves until its input ends."""

from __future__ import annotations

import asyncio
import sys

from tests.unit.baton.fake_openai import FakeOpenAI


async def serve() -> None:
    refused = {number: "refuse" for number in range(int(sys.argv[1]), int(sys.argv[2]))} if len(sys.argv) > 1 else {}
    async with FakeOpenAI(gap_s=0.002, failures=refused) as server:
        print(server.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


asyncio.run(serve())
