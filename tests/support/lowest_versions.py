"""Print constraints for pip: the lowest version of each library that pyproject.toml allows.

Libraries that constraints.txt pins are left out, and so are the tools of the tests. The program needs Python alone, as
`make test-lowest` runs it before anything is installed.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def lowest_versions(project: str, pinned: str) -> list[str]:
    """Return lines such as "numpy==1.26", from the texts of pyproject.toml and constraints.txt."""
    table = tomllib.loads(project)["project"]
    extras = table["optional-dependencies"]
    (in_tests,) = re.findall(r"raydix\[(.*)\]", extras["test"][0])
    lines = [*table["dependencies"], *(line for name in in_tests.split(",") for line in extras[name])]
    fixed = set(re.findall(r"(?m)^([\w-]+)==", pinned))
    lowest: dict[str, str] = {}
    for line in lines:
        name, bound = re.fullmatch(r"([\w-]+)(?:\[.*\])?>=([\d.]+)", line).groups()
        if name not in fixed:
            lowest[name] = max(lowest.get(name, "0"), bound, key=lambda text: [*map(int, text.split("."))])
    return [f"{name}=={bound}" for name, bound in sorted(lowest.items())]


if __name__ == "__main__":
    texts = [(ROOT / name).read_text() for name in ("pyproject.toml", "constraints.txt")]
    print("\n".join(lowest_versions(*texts)))
