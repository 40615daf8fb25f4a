"""Lists and runs benchmarks: each `bench_*.py` here answers the question of its first line.

    python -m benchmarks                 # list them
    python -m benchmarks core match      # run these, one after the other
    python -m benchmarks --all [--json FOLDER]

Each also runs by itself (`python -m benchmarks.bench_core --help`). Owns nothing but the list.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def questions() -> dict[str, str]:
    """Name and question of every benchmark, read without importing any."""
    found: dict[str, str] = {}
    for path in sorted(HERE.glob("bench_*.py")):
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found[path.stem.removeprefix("bench_")] = said.partition("\n")[0]
    return found


def main() -> int:
    """List, or run in processes of their own; the worst exit status counts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run benchmarks.")
    parser.add_argument("names", nargs="*", help="which ones (none: list them)")
    parser.add_argument("--all", action="store_true", help="run every one")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="write NAME.json files here")
    arguments = parser.parse_args()
    known = questions()
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(known)}")
    names = list(known) if arguments.all else arguments.names
    if not names:
        width = max(map(len, known), default=0)
        for name, question in known.items():
            print(f"{name:{width}}  {question}")
        return 0
    worst = 0
    for name in names:
        command = [sys.executable, "-m", f"benchmarks.bench_{name}"]
        if arguments.json is not None:
            arguments.json.mkdir(parents=True, exist_ok=True)
            command += ["--json", str(arguments.json / f"{name}.json")]
        print(f"== {name}: {known[name]}", flush=True)
        worst = max(worst, abs(subprocess.run(command, check=False).returncode))
    return worst


if __name__ == "__main__":
    sys.exit(main())
