"""Parsing config.json: what each architecture means, and that everything unsupported is refused by the field's name."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from engine.model_spec import ModelError, RopeScaling, parse_model_spec

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def config(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in (LLAMA | changes).items() if value is not None}


def test_a_plain_llama_configuration() -> None:
    spec = parse_model_spec(config())
    assert (spec.architecture, spec.num_layers, spec.head_dim, spec.rotary_dim, spec.qkv_size) == ("llama", 4, 8, 8, 96)
    assert (spec.rope_theta, spec.rope_scaling, spec.tied_embeddings) == (10000.0, RopeScaling(), False)
    assert (spec.qk_norm, spec.qkv_bias, spec.output_bias, spec.mlp_bias) == (False, False, False, False)
    assert spec.layer_windows == (None,) * 4
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))


def test_key_value_heads_default_to_the_query_heads_and_null_head_dim_to_their_share() -> None:
    spec = parse_model_spec(config(num_key_value_heads=None) | {"head_dim": None})
    assert (spec.num_kv_heads, spec.head_dim) == (8, 8)
    assert parse_model_spec(config(head_dim=32)).qkv_size == 12 * 32


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "llama", "attention_bias": True}, (False, True, True, False)),
        ({"model_type": "llama", "mlp_bias": True}, (False, False, False, True)),
        ({"model_type": "mistral", "attention_bias": True}, (False, False, False, False)),
        ({"model_type": "qwen2"}, (False, True, False, False)),
        ({"model_type": "qwen3"}, (True, False, False, False)),
        ({"model_type": "qwen3", "attention_bias": True}, (True, True, True, False)),
    ],
)
def test_norms_and_biases_of_each_architecture(changes: dict[str, Any], expected: tuple[bool, ...]) -> None:
    spec = parse_model_spec(config(**changes))
    assert (spec.qk_norm, spec.qkv_bias, spec.output_bias, spec.mlp_bias) == expected


def test_sliding_windows_of_each_architecture() -> None:
    assert parse_model_spec(config(model_type="mistral", sliding_window=128)).layer_windows == (128,) * 4
    assert parse_model_spec(config(model_type="mistral")).layer_windows == (None,) * 4
    assert parse_model_spec(config(model_type="llama", sliding_window=128)).layer_windows == (None,) * 4
    qwen: dict[str, Any] = {"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 3}
    assert parse_model_spec(config(**qwen)).layer_windows == (None,) * 4
    assert parse_model_spec(config(**qwen, use_sliding_window=True)).layer_windows == (None, None, None, 64)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert parse_model_spec(config(**qwen, use_sliding_window=True, layer_types=kinds)).layer_windows == (64, None, 64, None)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_in_old_and_new_spelling(name: str) -> None:
    def scaling(**values: Any) -> RopeScaling:
        return parse_model_spec(config(**{name: values})).rope_scaling

    assert scaling(type="linear", factor=2) == RopeScaling("linear", 2.0)
    assert scaling(rope_type="default") == RopeScaling()
    llama3 = scaling(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    )
    assert llama3 == RopeScaling("llama3", 8.0, 64, 1.0, 4.0)
    assert scaling(rope_type="yarn", factor=4.0, beta_fast=20) == RopeScaling("yarn", 4.0, 512, beta_fast=20.0)


def test_rope_theta_is_found_in_either_place() -> None:
    assert parse_model_spec(config(rope_theta=5e5)).rope_theta == 5e5
    assert parse_model_spec(config(rope_parameters={"rope_type": "default", "rope_theta": 7e5})).rope_theta == 7e5


def test_end_tokens_of_the_generation_config_win() -> None:
    assert parse_model_spec(config(), {"eos_token_id": [7, 5, 7]}).eos_token_ids == (7, 5)
    assert parse_model_spec(config(), {}).eos_token_ids == (2,)
    assert parse_model_spec(config(eos_token_id=None)).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, not None"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, not '64'"),
        ({"vocab_size": True}, "vocab_size must be a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, not 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads 8 is not a multiple of num_key_value_heads 3"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a positive number"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is not supported"),
        ({"pretraining_tp": 2}, "pretraining_tp 2"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor must be a positive number, not None"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"head_dim": 7}, "no even rotary dimension"),
        ({"eos_token_id": 100}, "eos_token_id 100 is not a token id below vocab_size 100"),
        ({"sliding_window": -1, "model_type": "mistral"}, "sliding_window must be a positive integer"),
        (
            {"model_type": "qwen3", "sliding_window": 4, "use_sliding_window": True, "layer_types": ["chunked_attention"] * 4},
            "layer_types must name",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_model_spec(config(**changes))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_module_needs_no_torch() -> None:
    program = "import sys, engine.model_spec, engine.weights.tensor_names; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
