"""The command `baton`: its subcommands and flags.

Owns the parser only; each subcommand lives in a module of its own, imported when it is used. Exit codes are those of the
subcommands; flags that cannot be parsed give 2.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence

DEMO_MODEL = "smollm2-135m"


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def not_negative(text: str) -> int:
    """A whole number of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def seconds(text: str) -> float:
    """A duration of at least 0 seconds."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value


def port(text: str) -> int:
    """A TCP port, or 0 for a free one."""
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{value} is not a port between 0 and 65535")
    return value


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="baton", description="LLM serving with prefill and decode on separate workers.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_up(commands)
    _add_down(commands)
    _add_chat(commands)
    _add_ps(commands)
    _add_doctor(commands)
    _add_bench(commands)
    _add_key(commands)
    return parser


def _command(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=text, description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter)


def _add_instance(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--instance", default="default", help="name of the running fleet on this machine")


def _add_api_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", ""), help=argparse.SUPPRESS)


def _add_up(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(commands, "up", "start a fleet on this machine and serve until Ctrl-C")
    _add_instance(parser)
    parser.add_argument("--model", default=DEMO_MODEL, help="Hugging Face folder, .gguf file, hub name, or the demo model")
    parser.add_argument("--served-model-name", default="", help="name towards clients; empty: from --model")
    parser.add_argument("--prefill", type=not_negative, default=1, help="prefill workers; 0 computes prompts on decode workers")
    parser.add_argument("--decode", type=positive, default=1, help="decode workers")
    parser.add_argument("--host", default="127.0.0.1", help="address the router listens on")
    parser.add_argument("--port", type=port, default=8000, help="port of the router; 0 takes a free one")
    parser.add_argument("--transport", choices=("auto", "ucx", "tcp"), default="auto", help="data plane of the KV transfer")
    parser.add_argument("--cpus-prefill", default="", help="cores of each prefill worker, such as '0-3;4-7'; empty: not pinned")
    parser.add_argument("--cpus-decode", default="", help="cores of each decode worker, such as '8;9'; empty: not pinned")
    parser.add_argument(
        "--threads", type=not_negative, default=0, help="compute threads of each worker; 0: the cores are shared out"
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="", help="of weights, activations and KV; empty: the workers' default"
    )
    parser.add_argument("--block-size", type=not_negative, default=0, help="tokens in a KV block; 0: the workers' default")
    parser.add_argument("--num-blocks", type=not_negative, default=0, help="KV blocks of each worker; 0: the workers' default")
    parser.add_argument(
        "--redis-url", default=os.environ.get("REDIS_URL", ""), help="state store; empty: an embedded server is started"
    )
    parser.add_argument("--ready-timeout", type=seconds, default=180.0, help="seconds the processes may take to become ready")
    parser.add_argument("--drain-grace", type=seconds, default=10.0, help="seconds running requests may take at the end")
    parser.add_argument(
        "--no-self-check", dest="self_check", action="store_false", help="do not stream an answer after the start"
    )
    _add_api_key(parser)
    parser.add_argument("--detach", action="store_true", help="serve in the background; `baton down` stops it")
    parser.add_argument("--ready-fd", type=int, default=-1, help=argparse.SUPPRESS)


def _add_down(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(commands, "down", "stop a fleet that `baton up` started on this machine")
    _add_instance(parser)
    parser.add_argument("--timeout", type=seconds, default=60.0, help="seconds the ordered stop may take before it is killed")


def _add_chat(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(commands, "chat", "chat with a model in the terminal")
    _add_instance(parser)
    _add_api_key(parser)
    parser.add_argument("--url", default="", help="an OpenAI-compatible server; empty: the running instance")
    parser.add_argument("--model", default="", help="empty: the first one that the server lists")
    parser.add_argument("--system", default="", help="instructions for the model")
    parser.add_argument("--max-tokens", type=positive, default=512, help="longest answer")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy")


def _add_ps(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(commands, "ps", "show workers, requests in flight and block ownership, read from Redis")
    _add_instance(parser)
    parser.add_argument("--redis-url", default="", help="state store; empty: that of the running instance")
    parser.add_argument("--cluster", default="baton", help="name of the fleet, with --redis-url")
    parser.add_argument("--all", action="store_true", help="also requests that have ended")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(commands, "doctor", "say what works on this machine, and how to fix what does not")
    parser.add_argument(
        "--redis-url", default=os.environ.get("REDIS_URL", ""), help="state store to look for; empty: the embedded server"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(commands, "bench", "measure latency and throughput of an OpenAI-compatible server (closed loop)")
    _add_api_key(parser)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server, with or without /v1")
    parser.add_argument("--model", default=DEMO_MODEL, help="name of the model on the server")
    parser.add_argument("--endpoint", choices=("completions", "chat"), default="completions", help="which API")
    parser.add_argument("--concurrency", type=positive, default=4, help="clients, each with one request at a time")
    parser.add_argument("--requests", type=positive, default=32, help="measured requests")
    parser.add_argument("--warmup", type=not_negative, default=1, help="requests before the measurement")
    parser.add_argument("--prompt-tokens", type=positive, default=128, help="about this many tokens in each prompt")
    parser.add_argument("--output-tokens", type=positive, default=64, help="tokens asked for")
    parser.add_argument("--seed", type=int, default=0, help="other seeds give other prompts")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--timeout", type=seconds, default=300.0, help="seconds one request may take")
    parser.add_argument(
        "--respect-eos", dest="ignore_eos", action="store_false", help="do not send ignore_eos, which some servers refuse"
    )
    parser.add_argument("--json", default="", metavar="FILE", help="write the report as JSON; - prints it alone")


def _add_key(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands, "key", "make an API key: the key on standard error, its entry for the router's key file on standard output"
    )
    parser.add_argument("id", help="what logs and limits call the holder: 1 to 64 letters, digits, '_', '.' or '-'")


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = build_parser().parse_args(words)
    arguments.argv = words
    command: Callable[[argparse.Namespace], int] = importlib.import_module(f"baton.{arguments.command}").run
    return command(arguments)


if __name__ == "__main__":
    sys.exit(main())
