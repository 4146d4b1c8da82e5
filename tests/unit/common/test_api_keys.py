"""API keys: what is accepted, what the file may hold, and what is never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.api_keys import KeyFileError, KeyRing, entry_of, load_keys, make_key, parse_entries

ONE, OTHER = make_key(), make_key()
FILE = f"# comment\n\n{entry_of('one', ONE)}\n  {entry_of('other.team-2', OTHER)}  \n"


def test_each_key_is_found_by_its_value_only() -> None:
    ring = KeyRing(parse_entries(FILE, "file"))
    assert (ring.find(ONE), ring.find(OTHER), len(ring)) == ("one", "other.team-2", 2)
    for wrong in ("", "one", ONE[:-1], ONE + "x", ONE.upper(), entry_of("one", ONE), "\ud800", "ключ"):
        assert ring.find(wrong) is None


def test_keys_differ_and_are_long() -> None:
    assert len({make_key() for _ in range(100)}) == 100 and len(ONE) > 40


@pytest.mark.parametrize(
    "line",
    ["one", f"one {ONE}", f"one sha256:{'0' * 63}", f"one sha256:{'G' * 64}", f"o/ne sha256:{'0' * 64}", f"{'x' * 65} sha256:{'0' * 64}",
     f"one sha256:{'0' * 64} more"],
)  # fmt: skip
def test_a_bad_line_is_named_by_its_number_and_never_shown(line: str) -> None:
    with pytest.raises(KeyFileError, match="keys.txt, line 2") as refused:
        parse_entries(f"# first\n{line}", "keys.txt")
    assert ONE not in str(refused.value)


def test_file_and_setting_are_joined_and_none_means_open(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(FILE)
    ring = load_keys(file, entry_of("third", "x"))
    assert ring is not None and ring.find("x") == "third" and ring.find(ONE) == "one"
    both = load_keys(None, f"{entry_of('a', 'x')},{entry_of('b', 'y')}")
    assert both is not None and both.find("y") == "b"
    assert load_keys(None, "") is None


def test_files_that_would_lock_everyone_out_or_let_two_share_a_name_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# nobody\n")
    with pytest.raises(KeyFileError, match="no API keys"):
        load_keys(file, "")
    with pytest.raises(KeyFileError, match="'one' is there twice"):
        KeyRing(parse_entries(FILE + entry_of("one", "x"), "file"))
    with pytest.raises(KeyFileError, match="cannot be read"):
        load_keys(tmp_path / "missing", "")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(KeyFileError, match="cannot be read"):
        load_keys(file, "")
