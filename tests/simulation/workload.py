"""The requests of a run: prompts that share beginnings, namespaces, turns of one conversation.

Owns the texts. Documents are sequences of few token ids, cut and continued at drawn places, so
that paths share prefixes, diverge inside nodes and end inside pages.
"""

from __future__ import annotations

import random

from directory.core.namespace import Adapter, NamespaceKey
from tests.simulation.options import Options
from tests.simulation.request import ModelRequest

KEYS = (
    NamespaceKey(),
    NamespaceKey(bigram=True),
    NamespaceKey(cache_salt=""),
    NamespaceKey(extra_key="x", wide=True),
    NamespaceKey(adapter=Adapter("x", 1)),
)
FINISHED_MAX = 16


class Workload:
    """Makes requests for one run."""

    def __init__(self, rng: random.Random, options: Options) -> None:
        self._rng = rng
        self._options = options
        self._made = 0
        self._chats: list[list[int]] = []
        self.keys = [KEYS[0], *rng.sample(KEYS[1:], options.namespaces - 1)]
        self._documents = [
            [rng.randrange(4) for _ in range(options.document_pages * options.page_size)]
            for _ in range(options.documents)
        ]

    def make(self, epoch: int) -> ModelRequest:
        """The next request, of the weights of `epoch`."""
        rng, options = self._rng, self._options
        self._made += 1
        most = options.document_pages * options.page_size
        if self._chats and rng.random() < options.turns:
            prompt = list(rng.choice(self._chats))
        else:
            document = rng.choice(self._documents)
            prompt = document[: rng.randrange(1, len(document) + 1)]
        # A few of many endings: some prompts are equal, some part where others go on.
        ending = rng.randrange(options.branches + 1)
        if ending:
            length = rng.randrange(0, options.page_size + 2)
            prompt += [10 + ending] * length
        prompt = prompt[:most]
        output: list[int] = []
        if options.output_pages:
            length = rng.randrange(0, options.output_pages * options.page_size + 1)
            output = [rng.randrange(20, 22) for _ in range(length)]
        self._chats.append(prompt + output)
        del self._chats[:-FINISHED_MAX]
        key = rng.choice(self.keys)
        if epoch:
            key = NamespaceKey(
                epoch, key.cache_salt, key.extra_key, key.adapter, key.bigram, key.wide
            )
        if key.bigram:
            prompt = [*prompt, 5]  # a pair needs two
        return ModelRequest(self._made, f"r{self._made}", key, prompt, output, options.page_size)
