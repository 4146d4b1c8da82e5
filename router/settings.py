"""The router's settings: one frozen object, read once in `main`, each field with its unit and reason.

Every field is a flag (`--field-name`), an environment variable (`BATON_FIELD_NAME`) or a TOML key. Parts of the router get the values
they need, never this object.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator


class RouterSettings(BaseModel):
    """The HTTP front of a Baton fleet: takes OpenAI-style requests and has workers serve them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path = Field(description="folder of the model in Hugging Face format; only its tokenizer and configuration are read")
    served_model_name: str = Field(
        default="", description="name of the model towards clients and workers; default: the folder's name"
    )
    host: str = Field(default="127.0.0.1", description="address that the HTTP API listens on")
    port: int = Field(default=8000, ge=0, le=65535, description="port of the HTTP API; 0 takes a free one")
    cluster: str = Field(
        default="baton", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="name of the fleet: prefix of all keys in the store"
    )
    cluster_secret: SecretStr = Field(description="shared by all routers and workers of the fleet; set BATON_CLUSTER_SECRET")
    redis_url: str = Field(description="state store: redis://…, unix://…, or memory:// for a single process")
    log_level: str = Field(default="info", pattern=r"^(debug|info|warning|error)$", description="least level of log lines")

    api_keys_file: Path | None = Field(
        default=None,
        description="file of API keys, one `ID sha256:HEX` a line, as `baton key ID` prints it; none: no keys needed",
    )
    api_keys: str = Field(default="", description="API keys beside those of the file: entries of the same form between commas")
    metrics_open: bool = Field(default=True, description="whether /metrics answers without a key; it holds nothing of any tenant")
    prefix_cache_per_key: bool = Field(
        default=False, description="whether prompts are cached for each API key apart, so that nobody can time another's prompts"
    )
    sse_keep_alive_s: float = Field(
        default=15.0, gt=0, description="seconds of silence on a stream after which a comment keeps proxies from closing it"
    )

    requests_max: int = Field(default=512, ge=1, description="requests served at once; more are refused with 429 and Retry-After")
    sequence_tokens_max: int = Field(
        default=0, ge=0, description="longest prompt + completion; 0: what the model and the workers allow"
    )
    body_bytes_max: int = Field(default=8 << 20, ge=1 << 10, description="bytes of a request body")
    body_timeout_s: float = Field(default=30.0, gt=0, description="seconds a client may take to send its request body")
    request_timeout_s: float = Field(
        default=600.0, gt=0, description="seconds from the start of serving until a request is given up with 504"
    )
    output_chars_max: int = Field(
        default=256 << 10, ge=1, description="characters a client may leave untaken before its request is aborted"
    )

    local_prompt_tokens_max: int = Field(
        default=64,
        ge=0,
        description="prompts up to this many tokens run on a decode worker alone: a handoff would cost more than it saves",
    )
    local_prefill_tokens_max: int = Field(
        default=4096,
        ge=1,
        description="prompt tokens queued for local prefill on one decode worker, so that it cannot swamp decoding",
    )
    worker_wait_s: float = Field(default=1.0, ge=0, description="seconds a new request waits for a usable worker before 503")
    resume_wait_s: float = Field(
        default=15.0, ge=0, description="seconds a stream that has begun waits for a usable worker before it fails"
    )
    retries_concurrent_max: int = Field(
        default=64, ge=1, description="retries that run at the same time; more wait, so that an outage is not amplified"
    )
    fleet_refresh_s: float = Field(default=0.25, gt=0, le=10, description="seconds between looks at the worker registry")
    journal_ttl_s: float = Field(
        default=900.0, gt=0, description="seconds a journal entry is kept; longer than a request may take"
    )
    drain_grace_s: float = Field(
        default=30.0, ge=0, description="seconds that a drain waits for running requests before they are aborted"
    )

    @field_validator("cluster_secret")
    @classmethod
    def _secret_is_long_enough(cls, value: SecretStr) -> SecretStr:
        if len(value.get_secret_value()) < 16:
            raise ValueError(f"has {len(value.get_secret_value())} characters, at least 16 are needed")
        return value

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.resolve().name

    @property
    def secret_bytes(self) -> bytes:
        return self.cluster_secret.get_secret_value().encode()
