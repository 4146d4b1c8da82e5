"""What `baton up` shows while it starts: one row per part, live on a terminal, one line per change anywhere else.

Owns no decision and no process. States are waiting, working, ok, failed; details are one line each.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

WAITING, WORKING, OK, FAILED = "waiting", "working", "ok", "failed"
_MARKS = {WAITING: ("·", "dim"), OK: ("✓", "green"), FAILED: ("✗", "red")}


class StartDisplay:
    """A context manager; rows keep the order in which they were first set."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: dict[str, tuple[str, str]] = {}
        self._spinner = Spinner("dots", style="cyan")
        self._started_s = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> StartDisplay:
        if self._console.is_terminal:
            self._live = Live(self._render(), console=self._console, refresh_per_second=10, get_renderable=self._render)
            self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)
            self._live = None

    def set(self, name: str, state: str, detail: str = "") -> None:
        """Shows the state of one part. Setting what is shown already prints nothing."""
        before = self._rows.get(name)
        if before == (state, detail):
            return
        self._rows[name] = (state, detail)
        if self._live is None and (before is None or before[0] != state) and state != WAITING:
            elapsed_s = time.monotonic() - self._started_s
            self._console.print(
                f"[{elapsed_s:6.1f} s] {name}: {state} {detail}".rstrip(), markup=False, highlight=False, soft_wrap=True
            )

    def fail_unfinished(self) -> None:
        """Marks every part that is not ok as failed, so that no spinner stays on the screen."""
        for name, (state, detail) in list(self._rows.items()):
            if state == WORKING:
                self._rows[name] = (FAILED, detail)

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 1))
        for name, (state, detail) in self._rows.items():
            mark: RenderableType = self._spinner if state == WORKING else Text(*_MARKS[state])
            table.add_row(mark, Text(name), Text(detail, style="dim", overflow="ellipsis", no_wrap=True))
        return table
