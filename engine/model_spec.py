"""What a model is, as numbers: the checked form of `config.json` and `generation_config.json`. Pure; no torch, no files.

Everything later code needs to know of an architecture stands here, so a field that is missing, contradictory or not
supported is found before a byte of weights is read. `ModelError` is the error of every unusable model or model file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]
RopeKind = Literal["none", "linear", "llama3", "yarn"]

_ARCHITECTURES: dict[str, Architecture] = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}
_ROPE_THETA_DEFAULT = {"llama": 10000.0, "mistral": 10000.0, "qwen2": 10000.0, "qwen3": 10000.0}


class ModelError(ValueError):
    """A model that cannot be served: unknown architecture, unsupported field, missing or damaged file. One clear line."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts.

    `factor` is the stretch. `low_freq_factor` and `high_freq_factor` belong to llama3; `beta_fast`, `beta_slow`,
    `attention_factor` (multiplies cos and sin) and `truncate` to yarn. `original_positions` is the trained length.
    """

    kind: RopeKind = "none"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder-only model of the Llama family. Sizes are counts of elements; ids are token ids.

    `layer_windows` [L] is the sliding window of each layer in tokens (a query sees itself and `window - 1` tokens before
    it), None for full attention. `rotary_dim` is the number of leading head dimensions that are rotated.
    """

    architecture: Architecture
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    rotary_dim: int
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied_embeddings: bool
    layer_windows: tuple[int | None, ...]
    max_positions: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def qkv_size(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def parse_model_spec(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelSpec:
    """Checks `config.json` (and `generation_config.json`, whose end tokens win). Raises ModelError naming the field."""
    architecture = _architecture(config)
    hidden_size = _count(config, "hidden_size")
    num_heads = _count(config, "num_attention_heads")
    num_kv_heads = _count(config, "num_key_value_heads", num_heads)
    head_dim = _count(config, "head_dim", hidden_size // num_heads)
    num_layers = _count(config, "num_hidden_layers")
    vocab_size = _count(config, "vocab_size")
    max_positions = _count(config, "max_position_embeddings")
    if num_heads % num_kv_heads:
        raise ModelError(f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"config.json: hidden_act {config['hidden_act']!r} is not supported, only 'silu'")
    if config.get("quantization_config"):
        raise ModelError("config.json: quantization_config is not supported; use full-precision weights or a GGUF file")
    if int(config.get("pretraining_tp") or 1) != 1:
        raise ModelError(f"config.json: pretraining_tp {config['pretraining_tp']} is not supported, only 1")
    rope = _rope_parameters(config)
    partial = float(rope.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0))
    rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ModelError(f"config.json: head_dim {head_dim} x partial_rotary_factor {partial} gives no even rotary dimension")
    attention_bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=_count(config, "intermediate_size"),
        vocab_size=vocab_size,
        rms_eps=_positive(config, "rms_norm_eps"),
        rope_theta=_rope_theta(config, rope, architecture),
        rope_scaling=_rope_scaling(rope, max_positions),
        rotary_dim=rotary_dim,
        qk_norm=architecture == "qwen3",
        qkv_bias=architecture == "qwen2" or (architecture in ("llama", "qwen3") and attention_bias),
        output_bias=architecture in ("llama", "qwen3") and attention_bias,
        mlp_bias=architecture == "llama" and bool(config.get("mlp_bias", False)),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        layer_windows=_layer_windows(config, architecture, num_layers),
        max_positions=max_positions,
        bos_token_id=_bos_token_id(config),
        eos_token_ids=_eos_token_ids(config, generation_config, vocab_size),
    )


def _architecture(config: Mapping[str, Any]) -> Architecture:
    model_type = config.get("model_type")
    if model_type not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        raise ModelError(f"config.json: model_type {model_type!r} is not supported; supported are {supported}")
    return _ARCHITECTURES[str(model_type)]


def _count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {name} must be a positive integer, not {value!r}")
    return value


def _positive(config: Mapping[str, Any], name: str) -> float:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"config.json: {name} must be a positive number, not {value!r}")
    return float(value)


def _rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`rope_parameters` (newer files) or `rope_scaling` (older ones); {} when there is neither."""
    for name in ("rope_parameters", "rope_scaling"):
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise ModelError(f"config.json: {name} must be an object, not {value!r}")
        return value
    return {}


def _rope_theta(config: Mapping[str, Any], rope: Mapping[str, Any], architecture: Architecture) -> float:
    if "rope_theta" in rope:
        return _positive(rope, "rope_theta")
    if config.get("rope_theta") is not None:
        return _positive(config, "rope_theta")
    return _ROPE_THETA_DEFAULT[architecture]


def _rope_scaling(rope: Mapping[str, Any], max_positions: int) -> RopeScaling:
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind == "default":
        return RopeScaling()
    if kind not in ("linear", "llama3", "yarn"):
        raise ModelError(f"config.json: rope type {kind!r} is not supported; supported are default, linear, llama3, yarn")
    factor = _positive(rope, "factor")
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    original = int(rope.get("original_max_position_embeddings") or max_positions)
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=factor,
            original_positions=original,
            low_freq_factor=_positive(rope, "low_freq_factor"),
            high_freq_factor=_positive(rope, "high_freq_factor"),
        )
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_positions=original,
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=_optional_float(rope, "attention_factor"),
        mscale=_optional_float(rope, "mscale"),
        mscale_all_dim=_optional_float(rope, "mscale_all_dim"),
        truncate=bool(rope.get("truncate", True)),
    )


def _optional_float(values: Mapping[str, Any], name: str) -> float | None:
    value = values.get(name)
    return None if value is None else float(value)


def _layer_windows(config: Mapping[str, Any], architecture: Architecture, num_layers: int) -> tuple[int | None, ...]:
    """Mistral: one window for all layers. Qwen: only with use_sliding_window, and only layers from max_window_layers on."""
    window = config.get("sliding_window")
    if window is not None:
        window = _count(config, "sliding_window")
    if architecture == "llama" or window is None:
        return (None,) * num_layers
    if architecture == "mistral":
        return (window,) * num_layers
    if not config.get("use_sliding_window", False):
        return (None,) * num_layers
    layer_types = config.get("layer_types")
    if layer_types is not None:
        if len(layer_types) != num_layers or not set(layer_types) <= {"full_attention", "sliding_attention"}:
            raise ModelError(f"config.json: layer_types must name full_attention or sliding_attention for {num_layers} layers")
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    first = int(config.get("max_window_layers", 28))
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _bos_token_id(config: Mapping[str, Any]) -> int | None:
    value = config.get("bos_token_id")
    return None if value is None else int(value)


def _eos_token_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None, vocab_size: int) -> tuple[int, ...]:
    value = (generation_config or {}).get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise ModelError(f"config.json: eos_token_id {token_id!r} is not a token id below vocab_size {vocab_size}")
    return tuple(dict.fromkeys(ids))
