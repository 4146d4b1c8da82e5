"""The settings of a load test as locust custom arguments, on the command line and on the web page. Pure.

Each is also an environment variable that starts with BATON_LOAD_. Nothing here knows how a request is sent or timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from loadtest.workloads import RequestClass, select_classes


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """One run, as read when it starts: the web page can change the values between runs."""

    model: str
    classes: tuple[RequestClass, ...]
    prefix_tokens: int
    seed: int
    think_s: float
    timeout_s: float
    failure_ratio_max: float
    wants_timeline: bool
    report_path: str
    api_key: str = field(default="", repr=False)


_ARGUMENTS: tuple[tuple[str, Callable[[str], object], object, str], ...] = (
    ("model", str, "smollm2-135m", "name of the model on the server"),
    ("chat-weight", int, 4, "share of the users that chat, in workload mixed"),
    ("long-weight", int, 1, "share of the users with long prompts, in workload mixed"),
    ("chat-prompt-tokens", int, 100, "prompt length of a chat, about"),
    ("chat-output-tokens", int, 64, "tokens a chat asks for, exactly"),
    ("long-prompt-tokens", int, 1500, "prompt length of a long request, about"),
    ("long-output-tokens", int, 16, "tokens a long request asks for, exactly"),
    ("prefix-tokens", int, 0, "length of a beginning that all prompts share, about; 0: none"),
    ("seed", int, 1, "the same seed sends the same prompts"),
    ("think-time", float, 0.0, "seconds a user waits between two requests"),
    ("request-timeout", float, 300.0, "seconds one request may take"),
    ("failure-ratio-max", float, 0.0, "share of failed requests above which the exit code is 1"),
    ("report-json", str, "", "file for the exact report; empty: none"),
)


def add_arguments(parser: Any) -> None:
    """`parser` is locust's: argparse's, with keywords for environment variables and the web page."""
    parser.add_argument(
        "--workload", choices=["chat", "long", "mixed"], default="chat", env_var="BATON_LOAD_WORKLOAD", help="what is sent"
    )
    for name, kind, default, text in _ARGUMENTS:
        env_var = "BATON_LOAD_" + name.upper().replace("-", "_")
        parser.add_argument(f"--{name}", type=kind, default=default, env_var=env_var, help=text)
    timeline = "ask a Baton router how it placed each request; other servers may refuse the field"
    parser.add_argument("--timeline", choices=["no", "yes"], default="no", env_var="BATON_LOAD_TIMELINE", help=timeline)
    parser.add_argument(
        "--api-key", default="", env_var="BATON_LOAD_API_KEY", is_secret=True, help="bearer token, if one is needed"
    )


def read_options(parsed: argparse.Namespace) -> LoadOptions:
    """Raises ValueError for values that make no load test."""
    if not 0 <= parsed.failure_ratio_max <= 1:
        raise ValueError(f"failure-ratio-max is {parsed.failure_ratio_max:g}: it is a share, from 0 to 1")
    if parsed.think_time < 0 or parsed.request_timeout <= 0 or parsed.prefix_tokens < 0:
        raise ValueError("think-time and prefix-tokens cannot be negative, and request-timeout must be positive")
    chat = RequestClass("chat", parsed.chat_prompt_tokens, parsed.chat_output_tokens, parsed.chat_weight)
    long = RequestClass("long", parsed.long_prompt_tokens, parsed.long_output_tokens, parsed.long_weight)
    return LoadOptions(
        model=parsed.model,
        classes=select_classes(parsed.workload, chat, long),
        prefix_tokens=parsed.prefix_tokens,
        seed=parsed.seed,
        think_s=parsed.think_time,
        timeout_s=parsed.request_timeout,
        failure_ratio_max=parsed.failure_ratio_max,
        wants_timeline=parsed.timeline == "yes",
        report_path=parsed.report_json,
        api_key=parsed.api_key,
    )
