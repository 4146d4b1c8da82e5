"""Settings that every worker process has, whatever its role. Read once in `main`, frozen, handed on value by value.

A service subclasses `WorkerSettings` with what only its role needs. Units are in the names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator


class WorkerSettings(BaseModel):
    """One worker process. Every field is a flag (`--field-name`), an environment variable (`BATON_FIELD_NAME`) or a TOML key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path = Field(description="folder of the model in Hugging Face format")
    served_model_name: str = Field(default="", description="name of the model towards clients; default: the folder's name")
    worker_id: str = Field(
        default="", max_length=64, description="stable name of this worker in the fleet; default: role, host and pid"
    )
    cluster: str = Field(
        default="baton", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="name of the fleet: prefix of all keys in the store"
    )
    cluster_secret: SecretStr = Field(description="shared by all routers and workers of the fleet; set BATON_CLUSTER_SECRET")
    redis_url: str = Field(description="state store: redis://…, unix://…, or memory:// for a single process")
    host: str = Field(default="127.0.0.1", description="address that gRPC and the KV control link listen on")
    advertise_host: str = Field(
        default="", description="address that others reach this worker at; default: --host, or the host name for 0.0.0.0"
    )
    grpc_port: int = Field(default=0, ge=0, le=65535, description="port of the gRPC service; 0 takes a free one")
    kv_port: int = Field(default=0, ge=0, le=65535, description="port of the KV control link; 0 takes a free one")
    metrics_host: str = Field(default="127.0.0.1", description="address of the Prometheus endpoint")
    metrics_port: int = Field(
        default=0, ge=-1, le=65535, description="port of the Prometheus endpoint; 0 takes a free one, -1 switches it off"
    )
    transport: Literal["ucx", "tcp"] = Field(default="ucx", description="data plane that moves KV blocks")
    kv_wire_format: Literal["none", "int8", "fp8"] = Field(
        default="none",
        description="int8 and fp8 halve the bytes of a handoff but not exactly: answers may change; equal on all workers",
    )
    dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", description="dtype of weights, activations and KV cache")
    device: str = Field(default="cpu", description="torch device of the model")
    block_size: int = Field(default=16, ge=1, le=256, description="tokens in one KV block; equal on all workers")
    num_blocks: int = Field(default=0, ge=0, description="KV blocks in the pool; 0: as many as --kv-bytes holds")
    kv_bytes: int = Field(default=1 << 30, ge=1 << 20, description="bytes of the KV pool when --num-blocks is 0")
    token_budget: int = Field(default=512, ge=16, le=65536, description="tokens that one step may compute")
    max_sequences: int = Field(default=64, ge=1, le=4096, description="sequences that run at the same time")
    waiting_max: int = Field(default=256, ge=1, description="sequences that may wait for a slot; more are refused as overload")
    max_sequence_tokens: int = Field(
        default=0, ge=0, description="longest prompt + completion; 0: what the model and the pool allow"
    )
    threads: int = Field(default=0, ge=0, le=512, description="compute threads; 0: as many as the process may use cores")
    cpus: str = Field(default="", description="cores this process is pinned to, such as 0-3,6; empty: not pinned")
    kernels: Literal["auto", "native", "triton", "reference"] = Field(
        default="auto", description="kernels: compiled C++ (cpu), Triton (cuda), or plain torch"
    )
    num_slabs: int = Field(
        default=16, ge=1, le=1024, description="staging slabs, each of --slab-bytes: bounds the frames in flight"
    )
    slab_bytes: int = Field(
        default=4 << 20, ge=1 << 12, description="bytes of one staging slab; at least one KV block is made to fit"
    )
    heartbeat_s: float = Field(default=0.5, gt=0, le=60, description="seconds between publications to the store")
    worker_ttl_s: float = Field(default=3.0, gt=0, le=600, description="seconds after which a silent worker's record expires")
    drain_grace_s: float = Field(
        default=30.0, ge=0, description="seconds that a drain waits for running work before it is aborted"
    )
    engine_stall_s: float = Field(
        default=60.0, gt=0, description="seconds a step may take before the worker calls itself dead and exits"
    )

    @field_validator("cluster_secret")
    @classmethod
    def _secret_is_long_enough(cls, value: SecretStr) -> SecretStr:
        if len(value.get_secret_value()) < 16:
            raise ValueError(f"has {len(value.get_secret_value())} characters, at least 16 are needed")
        return value

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.name

    @property
    def secret_bytes(self) -> bytes:
        return self.cluster_secret.get_secret_value().encode()


def parse_cpus(text: str) -> set[int]:
    """`"0-2,5"` → {0, 1, 2, 5}. Raises ValueError naming the part that is not a core or a range."""
    cpus: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, dash, last = part.partition("-")
        try:
            low = int(first)
            high = int(last) if dash else low
        except ValueError as error:
            raise ValueError(f"cpus: {part!r} is neither a core number nor a range such as 0-3") from error
        if low < 0 or high < low or high > 4095:
            raise ValueError(f"cpus: {part!r} is not a range of cores between 0 and 4095")
        cpus.update(range(low, high + 1))
    return cpus
