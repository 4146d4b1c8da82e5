"""A scriptable worker for router tests: a real gRPC server of serving.proto with a deterministic token generator behind it.

The next token is a pure function of (all token ids so far, sampling seed), so any pair of fakes, in any number of attempts, must
produce the same completion as `completion_tokens`. Scripts say what goes wrong: refuse, fail, die or stall at a token index.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc

from common.ids import Incarnation, WorkerId, new_incarnation
from common.rpc import serving_pb2 as pb
from common.rpc import serving_pb2_grpc
from common.rpc.channels import SERVER_OPTIONS
from common.rpc.interceptors import ClusterGate
from common.types import BlockCensus, Role, WorkerInfo, WorkerLoad, WorkerState

SECRET = b"a secret for tests only"
NextToken = Callable[[list[int], int], int]


def hash_token(known: list[int], seed: int) -> int:
    """A printable ASCII byte token that depends on everything before it."""
    digest = hashlib.blake2b(repr((known, seed)).encode(), digest_size=4).digest()
    return 32 + int.from_bytes(digest, "big") % 90


def completion_tokens(prompt: list[int], num_tokens: int, seed: int = 0, next_token: NextToken = hash_token) -> list[int]:
    known = list(prompt)
    for _ in range(num_tokens):
        known.append(next_token(known, seed))
    return known[len(prompt) :]


def fake_logprob(index: int) -> float:
    """What every fake reports of completion token `index`; its alternative with rank r has r less. Exact in fp32."""
    return -0.125 - (index % 16) / 16


def tokens_message(spec: pb.SequenceSpec, first_index: int, token_ids: list[int]) -> pb.Tokens:
    message = pb.Tokens(first_index=first_index, token_ids=token_ids)
    if spec.HasField("logprobs"):
        for index, token_id in enumerate(token_ids, first_index):
            ranks = range(spec.logprobs)
            message.logprobs.append(
                pb.TokenLogprobs(
                    logprob=fake_logprob(index),
                    top_ids=[(token_id + rank) % 256 for rank in ranks],
                    top_logprobs=[fake_logprob(index) - rank for rank in ranks],
                )
            )
    return message


def prompt_logprobs_events(attempt: pb.Attempt, spec: pb.SequenceSpec) -> list[pb.Event]:
    """In two pieces, as from two chunks. The value of position p is `fake_logprob(p)`, the one alternative is the token itself."""
    if not spec.HasField("prompt_logprobs"):
        return []
    end = spec.num_prompt_tokens
    pieces = [range(1, (end + 1) // 2), range((end + 1) // 2, end)]
    return [
        pb.Event(
            attempt=attempt,
            prompt_logprobs=pb.PromptLogprobs(
                first_position=piece[0],
                logprobs=[
                    pb.TokenLogprobs(logprob=fake_logprob(p), top_ids=[spec.token_ids[p]], top_logprobs=[fake_logprob(p)])
                    for p in piece
                ],
            ),
        )
        for piece in pieces
        if piece
    ]


@dataclass
class Script:
    """What goes wrong. Indexes are token indexes of the completion; None means it does not happen.

    `refuse_kind` answers the opening command with Failed. `fail_kind_at` sends Failed instead of that token. `die_at` kills
    the server instead of sending that token. `stall_at` sends nothing from that token on, until aborted. `release` set by a
    test lets stalled sequences go on.
    """

    refuse_kind: str | None = None
    refuse_times: int = 10**9
    refuse_retry_after_s: float = 0.0
    fail_kind_at: tuple[str, int] | None = None
    die_at: int | None = None
    stall_at: int | None = None
    token_delay_s: float = 0.0
    tokens_per_message: int = 1
    release: asyncio.Event = field(default_factory=asyncio.Event)


class FakeWorker(serving_pb2_grpc.WorkerServicer):
    """One worker. `commands` lists what arrived (kind, attempt); `aborted` the attempts aborted, with an event to wait on."""

    def __init__(
        self,
        worker_id: str,
        role: Role,
        *,
        next_token: NextToken = hash_token,
        fingerprint: str = "fp",
        model: str = "tiny",
        block_size: int = 16,
        max_sequence_tokens: int = 512,
        handoffs: dict[str, asyncio.Event] | None = None,
    ) -> None:
        self.role = role
        self.script = Script()
        self.next_token = next_token
        self.handoffs = handoffs if handoffs is not None else {}
        self.worker_id = worker_id
        self.fingerprint = fingerprint
        self.model = model
        self.block_size = block_size
        self.max_sequence_tokens = max_sequence_tokens
        self.incarnation: str = new_incarnation()
        self.state = WorkerState.READY
        self.load = WorkerLoad(num_blocks_available=1000)
        self.address = ""
        self.commands: list[tuple[str, pb.Attempt]] = []
        self.specs: list[pb.SequenceSpec] = []
        self.aborted: list[pb.Attempt] = []
        self._changed = asyncio.Event()
        self.num_tokens_sent = 0
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._sessions: list[asyncio.Queue[pb.Events | None]] = []
        self._server: grpc.aio.Server | None = None

    # ---- life --------------------------------------------------------------------------------------------------------

    async def start(self, port: int = 0) -> None:
        self._server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[ClusterGate(SECRET, lambda: None)])
        serving_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self._server.start()

    async def stop(self) -> None:
        server, self._server = self._server, None
        for task in list(self._tasks.values()):
            task.cancel()
        if server is not None:
            await server.stop(None)

    async def drop_sessions(self) -> None:
        """Cuts the streams but stays alive: a network blip."""
        await self.wait_for(lambda: bool(self._sessions))
        for queue in self._sessions:
            queue.put_nowait(None)

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            worker_id=WorkerId(self.worker_id),
            incarnation=Incarnation(self.incarnation),
            role=self.role,
            state=self.state,
            grpc_address=self.address,
            kv_address="127.0.0.1:1",
            kv_scheme="tcp",
            model=self.model,
            kv_fingerprint=self.fingerprint,
            block_size=self.block_size,
            num_blocks=1000,
            max_sequence_tokens=self.max_sequence_tokens,
            dtype="float32",
            pid=1,
            version="test",
            load=self.load,
        )

    @property
    def census(self) -> BlockCensus:
        return BlockCensus(1000, 1000, 0, 0)

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    async def wait_for(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        # it is looked at whenever a command arrives, events leave or a sequence ends."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def count(self, kind: str) -> int:
        return sum(1 for name, _ in self.commands if name == kind)

    # ---- the service -------------------------------------------------------------------------------------------------

    async def Describe(self, request: pb.DescribeRequest, context: object) -> pb.WorkerDescription:
        return pb.WorkerDescription(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=self.role.value,
            kv_fingerprint=self.fingerprint,
            model=self.model,
        )

    async def Session(self, request_iterator: AsyncIterator[pb.Command], context: object) -> AsyncIterator[pb.Events]:
        queue: asyncio.Queue[pb.Events | None] = asyncio.Queue()
        self._sessions.append(queue)
        self._notify()
        reader = asyncio.create_task(self._read(request_iterator, queue))
        try:
            while (message := await queue.get()) is not None:
                yield message
        finally:
            reader.cancel()
            self._sessions.remove(queue)
            for task in list(self._tasks.values()):
                task.cancel()

    async def _read(self, commands: AsyncIterator[pb.Command], queue: asyncio.Queue[pb.Events | None]) -> None:
        async for command in commands:
            kind = command.WhichOneof("command")
            message = getattr(command, kind)
            if kind != "hello":
                self.commands.append((kind, message.attempt))
            if kind == "abort":
                self.aborted.append(message.attempt)
                task = self._tasks.get((message.attempt.request_id, message.attempt.epoch))
                if task is not None:
                    task.cancel()
            elif kind != "hello":
                self.specs.append(message.sequence)
                self._open(kind, message, queue)
            self._notify()

    def _open(self, kind: str, message: pb.Prefill | pb.Reserve | pb.Generate, queue: asyncio.Queue[pb.Events | None]) -> None:
        key = (message.attempt.request_id, message.attempt.epoch)
        run = {"prefill": self._prefill, "reserve": self._decode, "generate": self._generate}[kind]
        task = asyncio.create_task(run(message, queue))
        self._tasks[key] = task

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.pop(key, None)
            self._notify()
            if not task.cancelled() and task.exception() is not None:
                raise task.exception()  # type: ignore[misc]

        task.add_done_callback(done)

    def _refuses(self, message, queue) -> bool:  # type: ignore[no-untyped-def]
        if self.script.refuse_kind is None or self.script.refuse_times <= 0:
            return False
        self.script.refuse_times -= 1
        failed = pb.Failed(
            kind=self.script.refuse_kind, message="refused by script", retry_after_s=self.script.refuse_retry_after_s
        )
        self._send(queue, pb.Event(attempt=message.attempt, failed=failed))
        return True

    async def _prefill(self, message: pb.Prefill, queue: asyncio.Queue[pb.Events | None]) -> None:
        if self._refuses(message, queue):
            return
        spec = message.sequence
        index = len(spec.token_ids) - spec.num_prompt_tokens
        if await self._trouble(index, message, queue):
            return
        token = self.next_token(list(spec.token_ids), spec.sampling.seed)
        timeline = pb.PrefillTimeline(
            received_s=50.0, scheduled_s=50.001, computed_s=50.004, first_token_s=50.005, num_cached_tokens=2, num_chunks=1
        )
        tokens = tokens_message(spec, index, [token])
        self._send(
            queue,
            *prompt_logprobs_events(message.attempt, spec),
            pb.Event(attempt=message.attempt, tokens=tokens),
            pb.Event(attempt=message.attempt, prefilled=timeline),
        )
        if token in spec.stop.stop_token_ids or index + 1 >= spec.stop.max_new_tokens:
            reason = "stop" if token in spec.stop.stop_token_ids else "length"
            self._send(queue, pb.Event(attempt=message.attempt, finished=pb.Finished(reason=reason, num_tokens=index + 1)))
            return
        self.handoffs.setdefault(message.handoff_id, asyncio.Event()).set()
        self._send(queue, pb.Event(attempt=message.attempt, finished=pb.Finished(reason="handed_over", num_tokens=index + 1)))

    async def _decode(self, message: pb.Reserve, queue: asyncio.Queue[pb.Events | None]) -> None:
        if self._refuses(message, queue):
            return
        self._send(queue, pb.Event(attempt=message.attempt, reserved=pb.Reserved(num_cached_tokens=0, num_blocks=1)))
        await self.handoffs.setdefault(message.handoff_id, asyncio.Event()).wait()
        spec = message.sequence
        known = list(spec.token_ids)
        known.append(self.next_token(known, spec.sampling.seed))
        handoff = pb.HandoffTimeline(
            reserved_s=70.0, opened_s=70.001, first_frame_s=70.002, last_announced_s=70.003, last_frame_s=70.004, committed_s=70.005,
            first_decode_s=70.006, num_frames=2, num_bytes=8192, num_blocks=2, transport="tcp",
        )  # fmt: skip
        await self._decode_from(known, message, queue, handoff)

    async def _generate(self, message: pb.Generate, queue: asyncio.Queue[pb.Events | None]) -> None:
        if self._refuses(message, queue):
            return
        await self._decode_from(list(message.sequence.token_ids), message, queue, None)

    async def _decode_from(self, known, message, queue, handoff) -> None:  # type: ignore[no-untyped-def]
        spec = message.sequence
        pending: list[int] = []
        is_local, is_first = handoff is None, True
        while True:
            index = len(known) - spec.num_prompt_tokens
            if await self._trouble(index, message, queue):
                return
            token = self.next_token(known, spec.sampling.seed)
            known.append(token)
            pending.append(token)
            is_stop = token in spec.stop.stop_token_ids and index >= spec.stop.min_new_tokens
            is_end = is_stop or index + 1 >= spec.stop.max_new_tokens
            if is_end or len(pending) >= self.script.tokens_per_message:
                events = [pb.Event(attempt=message.attempt, tokens=tokens_message(spec, index + 1 - len(pending), pending))]
                if is_local and is_first:
                    events = prompt_logprobs_events(message.attempt, spec) + events
                    events.append(
                        pb.Event(
                            attempt=message.attempt,
                            prefilled=pb.PrefillTimeline(received_s=1.0, scheduled_s=1.001, first_token_s=1.002),
                        )
                    )
                elif is_first:
                    events.append(pb.Event(attempt=message.attempt, handed_over=handoff))
                is_first = False
                self._send(queue, *events)
                pending = []
            if is_end:
                finished = pb.Finished(reason="stop" if is_stop else "length", num_tokens=index + 1)
                self._send(queue, pb.Event(attempt=message.attempt, finished=finished))
                return

    async def _trouble(self, index: int, message, queue) -> bool:  # type: ignore[no-untyped-def]
        script = self.script
        if script.token_delay_s:
            await asyncio.sleep(script.token_delay_s)
        else:
            await asyncio.sleep(0)
        if script.fail_kind_at is not None and index >= script.fail_kind_at[1]:
            failed = pb.Failed(kind=script.fail_kind_at[0], message="failed by script")
            self._send(queue, pb.Event(attempt=message.attempt, failed=failed))
            return True
        if script.die_at is not None and index >= script.die_at:
            asyncio.create_task(self.stop())  # noqa: RUF006  the death of the process this code would run in
            await asyncio.Event().wait()
        if script.stall_at is not None and index >= script.stall_at:
            await script.release.wait()
        return False

    def _send(self, queue: asyncio.Queue[pb.Events | None], *events: pb.Event) -> None:
        self.num_tokens_sent += sum(len(event.tokens.token_ids) for event in events)
        queue.put_nowait(pb.Events(events=list(events)))
        self._notify()
