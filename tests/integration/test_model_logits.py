"""The native model against transformers' own implementation: tiny random weights, fp32, every position's logits.

Then the same model against itself: chunked prefill, ragged mixed batches and decode steps must give what one whole pass gives,
bit for bit with the native kernels and to rounding with the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from common.types import SamplingParams
from engine.batch import SampleRow, StepBatch, TableUpdate
from engine.model_runner import LoadedModel, load_engine_model
from kernels.dispatch import select_ops
from kernels.ops import Ops
from tests.fakes.batches import make_batch

BLOCK_SIZE, NUM_BLOCKS, NUM_TOKENS, VOCAB = 4, 96, 70, 131
DIFFERENCE_MAX = 1e-4
"""Largest allowed |logit difference| in fp32, where logits reach about 8. Largest measured on two CPUs: 2.6e-05."""

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

CONFIGURATIONS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "llama-tied": LlamaConfig(**SMALL | {"tie_word_embeddings": True}),
    "llama-multi-head": LlamaConfig(**SMALL | {"num_key_value_heads": 6}),
    "llama-head-dim": LlamaConfig(**SMALL | {"head_dim": 16}),
    "llama-biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama-rope-linear": LlamaConfig(**SMALL, rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "llama-rope-llama3": LlamaConfig(**SMALL, rope_scaling=LLAMA3),
    "llama-rope-yarn": LlamaConfig(**SMALL, rope_scaling=YARN),
    "llama-rope-yarn-mscale": LlamaConfig(**SMALL, rope_scaling=YARN | {"mscale": 0.7, "mscale_all_dim": 0.5, "beta_fast": 16.0}),
    "llama-rope-yarn-untruncated": LlamaConfig(**SMALL, rope_scaling=YARN | {"attention_factor": 1.3, "truncate": False}),
    "mistral": MistralConfig(**SMALL, sliding_window=None),
    "mistral-window": MistralConfig(**SMALL, sliding_window=9),
    "qwen2": Qwen2Config(**SMALL),
    "qwen2-tied-window": Qwen2Config(
        **SMALL | {"tie_word_embeddings": True}, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "qwen3-tied-yarn": Qwen3Config(**SMALL | {"tie_word_embeddings": True}, head_dim=8, rope_scaling=YARN),
    "qwen3-biases": Qwen3Config(**SMALL, head_dim=8, attention_bias=True),
}


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    token_ids: list[int]
    expected: torch.Tensor
    """transformers' logits [NUM_TOKENS, VOCAB]."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Checkpoint]]:
    """Written once per configuration, on first use."""
    yield _Checkpoints(tmp_path_factory.mktemp("models"))


class _Checkpoints(dict[str, Checkpoint]):
    def __init__(self, root: Path) -> None:
        self._root = root

    def __missing__(self, name: str) -> Checkpoint:
        torch.manual_seed(len(name))
        model = AutoModelForCausalLM.from_config(CONFIGURATIONS[name], attn_implementation="eager").float().eval()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                parameter.normal_(std=0.25)
                if "norm" in parameter_name:
                    parameter.add_(1.0)
            token_ids = torch.randint(VOCAB, (NUM_TOKENS,)).tolist()
            expected = model(torch.tensor([token_ids])).logits[0]
        folder = self._root / name
        model.save_pretrained(folder, max_shard_size="60KB" if name == "llama-biases" else "5GB")
        self[name] = Checkpoint(folder, token_ids, expected)
        return self[name]


@dataclass(frozen=True)
class Piece:
    """Tokens [start, end) of a sequence that owns the blocks from `first_block` on, every second one, downwards."""

    sequence: int
    start: int
    end: int
    sampled: bool = True


def block_table(sequence: int, num_tokens: int, pitch: int) -> tuple[int, ...]:
    """Scattered and descending, so that an error in block arithmetic cannot hide."""
    return tuple(NUM_BLOCKS - 1 - (sequence + index * pitch) % NUM_BLOCKS for index in range(-(-num_tokens // BLOCK_SIZE)))


def step(token_ids: list[int], pieces: list[Piece], pitch: int) -> StepBatch:
    batch = StepBatch()
    for index, piece in enumerate(pieces):
        table = block_table(piece.sequence, piece.end, pitch)
        for position in range(piece.start, piece.end):
            batch.token_ids.append(token_ids[position])
            batch.positions.append(position)
            batch.slot_mapping.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        batch.query_starts.append(len(batch.token_ids))
        batch.context_lens.append(piece.end)
        batch.table_rows.append(index)
        batch.table_updates.append(TableUpdate(index, 0, table))
        if piece.sampled:
            batch.sample_rows.append(SampleRow(index, 0, SamplingParams(temperature=0.0)))
    return batch


def load(checkpoint: Checkpoint, ops: Ops, dtype: str = "float32") -> LoadedModel:
    return load_engine_model(checkpoint.folder, dtype=dtype, device="cpu", block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, ops=ops)


def kernels(choice: str, dtype: torch.dtype) -> Ops:
    try:
        return select_ops(torch.device("cpu"), dtype, choice)
    except RuntimeError as error:
        pytest.skip(str(error))


def whole(loaded: LoadedModel, token_ids: list[int], length: int) -> torch.Tensor:
    """Logits [V] after the first `length` tokens, computed in one pass."""
    return loaded.runner.compute_logits(step(token_ids, [Piece(0, 0, length)], 1))[0]


@pytest.mark.parametrize("choice", ["reference", "native"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_logits_of_every_position_equal_transformers(
    name: str, choice: str, checkpoints: dict[str, Checkpoint], record_property: Any
) -> None:
    checkpoint = checkpoints[name]
    loaded = load(checkpoint, kernels(choice, torch.float32))
    # One row at a time after a first chunk: each position is sampled from once, prefill and decode both take part.
    first = NUM_TOKENS // 2
    rows = [loaded.runner.compute_logits(step(checkpoint.token_ids, [Piece(0, 0, first)], 1))]
    rows += [
        loaded.runner.compute_logits(step(checkpoint.token_ids, [Piece(0, position, position + 1)], 1))
        for position in range(first, NUM_TOKENS)
    ]
    # And all shorter prefixes as one ragged batch of whole prompts (one block per sequence cannot hold them all at once).
    prefixes = [whole(loaded, checkpoint.token_ids, length)[None] for length in range(1, first)]
    computed = torch.cat(prefixes + rows).float()
    difference = (computed - checkpoint.expected).abs().max().item()
    record_property("max_difference", difference)
    print(f"{name} {choice}: max |logit difference| {difference:.2e}, max |logit| {checkpoint.expected.abs().max().item():.1f}")
    assert checkpoint.expected.std() > 0.5, "logits too flat to prove anything"
    assert difference < DIFFERENCE_MAX


SELF_CHECKS = ["llama", "mistral-window", "qwen2", "qwen3"]
KERNELS = [("reference", "float32"), ("native", "float32"), ("native", "bfloat16")]


def assert_same(computed: torch.Tensor, expected: torch.Tensor, choice: str) -> None:
    if choice == "native":
        assert torch.equal(computed, expected), f"max difference {(computed - expected).abs().max().item():.2e}"
    else:
        torch.testing.assert_close(computed, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("choice", "dtype"), KERNELS)
@pytest.mark.parametrize("name", SELF_CHECKS)
@pytest.mark.parametrize("chunk", [1, 3, 4, 17, 69])
def test_chunked_prefill_equals_whole_prefill(
    name: str, chunk: int, choice: str, dtype: str, checkpoints: dict[str, Checkpoint]
) -> None:
    checkpoint = checkpoints[name]
    loaded = load(checkpoint, kernels(choice, getattr(torch, dtype)), dtype)
    expected = whole(loaded, checkpoint.token_ids, NUM_TOKENS)
    kv_expected = loaded.kv_cache.tensor.clone()
    loaded.kv_cache.tensor.zero_()
    for start in range(0, NUM_TOKENS, chunk):
        end = min(start + chunk, NUM_TOKENS)
        logits = loaded.runner.compute_logits(step(checkpoint.token_ids, [Piece(0, start, end, sampled=end == NUM_TOKENS)], 1))
        assert logits.shape == (int(end == NUM_TOKENS), VOCAB)
    assert_same(logits[0], expected, choice)
    assert_same(loaded.kv_cache.tensor, kv_expected, choice)


@pytest.mark.parametrize(("choice", "dtype"), KERNELS)
@pytest.mark.parametrize("name", SELF_CHECKS)
def test_ragged_mixed_batches_equal_single_sequences(
    name: str, choice: str, dtype: str, checkpoints: dict[str, Checkpoint]
) -> None:
    checkpoint = checkpoints[name]
    loaded = load(checkpoint, kernels(choice, getattr(torch, dtype)), dtype)
    lengths = [1, 4, 5, 37, 8, 19]
    expected = [whole(loaded, checkpoint.token_ids, length) for length in lengths]
    loaded.kv_cache.tensor.zero_()
    pitch = len(lengths)
    # First step: three prompts and the start of a fourth, nobody sampled of the fourth. Second: one decodes, the fourth goes on,
    # two new prompts arrive. So prompts, chunks and decode rows stand side by side.
    first = [Piece(0, 0, 1), Piece(1, 0, 3, sampled=False), Piece(2, 0, 5), Piece(3, 0, 30, sampled=False)]
    second = [Piece(1, 3, 4), Piece(3, 30, 37), Piece(4, 0, 8), Piece(5, 0, 19)]
    logits = loaded.runner.compute_logits(step(checkpoint.token_ids, first, pitch))
    for row, sequence in enumerate([0, 2]):
        assert_same(logits[row], expected[sequence], choice)
    logits = loaded.runner.compute_logits(step(checkpoint.token_ids, second, pitch))
    for row, sequence in enumerate([1, 3, 4, 5]):
        assert_same(logits[row], expected[sequence], choice)


def test_greedy_run_equals_the_argmax_of_transformers(checkpoints: dict[str, Checkpoint]) -> None:
    checkpoint = checkpoints["qwen3"]
    loaded = load(checkpoint, kernels("reference", torch.float32))
    tokens = loaded.runner.run(step(checkpoint.token_ids, [Piece(0, 0, 40), Piece(1, 0, 7)], 2))
    assert tokens.token_ids == [int(checkpoint.expected[39].argmax()), int(checkpoint.expected[6].argmax())]


def test_the_fingerprint_is_stable_and_tells_weights_apart(checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    ops = kernels("reference", torch.float32)
    one = load(checkpoints["llama"], ops).fingerprint_of_weights
    assert one == load(checkpoints["llama"], ops).fingerprint_of_weights
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for path in checkpoints["llama"].folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert load(Checkpoint(copy, [], torch.empty(0)), ops).fingerprint_of_weights == one
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-2000] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert load(Checkpoint(copy, [], torch.empty(0)), ops).fingerprint_of_weights != one
    assert load(checkpoints["llama-tied"], ops).fingerprint_of_weights != one


def test_positions_beyond_the_model_are_an_error_not_a_wrong_rotation(checkpoints: dict[str, Checkpoint]) -> None:
    loaded = load(checkpoints["llama"], kernels("reference", torch.float32))
    batch = make_batch([1], [128], [0], [0, 1], [129], [range(33)], [])
    with pytest.raises((IndexError, RuntimeError), match="index out of range"):
        loaded.runner.run(batch)
