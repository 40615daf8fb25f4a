"""The contestant's side of contestants.py: what a process is told, line by line, and answers.

Owns standard input and output of such a process. It imports nothing but the standard library: it
runs inside environments of others, too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

CarryOut = Callable[[str, list[Any]], list[float] | None]


def answer(carry_out: CarryOut) -> None:
    """Carry out what each line says (a JSON list, a verb first) and answer with one line, until
    they end. Whatever else is printed in this process goes to the standard error: it is no answer.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        answers.write(json.dumps(carry_out(verb, arguments)) + "\n")
