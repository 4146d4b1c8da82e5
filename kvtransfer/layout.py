"""The shape of KV blocks on one worker, and whether two workers may exchange blocks at all.

It must not know tensors or devices: a layout is a handful of numbers, its fingerprint, and a sentence that explains a
mismatch. Sizes are bytes; two layouts are compatible only if every field is equal.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from common.errors import LayoutMismatch

LAYOUT_VERSION = 1
"""Version of the byte order inside a block: [layers, K/V, kv heads, slots, head dim], little-endian."""

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
WIRE_FORMATS = ("none", "int8", "fp8")
"""How blocks travel: as they lie in the cache, or as one byte for each value and one fp32 scale for each layer, K or V and head."""
_WIRE_ALIGNMENT = 64

_COUNT_MAX = 1 << 20
_TEXT_MAX = 256


@dataclass(frozen=True, slots=True)
class KVLayout:
    """`model_digest` names the weights and whatever else changes the KV of a token (quantization, rope scaling). `wire` is of
    WIRE_FORMATS; both ends must agree on it as on the rest."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    model_digest: str
    version: int = LAYOUT_VERSION
    wire: str = "none"

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "version"):
            value = getattr(self, name)
            if type(value) is not int or not 0 < value <= _COUNT_MAX:
                raise ValueError(f"{name} must be an integer in [1, {_COUNT_MAX}], got {value!r}")
        for name in ("dtype", "model_digest", "wire"):
            value = getattr(self, name)
            if type(value) is not str or not 0 < len(value) <= _TEXT_MAX:
                raise ValueError(f"{name} must be a text of 1 to {_TEXT_MAX} characters, got {value!r:.80}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {sorted(DTYPE_BYTES)}, got {self.dtype!r}")
        if self.wire not in WIRE_FORMATS:
            raise ValueError(f"wire must be one of {', '.join(WIRE_FORMATS)}, got {self.wire!r}")

    @property
    def block_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def wire_block_bytes(self) -> int:
        """Bytes of one block as it travels: what slabs and frames are made of (`kernels/wire.py` defines the formats)."""
        if self.wire == "none":
            return self.block_bytes
        num_groups = self.num_layers * 2 * self.num_kv_heads
        num_bytes = num_groups * (self.block_size * self.head_dim + 4)
        return -(-num_bytes // _WIRE_ALIGNMENT) * _WIRE_ALIGNMENT

    def num_blocks_of(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens, the last one possibly partial."""
        return -(-num_tokens // self.block_size)

    def fingerprint(self) -> str:
        """32 hex digits, equal in every process for equal layouts."""
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()
        return hashlib.blake2b(canonical, digest_size=16, person=b"baton-kv-layout").hexdigest()

    def explain_mismatch(self, other: KVLayout) -> str | None:
        """None when blocks can be exchanged; else one sentence with every differing field, ours first."""
        differing = [
            f"{item.name} {getattr(self, item.name)} here, {getattr(other, item.name)} there"
            for item in fields(self)
            if getattr(self, item.name) != getattr(other, item.name)
        ]
        return "KV layouts differ: " + "; ".join(differing) if differing else None

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_wire(value: Any) -> KVLayout:
        """Raises LayoutMismatch for anything that is no complete, valid layout."""
        names = {item.name for item in fields(KVLayout)}
        if not isinstance(value, dict) or set(value) != names:
            raise LayoutMismatch(f"the peer's layout must have exactly the fields {sorted(names)}")
        try:
            return KVLayout(**value)
        except ValueError as error:
            raise LayoutMismatch(f"the peer's layout is not valid: {error}") from error
