"""JSON logs on stderr: one object per line, a constant event name, and fields. Nothing per token, never a prompt or a key.

Built on the standard library's logging, so that libraries' own records come out in the same form. A record's fields are what the
caller passed as `extra={"fields": {...}}` or as plain `extra` keys; `get_logger(name).event("name", field=…)` is the short way.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from datetime import UTC, datetime
from typing import TextIO

_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", None, None).__dict__) | {"message", "asctime", "taskName", "fields"}
_ALWAYS = frozenset({"ts", "level", "logger", "event"})
"""What every line has; a caller's field of such a name gets an underscore behind it instead of replacing it."""
FIELD_CHARS_MAX = 4000
"""A longer value is cut in its middle (a traceback says most at its ends), so that no log line grows without a bound."""


class JsonFormatter(logging.Formatter):
    """`{"ts": …, "level": …, "logger": …, "event": …, …fields}` and, for exceptions, `error` and `traceback`."""

    def __init__(self, **constant_fields: object) -> None:
        super().__init__()
        self._constant_fields = constant_fields

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        entry |= self._constant_fields
        given = {key: value for key, value in record.__dict__.items() if key not in _STANDARD}
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            given |= fields
        entry |= {f"{key}_" if key in _ALWAYS else key: value for key, value in given.items()}
        if record.exc_info and record.exc_info[0] is not None:
            entry["error"] = f"{record.exc_info[0].__name__}: {record.exc_info[1]}"
            entry["traceback"] = self.formatException(record.exc_info)
        # ASCII: no character that some reader takes for a line break, and no lone surrogate that the stream cannot encode.
        return json.dumps({key: _plain(value) for key, value in entry.items()}, ensure_ascii=True)


def _plain(value: object) -> object:
    """The value as JSON can say it: bounded, and without NaN or infinity, which are no JSON."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    text = value if isinstance(value, str) else _as_json(value)
    if len(text) > FIELD_CHARS_MAX:
        half = FIELD_CHARS_MAX // 2
        return f"{text[:half]}…{text[-half:]}"
    if isinstance(value, str) or "NaN" in text or "Infinity" in text:
        return text
    return json.loads(text)


def _as_json(value: object) -> str:
    """Whatever the value is: a line that cannot be written would be lost, and the library's complaint about it is no JSON."""
    try:
        return json.dumps(value, default=str, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # a key that is no text, a circle
        return json.dumps(str(value), ensure_ascii=False)


class EventLogger:
    """Thin handle on one logger. The level says who should act: info nobody, warning look when you can, error now."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def event(self, name: str, /, **fields: object) -> None:
        self._logger.info(name, extra={"fields": fields})

    def warn(self, name: str, /, **fields: object) -> None:
        self._logger.warning(name, extra={"fields": fields})

    def error(self, name: str, /, **fields: object) -> None:
        """Inside an `except` block the traceback goes along."""
        self._logger.error(name, extra={"fields": fields}, exc_info=sys.exc_info()[0] is not None)


def get_logger(name: str) -> EventLogger:
    return EventLogger(logging.getLogger(f"baton.{name}"))


def configure_logging(*, level: str = "info", stream: TextIO | None = None, **constant_fields: object) -> None:
    """Sends every record of the process through the JSON formatter, `constant_fields` (service, worker id) on each line.

    Libraries are let through from WARNING on; ours from `level` on. Raises ValueError for an unknown level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"log level {level!r} is not one of debug, info, warning, error")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(**constant_fields))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.WARNING))
    logging.getLogger("baton").setLevel(number)
