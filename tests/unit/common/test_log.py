"""Log lines are JSON, bounded, and no field can forge what every line has."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import SecretStr

from common.log import FIELD_CHARS_MAX, configure_logging, get_logger


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root, ours = logging.getLogger(), logging.getLogger("baton")
    saved = root.handlers[:], root.level, ours.level
    stream = io.StringIO()
    configure_logging(level="info", stream=stream, service="test")
    yield stream
    root.handlers[:] = saved[0]
    root.setLevel(saved[1])
    ours.setLevel(saved[2])


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_json_line_with_its_fields(stream: io.StringIO) -> None:
    get_logger("worker").event("worker_ready", port=7, share=0.5, names=["a", "b"], nothing=None, is_hot=True)
    (line,) = lines(stream)
    assert line.pop("ts").endswith("+00:00")
    assert line == {
        "level": "info", "logger": "baton.worker", "event": "worker_ready", "service": "test",
        "port": 7, "share": 0.5, "names": ["a", "b"], "nothing": None, "is_hot": True,
    }  # fmt: skip


def test_text_with_line_breaks_and_quotes_stays_one_line(stream: io.StringIO) -> None:
    get_logger("x").event("e", text='a\nb"c\u2028é\ud800')
    (line,) = lines(stream)
    assert line["text"] == 'a\nb"c\u2028é\ud800'


def test_no_field_can_replace_what_every_line_has(stream: io.StringIO) -> None:
    get_logger("x").warn("truth", event="lie", level="debug", ts=0, logger="other", name="fine")
    (line,) = lines(stream)
    assert (line["event"], line["level"], line["logger"], line["name"]) == ("truth", "warning", "baton.x", "fine")
    assert (line["event_"], line["level_"], line["ts_"], line["logger_"]) == ("lie", "debug", 0, "other")


@pytest.mark.parametrize("value", ["x" * 100_000, ["y" * 100_000], {"k": "z" * 100_000}])
def test_a_long_value_is_cut_keeping_both_ends(stream: io.StringIO, value: object) -> None:
    get_logger("x").event("e", value=value)
    (line,) = lines(stream)
    assert len(line["value"]) == FIELD_CHARS_MAX + 1
    assert len(stream.getvalue()) < FIELD_CHARS_MAX + 500


def test_numbers_that_json_cannot_say_become_text(stream: io.StringIO) -> None:
    get_logger("x").event("e", a=float("nan"), b=[float("inf")], c={"NaN": 1})
    (line,) = lines(stream)
    assert line["a"] == "nan"
    assert line["b"] == "[Infinity]"


def test_a_secret_shows_as_stars(stream: io.StringIO) -> None:
    get_logger("x").event("e", one=SecretStr("hunter2"), more={"deep": SecretStr("hunter2")})
    assert "hunter2" not in stream.getvalue()


def test_an_error_inside_an_except_block_carries_the_traceback(stream: io.StringIO) -> None:
    try:
        raise ValueError("3 blocks are missing")
    except ValueError:
        get_logger("x").error("census_wrong")
    get_logger("x").error("outside")
    inside, outside = lines(stream)
    assert inside["error"] == "ValueError: 3 blocks are missing"
    assert "test_log.py" in inside["traceback"]
    assert "traceback" not in outside


def test_levels_are_kept_and_libraries_speak_from_warning_on(stream: io.StringIO) -> None:
    logging.getLogger("baton.x").debug("quiet")
    logging.getLogger("library").info("quiet")
    logging.getLogger("library").warning("%s of %s", "two", "three", extra={"size": 3})
    (line,) = lines(stream)
    assert (line["event"], line["size"], line["logger"]) == ("two of three", 3, "library")


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="loud"):
        configure_logging(level="loud")


def test_a_value_that_json_cannot_say_is_still_one_line(stream: io.StringIO) -> None:
    circle: list[object] = []
    circle.append(circle)
    get_logger("x").event("e", keys={(1, 2): 3}, circle=circle, after=1)
    (line,) = lines(stream)
    assert line["keys"] == "{(1, 2): 3}"
    assert line["circle"] == "[[...]]"
    assert line["after"] == 1
