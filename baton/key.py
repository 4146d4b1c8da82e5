"""`baton key`: makes an API key and the entry by which a router knows it.

The key is shown once and stored nowhere; the router's file holds its hash. The entry goes to standard output, so that it can be
appended to that file; the key goes to standard error.
"""

from __future__ import annotations

import argparse
import sys

from common.api_keys import KeyFileError, entry_of, make_key


def run(arguments: argparse.Namespace) -> int:
    key = make_key()
    try:
        entry = entry_of(arguments.id, key)
    except KeyFileError as error:
        print(f"baton key: {error}", file=sys.stderr)
        return 2
    print(f"key of {arguments.id}, shown only now: {key}", file=sys.stderr)
    print(entry)
    return 0
