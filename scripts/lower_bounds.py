"""Print a pip constraint ``name==version`` for each lower bound that pyproject.toml states."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path


def main() -> None:
    """Print the constraints, one a line."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    for requirement in [*project["dependencies"], *(one for extra in extras for one in extra)]:
        if bound := re.fullmatch(r"([\w.-]+)>=([\w.]+)(?:,.*)?", requirement):
            print(f"{bound[1]}=={bound[2]}")


if __name__ == "__main__":
    main()
