"""Every message survives the wire, and nothing else does: wrong types, sizes, names, numbers and arbitrary bytes are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer import messages as m
from kvtransfer.authentication import frame_digest, message_mac, proof, session_keys, transcript_of

EXAMPLES: list[m.Message] = [
    m.Hello(1, "d0@1", "00" * 32),
    m.Challenge(1, "p0@1", "ab" * 32),
    m.Proof("cd" * 32),
    m.Welcome("p0@1", {"block_size": 4}, "tcp", 4096, 1 << 20, "00ff"),
    m.Reject("LayoutMismatch", "block_size 4 here, 8 there"),
    m.Heartbeat(),
    m.Goodbye("idle"),
    m.Open("h", 3, 100, 2),
    m.Announce("h", 3, 0, 2, 5, 500, 8192, "00" * 16),
    m.Closing("h", 3, 7, 42, {"logprobs": [0.5, None], "text": "ä"}),
    m.Ack("h", 3, 0),
    m.Committed("h", 3),
    m.Refuse("h", 3, "Overloaded", "no blocks"),
    m.Abort("h", 3, "ClientCancelled", ""),
    m.Settled("h", 3),
    m.Renew((("h", 3), ("i", 4))),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message: m.Message) -> None:
    assert m.decode(m.encode(message)) == message


def test_the_examples_are_all_there_are() -> None:
    assert {type(message) for message in EXAMPLES} == set(m._NAMES)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_missing_or_extra_field_is_refused(message: m.Message) -> None:
    value: dict[str, Any] = json.loads(m.encode(message))
    for name in value:
        with pytest.raises(m.MessageError):
            m.decode(json.dumps({k: v for k, v in value.items() if k != name}).encode())
    with pytest.raises(m.MessageError):
        m.decode(json.dumps({**value, "more": 1}).encode())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epoch", -1),
        ("epoch", 1 << 63),
        ("epoch", True),
        ("epoch", 1.0),
        ("epoch", "1"),
        ("epoch", None),
        ("handoff_id", ""),
        ("handoff_id", "x" * 97),
        ("handoff_id", 5),
        ("frame_index", m.FRAMES_MAX + 1),
        ("num_blocks", 0),
        ("num_bytes", 1 << 41),
        ("offset", -1),
        ("digest", "00" * 15),
        ("digest", "zz" * 16),
        ("digest", ["00"]),
    ],
)
def test_values_out_of_bounds_are_refused_by_name(field: str, value: Any) -> None:
    good = json.loads(m.encode(m.Announce("h", 3, 0, 2, 5, 500, 8192, "00" * 16)))
    with pytest.raises(m.MessageError, match=field):
        m.decode(json.dumps({**good, field: value}).encode())


def test_extra_is_bounded_plain_json() -> None:
    for extra in ({"x": "y" * m.EXTRA_BYTES_MAX}, {"x": float("nan")}, {"x": object()}, {1: 2}, [1]):
        with pytest.raises(m.MessageError):
            m.encode(m.Closing("h", 1, 0, 1, extra))  # type: ignore[arg-type]
    with pytest.raises(m.MessageError):
        m.decode(b'{"type":"closing","handoff_id":"h","epoch":1,"num_frames":0,"first_token_id":1,"extra":{"x":NaN}}')


def test_renewals_are_bounded() -> None:
    with pytest.raises(m.MessageError):
        m.encode(m.Renew(tuple((f"h{n}", 1) for n in range(m.RENEWALS_MAX + 1))))
    for value in ([["h"]], [["h", -1]], [[1, 1]], "h", {"h": 1}):
        with pytest.raises(m.MessageError):
            m.decode(json.dumps({"type": "renew", "handoffs": value}).encode())


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_and_nothing_else_happens(data: bytes) -> None:
    try:
        m.decode(data)
    except m.MessageError:
        pass


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
    )
)  # noqa: E501
def test_arbitrary_json_is_refused_and_nothing_else_happens(value: Any) -> None:
    for data in (value, {"type": "ack", "handoff_id": value, "epoch": value, "frame_index": value}, {"type": value}):
        with pytest.raises(m.MessageError):
            m.decode(json.dumps(data).encode())


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(m.MessageError):
        m.decode(b"[" * 100_000)


def test_proofs_and_keys_differ_by_role_direction_transcript_and_secret() -> None:
    secret, transcript = b"s" * 16, transcript_of(b"hello", b"challenge")
    assert transcript_of(b"helloc", b"hallenge") != transcript
    assert (
        len(
            {proof(secret, "dialler", transcript), proof(secret, "listener", transcript), proof(b"t" * 16, "dialler", transcript)}
        )
        == 3
    )
    keys = session_keys(secret, transcript)
    assert len({keys.dialler, keys.listener, keys.frames}) == 3
    assert message_mac(keys.dialler, 0, b"x") != message_mac(keys.dialler, 1, b"x")


def test_a_frame_digest_covers_all_that_says_where_the_payload_belongs() -> None:
    frame = m.Announce("h", 3, 0, 2, 5, 500, 8192, "00" * 16)
    others = [
        (b"k" * 32, "f", frame, b"p" * 16),
        (b"l" * 32, "f", frame, b"p" * 16),
        (b"k" * 32, "g", frame, b"p" * 16),
        (b"k" * 32, "f", frame, b"q" * 16),
        *((b"k" * 32, "f", m.Announce(*values, 8192, ""), b"p" * 16) for values in (
            ("i", 3, 0, 2, 5, 500), ("h", 4, 0, 2, 5, 500), ("h", 3, 1, 2, 5, 500), ("h", 3, 0, 3, 5, 500),
            ("h", 3, 0, 2, 6, 500), ("h", 3, 0, 2, 5, 501),
        )),
    ]  # fmt: skip
    digests = {frame_digest(*arguments) for arguments in others}
    assert len(digests) == len(others)
