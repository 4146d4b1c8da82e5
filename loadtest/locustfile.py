"""The locust side: `locust -f loadtest/locustfile.py --host URL`, one user class, the entries it fires, and the end of a run.

Joins the workload, the stream and the results; decides nothing about them. Entries are (type, name): TTFT, ITL, TPOT and SSE (the
whole request, with its failures) by class of request, in milliseconds.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gevent
from locust import User, events, task
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import MasterRunner, WorkerRunner

from baton.openai_stream import base_url
from loadtest.options import LoadOptions, add_arguments, read_options
from loadtest.results import Results, write_json
from loadtest.stream import Target, TargetFailed, calibrate, send
from loadtest.workloads import PromptKey, class_of_user, make_text

LATENESS_EVERY_S = 0.05
log = logging.getLogger("loadtest")


class Run:
    """The run in this process, from test_start to test_stop. A web page can start one after the other."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.results = Results()
        self.options: LoadOptions | None = None
        self.target: Target | None = None
        self.words: Callable[[int], int] = lambda num_tokens: num_tokens
        self.users = itertools.count()
        self.worker = max(0, environment.runner.worker_index) if isinstance(environment.runner, WorkerRunner) else 0
        self._cpu_before_s = time.process_time()
        self._watch: gevent.Greenlet | None = None

    def start(self) -> None:
        """Reads the settings and calibrates. What goes wrong is the run's problem, and the first user ends it."""
        try:
            self.options = options = read_options(self.environment.parsed_options or argparse.Namespace())
            if not self.environment.host:
                raise ValueError("--host is not given: the URL of the server, with or without /v1")
            self.target = Target(
                base_url(self.environment.host), options.model, options.timeout_s, options.wants_timeline, options.api_key
            )
            if not isinstance(self.environment.runner, MasterRunner):
                with self.target.client() as client:
                    self.words = calibrate(client, self.target)
        except (ValueError, TargetFailed) as error:
            self.results.problem = str(error)
            log.error("%s", error)
        self._cpu_before_s = time.process_time()
        self._watch = gevent.spawn(self._watch_lateness)

    def _watch_lateness(self) -> None:
        """How much later than asked this process's loop comes round: no event can have been timed with a larger delay than that."""
        while True:
            due_s = time.monotonic() + LATENESS_EVERY_S
            gevent.sleep(LATENESS_EVERY_S)
            self.results.client.lateness_s.append(max(0.0, time.monotonic() - due_s))

    def account(self) -> None:
        """Books the CPU time since the last call."""
        now_s = time.process_time()
        self.results.client.cpu_s += now_s - self._cpu_before_s
        self._cpu_before_s = now_s

    def stop(self) -> None:
        self.account()
        if self._watch is not None:
            self._watch.kill()
            self._watch = None


_runs: dict[int, Run] = {}
"""The present run by environment: locust gives its listeners nothing else to hang it on."""


def run_of(environment: Environment) -> Run:
    return _runs[id(environment)]


class StreamUser(User):
    """Sends one streaming request after the other, all of the class that its number gives it."""

    def on_start(self) -> None:
        self.run_state = run = run_of(self.environment)
        if run.results.problem or run.options is None or run.target is None:
            return
        self.options = run.options
        self.target = run.target
        self.number = next(run.users)
        self.request_class = class_of_user(self.number, self.options.classes)
        self.num_sent = 0
        self.http = self.target.client()

    def on_stop(self) -> None:
        if hasattr(self, "http"):
            self.http.close()

    def wait_time(self) -> float:
        return self.options.think_s

    @task
    def stream(self) -> None:
        if self.run_state.results.problem:
            # In a greenlet of its own: it waits until all users have ended, and this is one. The web page stays for another try.
            runner = self.environment.runner
            gevent.spawn(runner.quit if self.environment.web_ui is None else runner.stop)
            raise StopUser
        run, one = self.run_state, self.request_class
        key = PromptKey(run.worker, self.number, self.num_sent)
        self.num_sent += 1
        num_prefix_words = run.words(self.options.prefix_tokens) if self.options.prefix_tokens else 0
        prompt = make_text(self.options.seed, one.name, key, run.words(one.prompt_tokens), num_prefix_words)
        outcome = None
        try:
            outcome = send(self.http, self.target, one.name, prompt, one.output_tokens, self._on_piece)
        finally:
            if outcome is None:
                run.results.num_abandoned += 1
        run.results.outcomes.append(outcome)
        record = outcome.record
        error = Failed(record.error) if record.error else None
        self._fire("SSE", (record.ended_s - record.sent_s) * 1000, error, record.num_completion_tokens)
        if not record.error and record.tpot_s is not None:
            self._fire("TPOT", record.tpot_s * 1000)

    def _on_piece(self, is_first: bool, gap_s: float) -> None:
        self._fire("TTFT" if is_first else "ITL", gap_s * 1000)

    def _fire(self, kind: str, time_ms: float, error: Exception | None = None, length: int = 0) -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name=self.request_class.name,
            response_time=time_ms,
            response_length=length,
            exception=error,
            context={},
        )


class Failed(Exception):
    """Why a request failed, as locust lists it: the kind alone, so that equal failures are counted together."""


def _add_arguments(parser: Any, **_: object) -> None:
    add_arguments(parser)


def _start(environment: Environment, **_: object) -> None:
    run = _runs[id(environment)] = Run(environment)
    run.start()


def _report(data: dict[str, Any], **_: object) -> None:
    # A worker process has one environment, and its last report follows test_stop.
    for run in _runs.values():
        run.account()
        data["baton"] = run.results.take()


def _merge(data: dict[str, Any], **_: object) -> None:
    for run in _runs.values():
        if "baton" in data:
            run.results.merge(data["baton"])


def _stop(environment: Environment, **_: object) -> None:
    run = _runs.get(id(environment))
    if run is not None:
        run.stop()
        if not isinstance(environment.runner, WorkerRunner) and environment.web_ui is not None:
            _finish(environment)


def _finish(environment: Environment, **_: object) -> None:
    """The report and the exit code; on the web page after each run, on the command line at the end, when all users have ended."""
    run = _runs.get(id(environment))
    if run is None or isinstance(environment.runner, WorkerRunner):
        return
    run.stop()
    failure_ratio_max = run.options.failure_ratio_max if run.options else 0.0
    reasons = run.results.verdict(failure_ratio_max)
    for reason in reasons:
        log.error("not good: %s", reason)
    environment.process_exit_code = 1 if reasons else 0
    settings = asdict(run.options) if run.options else {}
    settings.pop("api_key", None)
    summary = run.results.summary(settings | {"host": environment.host}, failure_ratio_max)
    log.info("client: %s", summary["client"])
    if run.options and run.options.report_path:
        write_json(Path(run.options.report_path), summary)


_LISTENERS: tuple[tuple[Any, Callable[..., None]], ...] = (
    (events.init_command_line_parser, _add_arguments),
    (events.test_start, _start),
    (events.report_to_master, _report),
    (events.worker_report, _merge),
    (events.test_stop, _stop),
    (events.quitting, _finish),
)
for _hook, _listener in _LISTENERS:
    _hook.add_listener(_listener)
# One line per request of the HTTP library would be part of what is measured.
logging.getLogger("httpx").setLevel(logging.WARNING)
# Timers count from the loop's own idea of now, which is as old as the imports are long: --run-time would end that much too early.
gevent.get_hub().loop.update_now()
