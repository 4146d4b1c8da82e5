"""Health of one container: asks a local URL and exits 0 when it answers with 200. Standard library only, so that it starts fast."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request


def main() -> int:
    try:
        with urllib.request.urlopen(sys.argv[1], timeout=3) as reply:
            return 0 if reply.status == 200 else 1
    except (urllib.error.URLError, TimeoutError) as error:
        print(error, file=sys.stderr)  # noqa: T201  shown by `docker inspect`
        return 1


if __name__ == "__main__":
    sys.exit(main())
