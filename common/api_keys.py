"""API keys: who may call this router. Stored as hashes, compared in constant time, known everywhere else by their id only.

A key is 256 random bits, so one SHA-256 is as good as a slow hash; that is why keys are made by `baton key` and not chosen. Owns no
limits; errors name the line that is wrong and never what it holds.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

KEY_PREFIX = "bk-"
KEYS_MAX = 10_000
FILE_BYTES_MAX = 4 << 20
_KEY_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")


class KeyFileError(Exception):
    """The keys cannot be used; one line for the operator."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """`key_id` is what logs and limits call the holder; `digest` the SHA-256 of the key."""

    key_id: str
    digest: bytes


class KeyRing:
    """All keys that are accepted. Looking one up costs the same whether and where it is found."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = tuple(keys)
        if not self._keys:
            raise KeyFileError("there are no API keys: with none, nobody could call this server")
        if len(self._keys) > KEYS_MAX:
            raise KeyFileError(f"there are {len(self._keys)} API keys, at most {KEYS_MAX} can be used")
        ids = [key.key_id for key in self._keys]
        double = next((key_id for key_id in ids if ids.count(key_id) > 1), None) if len(set(ids)) < len(ids) else None
        if double is not None:
            raise KeyFileError(f"key id {double!r} is there twice")

    def find(self, presented: str) -> str | None:
        """The key id of a presented key, or None."""
        digest = digest_of(presented)
        found: str | None = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key.key_id
        return found

    def __len__(self) -> int:
        return len(self._keys)


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def make_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(32)


def entry_of(key_id: str, key: str) -> str:
    """The line that the key file or the setting holds for a key. Raises KeyFileError for an id of another form."""
    if not _KEY_ID.fullmatch(key_id):
        raise KeyFileError(f"a key id has 1 to 64 letters, digits, '_', '.' or '-', not {key_id[:80]!r}")
    return f"{key_id} sha256:{digest_of(key).hex()}"


def parse_entries(text: str, where: str) -> list[ApiKey]:
    """Keys from lines `id sha256:hex`; blank lines and lines that begin with # count for nothing. Raises KeyFileError."""
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not _KEY_ID.fullmatch(words[0]) or not _HASH.fullmatch(words[1]):
            raise KeyFileError(f"{where}, line {number}: must be `ID sha256:HEX`, as `baton key ID` prints it")
        keys.append(ApiKey(words[0], bytes.fromhex(words[1].removeprefix("sha256:"))))
    return keys


def load_keys(file: Path | None, inline: str) -> KeyRing | None:
    """The keys of a file and of a setting (entries separated by commas); None when neither is given. Raises KeyFileError."""
    if file is None and not inline:
        return None
    keys = parse_entries(inline.replace(",", "\n"), "api_keys")
    if file is not None:
        try:
            if file.stat().st_size > FILE_BYTES_MAX:
                raise KeyFileError(f"{file} has {file.stat().st_size} bytes, at most {FILE_BYTES_MAX} are read")
            keys += parse_entries(file.read_text(encoding="utf-8"), str(file))
        except (OSError, UnicodeDecodeError) as error:
            raise KeyFileError(f"{file} cannot be read: {error}") from error
    return KeyRing(keys)
