"""The router as a process: clear refusals at the start, drain on SIGTERM with exit code 0, no port left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

import httpx
import pytest

from tests.unit.router.tiny_tokenizer import TEMPLATE, make_tokenizer

SECRET = "a secret for tests only"


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(make_tokenizer()._tokenizer.to_str())
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 512, "vocab_size": 260, "eos_token_id": 256}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|end|>"}))
    return folder


async def start(*args: str, secret: str | None = SECRET) -> asyncio.subprocess.Process:
    env = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    if secret is not None:
        env["BATON_CLUSTER_SECRET"] = secret
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router.main", *args, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def refused(*args: str, secret: str | None = SECRET) -> str:
    process = await start(*args, secret=secret)
    async with asyncio.timeout(30):
        _, stderr = await process.communicate()
    assert process.returncode == 2
    (line,) = stderr.decode().strip().splitlines()
    return line


async def test_bad_settings_and_model_files_are_one_line_and_exit_2(model_folder: Path, tmp_path: Path) -> None:
    good = ["--redis-url", "memory://", "--port", "0"]
    lines = await asyncio.gather(
        refused("--model", str(tmp_path / "nowhere"), *good),
        refused("--model", str(model_folder), "--redis-url", "ftp://x", "--port", "0"),
        refused("--model", str(model_folder), *good, "--requests-max", "0"),
    )
    assert "tokenizer.json does not exist" in lines[0]
    assert "must start with one of" in lines[1]
    assert "--requests-max" in lines[2]
    (model_folder / "tokenizer.json").write_text("{")
    short_secret, broken = await asyncio.gather(
        refused("--model", str(model_folder), *good, secret="short"), refused("--model", str(model_folder), *good)
    )
    assert "BATON_CLUSTER_SECRET" in short_secret and "short" not in short_secret
    assert "tokenizer.json cannot be read" in broken


async def test_serves_until_sigterm_and_exits_0(model_folder: Path) -> None:
    process = await start("--model", str(model_folder), "--redis-url", "memory://", "--port", "0")
    assert process.stderr is not None
    try:
        async with asyncio.timeout(30):
            while True:
                line = json.loads(await process.stderr.readline())
                if line["event"] == "router_listening":
                    break
        url = f"http://127.0.0.1:{line['port']}"
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/healthz")).status_code == 200
            assert (await client.get("/readyz")).status_code == 503
            chat = await client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})
            assert chat.json()["count"] == 5
            refusal = await client.post("/v1/completions", json={"model": "tiny", "prompt": "hi"})
            assert refusal.status_code == 503
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(15):
            _, rest = await process.communicate()
        assert process.returncode == 0, rest.decode()
        assert "router_stopped" in rest.decode() and "Traceback" not in rest.decode()
        async with httpx.AsyncClient(base_url=url) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get("/healthz")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_store_away_at_the_start_is_one_clear_line_and_the_router_lives(model_folder: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()  # nobody answers there now
    process = await start("--model", str(model_folder), "--redis-url", f"redis://127.0.0.1:{port}/0", "--port", "0")
    assert process.stderr is not None
    events: list[str] = []
    try:
        async with asyncio.timeout(30):
            while "router_listening" not in events:
                line = json.loads(await process.stderr.readline())
                events.append(line["event"])
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{line['port']}") as client:
            assert (await client.get("/readyz")).json()["degraded"] == ["the state store is away"]
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(15):
            _, rest = await process.communicate()
        assert events.count("store_away") == 1 and "store_away" not in rest.decode() and "Traceback" not in rest.decode()
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
