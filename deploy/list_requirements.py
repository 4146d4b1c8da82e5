"""Prints the requirements of pyproject.toml, one per line, with those of the extras named as arguments.

Lets an image install the dependencies before it sees the code, so that a change of the code does not install them again.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for name in sys.argv[1:] for line in extras[name])]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
