"""Logprobs on their way to the client: order, repeats, names of tokens that are no text by themselves."""

from __future__ import annotations

import math

import pytest
import tokenizers
from tokenizers import decoders, models

from common.errors import Internal
from common.types import TokenLogprobs
from router.logprobs import LOGPROB_MIN, PromptRatings, Ratings, chat_logprobs, completion_logprobs
from router.output import CHARS_OF_LOGPROB, OutputBuffer, OutputSignals, TextDelta
from router.tokenizer import ModelTokenizer
from tests.unit.router.tiny_tokenizer import EOS_ID, ids_of, make_tokenizer

[A, B] = ids_of("ab")


def rated(value: float) -> TokenLogprobs:
    return TokenLogprobs(value, ((A, value), (B, value - 1)))


def test_tokens_come_out_once_in_order_however_they_arrived() -> None:
    ratings = Ratings(make_tokenizer())
    ratings.note(1, [rated(-2.0), rated(-3.0)])
    ratings.note(0, [rated(-1.0)])
    first = ratings.take([A, B], [0, 1])
    assert [token.token.logprob for token in first] == [-1.0, -2.0]
    ratings.note(0, [rated(-9.0), rated(-9.0)])  # a later attempt repeats what is out already
    (last,) = ratings.take([B], [2])
    assert (last.token.logprob, last.offset, [other.text for other in last.top]) == (-3.0, 2, ["a", "b"])


def test_a_token_without_logprobs_is_the_fleets_mistake() -> None:
    with pytest.raises(Internal, match="completion token 0"):
        Ratings(make_tokenizer()).take([A], [0])


def test_prompt_logprobs_come_whole_or_not_at_all() -> None:
    tokenizer, ratings = make_tokenizer(), PromptRatings()
    ratings.note(1, [rated(-1.0)])
    with pytest.raises(Internal, match="position 3 came, 2 was due"):
        ratings.note(3, [rated(-1.0)])
    with pytest.raises(Internal, match="rated 1 of 2 prompt tokens"):
        ratings.take([A, B, A], [0, 1, 2], tokenizer)
    ratings.note(2, [rated(-2.0)])
    assert [token.token.logprob for token in ratings.take([A, B, A], [0, 1, 2], tokenizer)] == [None, -1.0, -2.0]
    ratings.begin_attempt()
    ratings.note(1, [rated(-1.0)])
    assert len(ratings.take([A, B], [0, 1], tokenizer)) == 2
    ratings.begin_attempt()
    assert [token.text for token in (ratings.take([A], [0], tokenizer)[0].token,)] == ["a"], "one token: nothing to rate"


def test_an_echoed_prompt_shows_special_tokens_and_whole_characters() -> None:
    ids = [*ids_of("é"), EOS_ID, *ids_of("b")]
    assert make_tokenizer().echo(ids) == ("é<|end|>b", [0, 0, 1, 8])


def test_pieces_of_characters_and_special_tokens_have_names() -> None:
    tokenizer = make_tokenizer()
    euro = ids_of("€")
    assert [tokenizer.token_text(token_id) for token_id in euro] == [r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac"]
    assert b"".join(map(tokenizer.token_bytes, euro)) == "€".encode()
    assert tokenizer.token_text(EOS_ID) == "<|end|>"
    assert tokenizer.token_text(10**6) == ""


def test_byte_fallback_vocabularies_give_bytes_and_spaces() -> None:
    vocab = {"<unk>": 0, "<0xE2>": 1, "\u2581the": 2}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    named = ModelTokenizer(tokenizer, chat_template=None, eos_token_ids=(), vocab_size=3, max_positions=16)
    assert named.token_bytes(1) == b"\xe2" and named.token_text(1) == r"bytes:\xe2"
    assert named.token_text(2) == " the"


def test_shapes_hold_an_excluded_token_without_infinity() -> None:
    ratings = Ratings(make_tokenizer())
    ratings.note(0, [TokenLogprobs(-math.inf, ((A, -0.5),))])
    tokens = ratings.take([B], [0])
    assert completion_logprobs(tokens) == {
        "tokens": ["b"], "token_logprobs": [LOGPROB_MIN], "top_logprobs": [{"a": -0.5, "b": LOGPROB_MIN}], "text_offset": [0],
    }  # fmt: skip
    assert chat_logprobs(tokens)["content"] == [
        {"token": "b", "logprob": LOGPROB_MIN, "bytes": [98], "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}]}
    ]


def test_logprobs_count_in_the_buffer_of_a_slow_client() -> None:
    ratings = Ratings(make_tokenizer())
    ratings.note(0, [rated(-1.0), rated(-2.0)])
    tokens = ratings.take([A, B], [0, 1])
    signals = OutputSignals()
    output = OutputBuffer(4 * CHARS_OF_LOGPROB, signals)
    assert output.put("a", tokens[:1]) and not output.put("b", tokens[1:])
    assert signals.overflowed.is_set()
    item = output.take()
    assert isinstance(item, TextDelta) and item.text == "a" and item.rated == tokens[:1]
    assert output.take() is None
