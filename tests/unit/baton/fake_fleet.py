"""Stand-ins for the router and the workers of `baton up`, run as real child processes.

The router answers `/readyz` once the folder holds a file for each wanted worker, and streams chat completions; a worker writes such a file
and removes it at SIGTERM. Every orderly end is noted in the file `order`. Run as `python fake_fleet.py router|worker …`.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path


def note_end(folder: Path, name: str) -> None:
    with (folder / "order").open("a") as order:
        order.write(name + "\n")


class Router(http.server.BaseHTTPRequestHandler):
    folder: Path

    def do_GET(self) -> None:
        roles = Counter(path.name.split(".")[1].rpartition("-")[0] for path in self.folder.glob("ready.*"))
        self._send("application/json", json.dumps({"ready": True, "workers": dict(roles), "refused": {}}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        timeline: dict[str, object] = {
            "mode": "disaggregated", "prefill_worker": "prefill-0", "decode_worker": "decode-0", "transport": "ucx", "ttft_s": 0.01,
            "stages": {"prefill_queue": 0.001, "prefill": 0.005},
            "handoff": {"num_bytes": 3 << 20, "num_frames": 2, "num_blocks": 9, "stages": {"transfer": 0.002}},
        }  # fmt: skip
        if os.environ.get("FAKE_MODE") == "local":
            timeline = {"mode": "local", "placement_reason": "short prompt", "handoff": None}
        events = [{"choices": [{"delta": {"content": piece}}]} for piece in ("Runners", " pass", " a baton.")]
        events.append({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}, "baton": timeline})
        self._send("text/event-stream", "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")

    def _send(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        return


def run_router(folder: Path, port: int) -> None:
    Router.folder = folder
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Router)

    def leave(*_: object) -> None:
        note_end(folder, "router")
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, leave)
    server.serve_forever()
    server.server_close()


def run_worker(folder: Path, name: str, manner: str) -> None:
    if manner == "broken":
        print("model file is truncated", flush=True)
        sys.exit(3)
    assert len(os.environ["BATON_CLUSTER_SECRET"]) >= 32
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ready = folder / f"ready.{name}"
    if manner != "slow":
        ready.touch()
    ended.wait(600)
    ready.unlink(missing_ok=True)
    note_end(folder, name)


if __name__ == "__main__":
    kind, where, *rest = sys.argv[1:]
    if kind == "router":
        run_router(Path(where), int(rest[0]))
    else:
        run_worker(Path(where), rest[0], rest[1])
