"""The device operations as one protocol: what every implementation (reference, native, Triton) offers, and nothing more.

Owns shapes, dtypes and meaning of each operation; knows no policy, no model and no scheduler. Letters as everywhere: T tokens
in the step, S sequences, B blocks, L layers, Hq/Hkv query and KV heads, D head dim, V vocabulary, H hidden size.

Numerics that all implementations share: arithmetic in fp32, one rounding to the tensor's dtype at the end of the operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """Weights of one linear layer in the layout that one implementation wants; opaque to everybody else.

    `weight` holds num_outputs x num_inputs values in the layout that `layout` names. An implementation refuses a layout
    that it did not pack.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    num_outputs: int
    num_inputs: int
    layout: str


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMeta:
    """Where the rows of a ragged batch stand in their sequences and where the KV of those lies. Checked once, when made.

    positions int64 [T] (absolute, from 0), slot_mapping int64 [T], query_starts int32 [S+1] (cumulative first rows),
    context_lens int32 [S] (tokens whose KV exists after this step), block_tables int32 [S, blocks_max] (padded with 0).
    Row t of sequence s sees the keys 0..positions[t]; positions[t] < context_lens[s].
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    max_query_len: int
    max_context_len: int

    def __post_init__(self) -> None:
        num_tokens, num_sequences = self.positions.numel(), self.context_lens.numel()
        _expect("positions", self.positions, torch.int64, (num_tokens,))
        _expect("slot_mapping", self.slot_mapping, torch.int64, (num_tokens,))
        _expect("context_lens", self.context_lens, torch.int32, (num_sequences,))
        _expect("query_starts", self.query_starts, torch.int32, (num_sequences + 1,))
        if self.block_tables.dim() != 2:
            raise ValueError(f"block_tables must be [S, blocks_max], got shape {tuple(self.block_tables.shape)}")
        _expect("block_tables", self.block_tables, torch.int32, (num_sequences, self.block_tables.shape[1]))
        if self.max_query_len < 0 or self.max_context_len < 0:
            raise ValueError(f"negative bound: max_query_len {self.max_query_len}, max_context_len {self.max_context_len}")

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.context_lens.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayerWeights:
    """One decoder layer. `query_norm` and `key_norm` [D] exist with qk-norm only. `window`: keys a row sees; None: all."""

    input_norm: torch.Tensor
    qkv: PackedLinear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: PackedLinear
    post_attention_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear
    window: int | None


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """A decoder of the Llama family: weights and the numbers that its operations need.

    embedding [V, H] is looked up by token id, `head` projects to the vocabulary; cos, sin fp32 [P, Dr/2], row p for position p.
    """

    embedding: torch.Tensor
    layers: tuple[DecoderLayerWeights, ...]
    final_norm: torch.Tensor
    head: PackedLinear
    cos: torch.Tensor
    sin: torch.Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float


@dataclass(frozen=True, slots=True)
class Draw:
    """How the token of one row is chosen. `temperature` 0: the largest logit. top_k 0, top_p 1 and min_p 0 filter nothing.

    `noise` in [0, 1) selects from the cumulative distribution; whoever makes it decides what it depends on.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    noise: float = 0.0


class FusedDecoder(Protocol):
    """A decoder's whole forward pass on one device. Used by one thread at a time."""

    def forward(
        self, token_ids: torch.Tensor, meta: AttentionMeta, cache: torch.Tensor, sample_rows: torch.Tensor
    ) -> torch.Tensor:
        """token_ids int64 [T], cache [B, L, 2, Hkv, block_size, D], sample_rows int64 [R] -> fp32 logits [R, V].

        Writes the KV of all T tokens. `sample_rows` must increase. Raises ValueError for indexes outside their tensors.
        """
        ...


class Ops(Protocol):
    """Operations on one device. Every tensor argument is contiguous and on that device; violations raise ValueError."""

    @property
    def name(self) -> str: ...

    def describe(self) -> str:
        """One line for people: which implementation, how it was built, and why it was chosen if it was not the first choice."""
        ...

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """Takes weight [N, K] and bias [N]; the result may alias both."""
        ...

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """x [T, K] -> [T, N] = x @ weight.T + bias, same dtype as x."""
        ...

    def logits(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """As `linear`, but the result stays fp32 [T, N]: rounded to bf16, near logits would tie and change greedy answers."""
        ...

    def embedding(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """ids int64 [T], table [V, H] -> [T, H]."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [T, H], weight [H] -> x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467)."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, H] -> (rms_norm(sum), sum) where sum = x + residual, rounded to the dtype before it is normalised."""
        ...

    def head_rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [T, Hn, D], weight [D] -> each head normalised by itself (Qwen3's q and k norm)."""
        ...

    def rope_(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotates the first Dr dims of q [T, Hq, D] and k [T, Hkv, D] in place; cos, sin fp32 [T, Dr/2].

        Half rotation (dim i pairs with i + Dr/2), as Hugging Face checkpoints store it (arXiv 2104.09864).
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2I] -> silu(gate_up[:, :I]) * gate_up[:, I:], [T, I] (arXiv 2002.05202)."""
        ...

    def kv_write(self, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, layer: int, slot_mapping: torch.Tensor) -> None:
        """Stores k, v [T, Hkv, D] of one layer in cache [B, L, 2, Hkv, block_size, D] at slots int64 [T] (distinct)."""
        ...

    def attention(
        self, q: torch.Tensor, cache: torch.Tensor, layer: int, meta: AttentionMeta, scale: float, window: int | None
    ) -> torch.Tensor:
        """Causal attention of q [T, Hq, D] over the paged KV of one layer -> [T, Hq, D].

        Prefill chunks, decode rows and mixtures are the same thing here. With `window` w, row t sees the last w keys up to
        and including its own position. Query head h reads KV head h // (Hq / Hkv).
        """
        ...

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """fp32 logits [R, V] -> one token id per row, as kernels/sampling.py specifies.

        Raises FloatingPointError naming the rows whose largest logit is not finite.
        """
        ...

    def fuse_decoder(self, decoder: DecoderWeights) -> FusedDecoder | None:
        """The whole forward pass as one operation with the same bits as the operations one by one; None: there is none."""
        ...

    def gather_blocks(self, cache: torch.Tensor, block_ids: Sequence[int], out: memoryview) -> bytes:
        """Copies whole blocks, in order, to the start of `out`; returns the digest (kernels/digest.py) of the copied bytes."""
        ...

    def scatter_blocks(self, src: memoryview, cache: torch.Tensor, block_ids: Sequence[int]) -> bytes:
        """Copies the start of `src` to whole blocks (distinct ids), in order; returns the digest of the copied bytes."""
        ...


def _expect(what: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{what} must be contiguous {dtype} of shape {shape}, got {tensor.dtype} of shape {tuple(tensor.shape)}, "
            f"strides {tensor.stride()}"
        )
