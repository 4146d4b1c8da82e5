"""`baton chat`: an interactive conversation in the terminal, streamed from any OpenAI-compatible server.

Owns the history of messages, which `/reset` empties; Ctrl-C stops the answer that is being streamed (the connection is
closed, so the server stops too) and keeps what was said so far. Nothing is written to disk.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator

import httpx
from rich.console import Console

from baton.instance import InstanceError, find_running
from baton.openai_stream import PATHS, Chunk, StreamFailed, base_url, failure_of_body, parse_event, request_body

HELP = "/reset forgets the conversation · /system TEXT sets the instructions · /quit or Ctrl-D leaves · Ctrl-C stops an answer"


class Conversation:
    """The messages so far and one way to continue them."""

    def __init__(
        self, client: httpx.Client, url: str, model: str, *, system: str = "", max_tokens: int = 512, temperature: float = 0.7
    ) -> None:
        self._client = client
        self._url = url
        self._model = model
        self._max_tokens = max_tokens
        self._temperature = temperature
        self.system = system
        self.messages: list[dict[str, str]] = []

    def reset(self) -> None:
        self.messages.clear()

    def ask(self, text: str, on_text: Callable[[str], None]) -> str:
        """Sends one user message, streams the answer to `on_text`, returns a line about it.

        Ctrl-C (KeyboardInterrupt, not raised further) ends the answer; what was said stays in the history. A question without any
        answer leaves the history as it was. Raises StreamFailed when the server refuses or breaks off.
        """
        question = {"role": "user", "content": text}
        pieces: list[str] = []
        started_s = time.monotonic()
        first_s = last_s = 0.0
        num_tokens = 0
        was_stopped = False
        try:
            for chunk in self._stream([*self.messages, question]):
                if chunk.usage:
                    num_tokens = chunk.usage.num_completion_tokens
                if chunk.text:
                    last_s = time.monotonic() - started_s
                    first_s = first_s or last_s
                    pieces.append(chunk.text)
                    on_text(chunk.text)
        except KeyboardInterrupt:
            was_stopped = True
        if pieces:
            self.messages += [question, {"role": "assistant", "content": "".join(pieces)}]
        if was_stopped:
            return "stopped"
        rate = f", {(num_tokens - 1) / (last_s - first_s):.1f} tok/s" if num_tokens > 1 and last_s > first_s else ""
        return f"first token after {first_s * 1000:.0f} ms, {num_tokens} tokens{rate}"

    def _stream(self, messages: list[dict[str, str]]) -> Iterator[Chunk]:
        instructions = [{"role": "system", "content": self.system}] if self.system else []
        body = request_body("chat", self._model, [*instructions, *messages], self._max_tokens, temperature=self._temperature)
        try:
            with self._client.stream("POST", self._url + PATHS["chat"], json=body) as reply:
                if reply.status_code != 200:
                    raise failure_of_body(reply.read(), reply.status_code)
                for line in reply.iter_lines():
                    chunk = parse_event(line, "chat")
                    if chunk is not None:
                        yield chunk
        except httpx.HTTPError as error:
            raise StreamFailed("connection", f"{type(error).__name__} {error}".strip()) from error


def first_model(client: httpx.Client, url: str) -> str:
    """The name of the first model that the server offers. Raises StreamFailed."""
    try:
        reply = client.get(url + "/v1/models")
        if reply.status_code != 200:
            raise failure_of_body(reply.content, reply.status_code)
        return str(reply.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise StreamFailed("connection", f"{url} does not list its models ({type(error).__name__} {error})") from error


def run(arguments: argparse.Namespace) -> int:
    """Reads questions from the terminal, or one per line from a pipe, until they end. Exit code 1: the server failed."""
    console = Console()
    errors = Console(stderr=True)
    headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    try:
        url = base_url(arguments.url or find_running(arguments.instance).url)
        with httpx.Client(timeout=httpx.Timeout(300.0, connect=5.0), headers=headers, trust_env=False) as client:
            model = arguments.model or first_model(client, url)
            talk = Conversation(
                client, url, model, system=arguments.system, max_tokens=arguments.max_tokens, temperature=arguments.temperature
            )
            return _loop(talk, console, errors, f"{model} at {url}")
    except (InstanceError, StreamFailed) as error:
        errors.print(f"baton chat: {error}", style="red", markup=False)
        return 1


def _loop(talk: Conversation, console: Console, errors: Console, title: str) -> int:
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        import readline  # noqa: F401  line editing and history for input()

        console.print(f"{title}\n{HELP}", style="dim", markup=False)
    exit_code = 0
    while True:
        try:
            text = input("you> " if is_interactive else "").strip()
        except EOFError:
            return exit_code
        except KeyboardInterrupt:
            console.print()
            return 130
        if not text:
            continue
        if text in ("/quit", "/exit"):
            return exit_code
        if text == "/reset":
            talk.reset()
        elif text.startswith("/system"):
            talk.system = text.removeprefix("/system").strip()
        elif text.startswith("/"):
            console.print(HELP, style="dim", markup=False)
        else:
            exit_code = max(exit_code, _answer(talk, text, console, errors, is_interactive))


def _answer(talk: Conversation, text: str, console: Console, errors: Console, is_interactive: bool) -> int:
    try:
        note = talk.ask(text, lambda piece: console.print(piece, end="", markup=False, highlight=False, soft_wrap=True))
    except StreamFailed as error:
        console.print()
        errors.print(f"baton chat: {error}", style="red", markup=False)
        return 1
    console.print()
    if is_interactive:
        console.print(note, style="dim", markup=False)
    return 0
