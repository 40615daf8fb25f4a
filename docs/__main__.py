"""`python -m docs`: make the generated parts of the documents anew; `--check` only compares.

Owns nothing. Exits 1 when `--check` finds a document that differs from the code.
"""

from __future__ import annotations

import sys

from docs.tables import GENERATED, documents, rendered


def main(arguments: list[str]) -> int:
    """Write what changed, or with `--check` name it."""
    changed = 0
    for path in documents():
        text = path.read_text(encoding="utf-8")
        fresh = rendered(text, path.name, GENERATED)
        if fresh == text:
            continue
        changed += 1
        if "--check" in arguments:
            sys.stderr.write(f"{path.name} differs from the code; run `make docs`\n")
        else:
            path.write_text(fresh, encoding="utf-8")
            sys.stdout.write(f"{path.name} was made anew\n")
    return 1 if changed and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
