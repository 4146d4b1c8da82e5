"""The HTTP surface: routes, body reading, and the one place where errors become HTTP answers.

Each handler is a few lines over validation, admission and the orchestrator; none of them knows a worker. Every failure has OpenAI's
error shape, unknown routes and methods included; every answer carries x-request-id.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.api_keys import KeyRing
from common.clock import Clock
from common.errors import BatonError, ClientCancelled, DeadlineExceeded, Internal, InvalidRequest
from common.ids import RequestId, new_request_id
from common.types import Role
from router.access.gate import SCOPE_KEY_ID, AccessGate, cache_salt_of
from router.admission import Admission
from router.answer import Answer
from router.api_models import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from router.fleet import Fleet
from router.metrics import RouterMetrics
from router.models import model_list, model_object
from router.openapi import add_schemas, body_of
from router.orchestrator import Orchestrator
from router.output import OutputSignals
from router.request import Endpoint, RequestContext, ValidRequest
from router.responses import error_headers, error_object
from router.streaming import GenerationResponse
from router.timeline import RequestTimeline
from router.tokenizer import ModelTokenizer
from router.validation import Validator, encodable, parse_generation, parse_json, parse_model

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_SCOPE_REQUEST_ID = "baton.request_id"


@dataclass(frozen=True, slots=True)
class AppSettings:
    """What the HTTP surface itself needs. Bytes, seconds, tokens (None: what the model and the workers allow)."""

    model_name: str
    version: str
    body_bytes_max: int
    body_timeout_s: float
    sequence_tokens_max: int | None
    request_timeout_s: float
    sse_keep_alive_s: float
    metrics_open: bool
    cache_salt_secret: bytes | None  # None: one prefix cache for all keys


class RouterApp:
    """Handlers over the router's parts; `asgi` is the application."""

    def __init__(
        self,
        *,
        settings: AppSettings,
        validator: Validator,
        tokenizer: ModelTokenizer,
        admission: Admission,
        orchestrator: Orchestrator,
        fleet: Fleet,
        clock: Clock,
        metrics: RouterMetrics,
        keys: KeyRing | None,
    ) -> None:
        self._settings = settings
        self._validator = validator
        self._tokenizer = tokenizer
        self._admission = admission
        self._orchestrator = orchestrator
        self._fleet = fleet
        self._clock = clock
        self._metrics = metrics
        self._created = int(clock.wall())
        self._api = FastAPI(title="Baton", version=settings.version, docs_url=None, redoc_url=None, openapi_url="/openapi.json")
        self._add_routes()
        for kind, handler in (
            (BatonError, self._on_error),
            (HTTPException, self._on_http_exception),
            (Exception, self._on_crash),
        ):
            self._api.add_exception_handler(kind, handler)  # type: ignore[arg-type]  # each handler takes its own kind of exception
        self._api.openapi = self._openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document
        gate = AccessGate(self._api, keys, metrics_are_open=settings.metrics_open, send_error=self._send_refusal)
        self.asgi: ASGIApp = _RequestIdHeader(gate)

    def _add_routes(self) -> None:
        post: list[tuple[str, Any, type[BaseModel]]] = [
            ("/v1/chat/completions", self._chat, ChatCompletionRequest),
            ("/v1/completions", self._completions, CompletionRequest),
            ("/tokenize", self._tokenize, TokenizeRequest),
            ("/detokenize", self._detokenize, DetokenizeRequest),
        ]
        get: list[tuple[str, Any]] = [
            ("/v1/models", self._models),
            ("/v1/models/{name:path}", self._model),
            ("/healthz", self._health),
            ("/health", self._health),
            ("/readyz", self._ready),
            ("/metrics", self._render_metrics),
            ("/version", self._version),
        ]
        for path, handler, model in post:
            self._api.add_api_route(path, handler, methods=["POST"], response_model=None, openapi_extra=body_of(model))
        for path, handler in get:
            self._api.add_api_route(path, handler, methods=["GET"], response_model=None)

    def _openapi(self) -> dict[str, Any]:
        document = get_openapi(title=self._api.title, version=self._api.version, routes=self._api.routes)
        return add_schemas(document, [ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest])

    def limit_tokens(self) -> int:
        """The longest prompt + completion a request may have right now."""
        limits = (self._tokenizer.max_positions, self._settings.sequence_tokens_max, self._fleet.sequence_tokens_max())
        return min(limit for limit in limits if limit is not None)

    # ---- generation --------------------------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Any:
        return await self._generate(request, Endpoint.CHAT)

    async def _completions(self, request: Request) -> Any:
        return await self._generate(request, Endpoint.COMPLETION)

    async def _generate(self, request: Request, endpoint: Endpoint) -> Any:
        timeline = RequestTimeline(received_s=self._clock.monotonic())
        request_id = new_request_id(endpoint.id_prefix)
        request.scope[_SCOPE_REQUEST_ID] = request_id
        self._admission.check(timeline.received_s)  # says no before a body is read or tokenised
        context = self._context(request)
        valid = await self._validate(parse_json(await self._read_body(request)), endpoint, request_id, context)
        timeline.tokenised_s = self._clock.monotonic()
        permits = self._admission.try_acquire_many(timeline.tokenised_s, len(valid))
        timeline.admitted_s = self._clock.monotonic()
        signals = OutputSignals()
        calls = [
            self._orchestrator.start(prompt, replace(timeline), permit, signals)
            for prompt, permit in zip(valid, permits, strict=True)
        ]
        return GenerationResponse(Answer(calls, signals), int(self._clock.wall()), self._clock, self._settings.sse_keep_alive_s)

    def _context(self, request: Request) -> RequestContext:
        key_id = request.scope.get(SCOPE_KEY_ID, "")
        secret = self._settings.cache_salt_secret
        salt = cache_salt_of(key_id, secret) if secret is not None and key_id else b""
        return RequestContext(key_id, salt, self._client_deadline_s(request))

    def _client_deadline_s(self, request: Request) -> float:
        """Seconds of the x-request-timeout header; 0 without one. Raises InvalidRequest beyond the operator's limit."""
        text = request.headers.get("x-request-timeout")
        if text is None:
            return 0.0
        limit_s = self._settings.request_timeout_s
        seconds = float(text) if _SECONDS.fullmatch(text) else 0.0
        if not 0.0 < seconds <= limit_s:
            raise InvalidRequest(
                f"'X-Request-Timeout' must be a number of seconds above 0, at most {limit_s:g}, not {text[:32]!r}",
                param="X-Request-Timeout",
                code="invalid_value",
            )
        return seconds

    async def _validate(
        self, raw: dict[str, Any], endpoint: Endpoint, request_id: RequestId, context: RequestContext
    ) -> list[ValidRequest]:
        limit = self.limit_tokens()
        if endpoint is Endpoint.CHAT:
            return [await self._validator.chat(parse_generation(ChatCompletionRequest, raw), request_id, limit, context)]
        body = parse_generation(CompletionRequest, raw)
        return await self._validator.completions(body, request_id, limit, context, self._admission.requests_max)

    async def _read_body(self, request: Request) -> bytes:
        """The whole body, bounded in bytes and time. Raises InvalidRequest, DeadlineExceeded or ClientCancelled."""
        content_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if content_type != "application/json":
            raise InvalidRequest(
                f"the content type must be application/json, not '{content_type[:64]}'", code="unsupported_content_type"
            )
        limit = self._settings.body_bytes_max
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > limit:
            raise _too_large(limit)  # before a byte of it is read
        body = bytearray()
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                async for piece in request.stream():
                    body += piece
                    if len(body) > limit:
                        raise _too_large(limit)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the request body did not arrive within {self._settings.body_timeout_s:g} s") from error
        except ClientDisconnect as error:
            raise ClientCancelled("the client left before its request was complete") from error
        return bytes(body)

    # ---- everything else ---------------------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        return JSONResponse(model_list(self._settings.model_name, self._created, self.limit_tokens()))

    async def _model(self, request: Request) -> Response:
        self._validator.check_model(request.path_params["name"])
        return JSONResponse(model_object(self._settings.model_name, self._created, self.limit_tokens()))

    async def _tokenize(self, request: Request) -> Response:
        body = parse_model(TokenizeRequest, parse_json(await self._read_body(request)))
        if body.model is not None:
            self._validator.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either 'prompt' or 'messages'", param="prompt", code="invalid_value")
        if body.messages is not None:
            ids = await self._validator.chat_prompt(body.messages, add_generation_prompt=body.add_generation_prompt)
        else:
            ids = await self._tokenizer.encode(encodable(body.prompt or "", "prompt"), add_special_tokens=body.add_special_tokens)
        return JSONResponse({"count": len(ids), "max_model_len": self.limit_tokens(), "tokens": ids})

    async def _detokenize(self, request: Request) -> Response:
        body = parse_model(DetokenizeRequest, parse_json(await self._read_body(request)))
        if body.model is not None:
            self._validator.check_model(body.model)
        for token_id in body.tokens:
            if token_id >= self._tokenizer.vocab_size:
                raise InvalidRequest(
                    f"token id {token_id} is outside the vocabulary of {self._tokenizer.vocab_size}",
                    param="tokens",
                    code="invalid_value",
                )
        return JSONResponse({"prompt": self._tokenizer.decode(body.tokens, skip_special_tokens=False)})

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def _ready(self, request: Request) -> Response:
        """Ready means: a request sent now can be served. Redis away is degraded, not unready: the last view still serves."""
        num_decode, num_prefill = len(self._fleet.candidates(Role.DECODE)), len(self._fleet.candidates(Role.PREFILL))
        reasons = []
        if self._admission.is_draining:
            reasons.append("draining")
        if num_decode == 0:
            reasons.append("no decode worker is ready")
        body = {
            "ready": not reasons,
            "reasons": reasons,
            "degraded": [] if self._fleet.is_store_up else ["the state store is away"],
            "workers": {"decode": num_decode, "prefill": num_prefill},
            "refused": {
                f"{worker_id}/{incarnation}": words for (worker_id, incarnation), (_, words) in self._fleet.refused.items()
            },
        }
        return JSONResponse(body, status_code=503 if reasons else 200)

    async def _render_metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": self._settings.version})

    # ---- errors ------------------------------------------------------------------------------------------------------

    async def _on_error(self, request: Request, error: BatonError) -> Response:
        """A refusal before a call existed; failures of calls are rendered by their own response."""
        self._metrics.refusals.labels(kind=error.kind).inc()
        return self._error_response(request, error)

    async def _on_http_exception(self, request: Request, exception: HTTPException) -> Response:
        error = InvalidRequest(
            f"{request.method} {request.url.path}: {exception.detail}", code=exception.detail.lower().replace(" ", "_")
        )
        response = self._error_response(request, error)
        response.status_code = exception.status_code
        response.headers.update(exception.headers or {})
        return response

    async def _send_refusal(self, scope: Scope, send: Send, error: BatonError) -> None:
        """What the gate answers instead of a route."""
        self._metrics.refusals.labels(kind=error.kind).inc()
        response = self._error_response(Request(scope), error)
        response.headers["www-authenticate"] = "Bearer"
        await response(scope, _no_body, send)

    async def _on_crash(self, request: Request, exception: Exception) -> Response:
        return self._error_response(request, Internal("the router failed to handle the request"))

    def _error_response(self, request: Request, error: BatonError) -> Response:
        request_id = request.scope.setdefault(_SCOPE_REQUEST_ID, new_request_id("req"))
        return _AsciiJSONResponse(error_object(error, request_id), error.rule.http_status, error_headers(error))


async def _no_body() -> Message:
    return {"type": "http.disconnect"}


def _too_large(limit: int) -> InvalidRequest:
    return InvalidRequest(f"the request body is larger than {limit} bytes", code="request_too_large")


class _AsciiJSONResponse(JSONResponse):
    """Errors quote what the client sent, lone surrogates included."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=True, separators=(",", ":")).encode("ascii")


class _RequestIdHeader:
    """Puts x-request-id on every answer: the client's own when it is printable and short, else the public request id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                request_id = given if _REQUEST_ID.fullmatch(given) else scope.setdefault(_SCOPE_REQUEST_ID, new_request_id("req"))
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode("latin-1"))]}
            await send(message)

        await self._app(scope, receive, send_with_id)
