"""Text appears in whole characters, concatenates to the full decoding, and never shows a stop string."""

from __future__ import annotations

import itertools

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from common.types import FinishReason, StopConditions
from router.completion import Completion
from router.detokenize import StopMatcher, WindowDetokenizer
from tests.unit.router.tiny_tokenizer import EOS_ID, ids_of, make_tokenizer

TEXTS = ["plain", "👩🏽‍🚀 emoji with modifiers 👨‍👩‍👧", "日本語テキスト", "e\u0301a\u0308 combining", "mixed é 😀 x"]


@pytest.mark.parametrize("text", TEXTS)
def test_characters_split_over_tokens_come_out_whole(text: str) -> None:
    detokenizer = make_tokenizer().detokenizer()
    pieces = [detokenizer.push(i) for i in ids_of(text)]
    assert "".join(pieces) + detokenizer.finish() == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_invalid_bytes_become_replacement_characters_and_later_text_survives() -> None:
    tokenizer = make_tokenizer()
    bad = ids_of("é")[0]
    ids = [bad, *ids_of("ok"), bad, bad, *ids_of("!")]
    detokenizer = tokenizer.detokenizer()
    assert "".join(detokenizer.push(i) for i in ids) + detokenizer.finish() == tokenizer.decode(ids) == "\ufffdok\ufffd\ufffd!"


def test_a_character_cut_by_the_end_of_the_completion_is_left_out() -> None:
    detokenizer = make_tokenizer().detokenizer()
    assert "".join(detokenizer.push(i) for i in ids_of("ok😀")[:-1]) + detokenizer.finish() == "ok"


def test_special_tokens_and_unknown_ids_have_no_text() -> None:
    detokenizer = make_tokenizer().detokenizer()
    assert [detokenizer.push(i) for i in (EOS_ID, 9999, *ids_of("a"))] == ["", "", "a"]


def byte_fallback_tokenizer() -> tokenizers.Tokenizer:
    """The shape of SentencePiece models (Llama 2, Mistral): ▁ for spaces, one token per byte for rare characters."""
    words = ["<unk>", "▁Hello", "▁world", "▁", "a", "!"]
    vocab = {word: i for i, word in enumerate(words + [f"<0x{b:02X}>" for b in range(256)])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def window(tokenizer: tokenizers.Tokenizer) -> WindowDetokenizer:
    return WindowDetokenizer(lambda ids: tokenizer.decode(list(ids)), frozenset())


@pytest.mark.parametrize("text", ["Hello world", "Hello😀 world", "日本 Hello", "a\u0301! 👩‍🚀"])
def test_window_detokenizer_equals_the_whole_decoding(text: str) -> None:
    tokenizer = byte_fallback_tokenizer()
    vocab = tokenizer.get_vocab()
    ids: list[int] = []
    for word in text.replace(" ", " ▁").split(" "):
        ids.extend([vocab[word]] if word in vocab else [vocab[f"<0x{b:02X}>"] for b in word.replace("▁", "").encode()])
    detokenizer = window(tokenizer)
    pieces = [detokenizer.push(i) for i in ids]
    assert "".join(pieces) + detokenizer.finish() == tokenizer.decode(ids)
    assert all("\ufffd" not in piece for piece in pieces)


def test_window_does_not_grow_on_endless_invalid_bytes() -> None:
    tokenizer = byte_fallback_tokenizer()
    bad = tokenizer.get_vocab()["<0xFF>"]
    detokenizer = window(tokenizer)
    text = "".join(detokenizer.push(bad) for _ in range(200)) + detokenizer.finish()
    assert text == "\ufffd" * len(text) and len(text) >= 190
    assert len(detokenizer._context) + len(detokenizer._pending) <= 32


def through_matcher(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher, out = StopMatcher(stops), ""
    for piece in pieces:
        result = matcher.push(piece)
        out += result.text
        if result.is_stopped:
            return out, True
    return out + matcher.release(), False


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["END"], "some text END more", ("some text ", True)),
        (["END"], "some text EN", ("some text EN", False)),
        (["END"], "ENEND", ("EN", True)),
        (["END"], "ENDthere", ("", True)),
        (["aab"], "aaab", ("a", True)),
        (["ab", "xabz"], "xabz", ("x", True)),
        (["abc", "b"], "abc", ("a", True)),
        (["\n\n", "\n"], "line\n\nnext", ("line", True)),
        (["never"], "nev ever", ("nev ever", False)),
        ([], "anything", ("anything", False)),
    ],
)
def test_stop_strings_are_cut_exactly_however_the_text_is_split(stops: list[str], text: str, expected: tuple[str, bool]) -> None:
    for cuts in itertools.product([False, True], repeat=max(0, min(len(text), 9) - 1)):
        pieces, start = [], 0
        for index, cut in enumerate(cuts, start=1):
            if cut:
                pieces.append(text[start:index])
                start = index
        pieces.append(text[start:])
        assert through_matcher(stops, pieces) == expected


@given(st.lists(st.text("ab ", min_size=1, max_size=3), max_size=4), st.lists(st.text("ab ", max_size=4), max_size=12))
def test_stop_matcher_is_independent_of_pieces_and_loses_nothing(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    out, stopped = through_matcher(stops, pieces)
    assert (out, stopped) == through_matcher(stops, [text])
    assert stopped == any(stop in text for stop in stops)
    assert text.startswith(out) and (stopped or out == text)
    assert not any(stop in out for stop in stops)


def completion(
    stops: tuple[str, ...] = (), *, max_tokens: int = 100, min_tokens: int = 0, stop_ids: tuple[int, ...] = (EOS_ID,)
) -> Completion:
    return Completion(StopConditions(max_tokens, min_tokens, stop_ids), stops, make_tokenizer().detokenizer())


def test_stop_token_ends_the_text_and_counts_as_a_token() -> None:
    done = completion(("zz",))
    assert done.push([*ids_of("okz"), EOS_ID, *ids_of("more")]) == "okz"
    assert (done.finish_reason, done.num_tokens) == (FinishReason.STOP, 4)


def test_length_releases_what_was_held_back() -> None:
    done = completion(("END",), max_tokens=4)
    assert done.push(ids_of("okEN")) == "okEN"
    assert done.finish_reason is FinishReason.LENGTH


def test_tokens_after_a_stop_string_are_not_counted() -> None:
    done = completion(("END",))
    assert done.push(ids_of("aENDbcd")) == "a"
    assert (done.finish_reason, done.num_tokens, done.matched_stop_string) == (FinishReason.STOP, 4, True)


def test_stop_string_within_min_tokens_does_not_stop() -> None:
    done = completion(("a",), min_tokens=3)
    assert done.push(ids_of("aaabab")) == "aaab"
    assert done.finish_reason is FinishReason.STOP and done.num_tokens == 5


def test_stop_token_within_min_tokens_does_not_stop() -> None:
    done = completion(min_tokens=2)
    assert done.push([EOS_ID, EOS_ID, *ids_of("a"), EOS_ID]) == "a"
    assert done.num_tokens == 4


@given(st.text(max_size=20), st.lists(st.text(min_size=1, max_size=3), max_size=3), st.randoms(use_true_random=False))
def test_text_does_not_depend_on_how_tokens_were_batched(text: str, stops: list[str], random) -> None:  # type: ignore[no-untyped-def]
    ids = ids_of(text)
    one, many = completion(tuple(stops)), completion(tuple(stops))
    whole = one.push(ids) + one.finish(FinishReason.LENGTH)
    pieces, start = "", 0
    while start < len(ids):
        end = start + random.randint(1, 5)
        pieces += many.push(ids[start:end])
        start = end
    assert pieces + many.finish(FinishReason.LENGTH) == whole
    assert one.num_tokens == many.num_tokens
