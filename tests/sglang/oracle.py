"""What a prompt's tokens are when nothing is cached: asked of stock engines, once each.

Owns the stock engines, one for each version, model and set of arguments, with the prefix cache
switched off and room for everything. Their answers are kept for the whole run.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from tests.sglang.engines import Engine, Nursery

ROOM = {"max_total_tokens": 16_384, "max_running_requests": 16, "disable_radix_cache": True}


class Oracle:
    """Cold answers."""

    def __init__(self, nursery: Callable[[str], Nursery], models: Path, folder: Path) -> None:
        self._nursery = nursery
        self._models = models
        self._folder = folder
        self._engines: dict[tuple[str, ...], Engine] = {}
        self._known: dict[tuple[str, ...], dict[tuple[int, ...], list[int]]] = {}

    def tokens(
        self, version: str, prompt: list[int], new: int = 8, *, model: str = "one", **given: str
    ) -> list[int]:
        """The answer to one prompt. `given` are arguments of SGLang's engine."""
        return self.many(version, [(prompt, new)], model=model, **given)[0]

    def many(
        self,
        version: str,
        asked: Iterable[tuple[list[int], int]],
        *,
        model: str = "one",
        **given: str,
    ) -> list[list[int]]:
        """The answers to prompts, each with its number of new tokens; they run together."""
        key = (version, model, *(f"{name}={value}" for name, value in sorted(given.items())))
        engine = self._engine(key, version, model, given)
        known = self._known[key]
        wanted = list(asked)
        under_way = {
            (new, *prompt): engine.submit(prompt, new)
            for prompt, new in wanted
            if (new, *prompt) not in known
        }
        for of, name in under_way.items():
            known[of] = engine.collect(name).tokens
        return [known[new, *prompt] for prompt, new in wanted]

    def _engine(
        self, key: tuple[str, ...], version: str, model: str, given: dict[str, str]
    ) -> Engine:
        if key not in self._engines:
            name = "-".join(key).replace("=", "-").replace("/", "-")
            self._engines[key] = self._nursery(version).engine(
                name, self._folder, model_path=str(self._models / model), **ROOM, **given
            )
            self._engines[key].wait_up()
            self._known[key] = {}
        return self._engines[key]

    def close(self) -> None:
        """End the engines."""
        for engine in self._engines.values():
            engine.stop()
