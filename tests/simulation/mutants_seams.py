"""How a deliberate bug is planted: replacing named functions, and the description of a mutant.

Owns the replacing and its undoing. It must never plant beside the mark: a seam that is gone, or
that takes other parameters than its replacement, is an error and not a mutant that survives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FunctionType, MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from tests.simulation.options import Options, draw
from tests.simulation.simulation import Result, Simulation

Call = Callable[..., Any]
Make = Callable[[Call], Call]
"""Takes the real function, returns the wrong one."""

NONE: Final[Mapping[str, Any]] = MappingProxyType({})

TYPOS: Final = frozenset(
    {"AttributeError", "ImportError", "NameError", "TypeError", "UnboundLocalError"}
)
"""A run that ends in one of these says that the mutant is badly written, not that it was found."""


class SeamGone(Exception):
    """What a mutant wants to replace is not there, or is not what it was."""


class BrokenMutant(Exception):
    """A mutant failed by itself, before any checker could find it."""


class Patch(NamedTuple):
    """One replacement: `name` of a class or module `owner` by what `make` makes of it."""

    owner: Any
    name: str
    make: Make


class Mutant(NamedTuple):
    """One deliberate bug.

    `pins`, `rates`, `mode`: options and fault rates that are set in every seed (the rest is drawn)
    because the bug shows nowhere else, and one mode and number of ranks for all schedulers.
    `world`: replacements that widen the simulated world and are right by themselves; the clean run
    has them, too.
    """

    name: str
    what: str
    patches: tuple[Patch, ...]
    pins: Mapping[str, Any] = NONE
    rates: Mapping[str, float] = NONE
    mode: str = ""
    world: tuple[Patch, ...] = ()
    ranks: int = 0

    def options(self, seed: int) -> Options:
        """The options of a seed with what is pinned."""
        drawn = draw(seed)
        pins = dict(self.pins)
        if self.mode:
            pins["modes"] = (self.mode,) * len(drawn.modes)
        if self.ranks:
            pins["world_sizes"] = (self.ranks,) * len(drawn.modes)
        return msgspec.structs.replace(drawn, rates={**drawn.rates, **self.rates}, **pins)

    def run(self, seed: int) -> Result:
        """Run a seed with the bug. Raises `SeamGone` and `BrokenMutant`."""
        with planted(self.world + self.patches):
            result = Simulation(self.options(seed)).run()
        if result.checker in TYPOS:
            raise BrokenMutant(f"{self.name}: {result.problem}")
        return result

    def run_clean(self, seed: int) -> Result:
        """Run the same seed without the bug."""
        with planted(self.world):
            return Simulation(self.options(seed)).run()

    def pinned(self) -> str:
        """What is pinned, for a reader."""
        said = [f"{name} {value}" for name, value in {**self.pins, **self.rates}.items()]
        ranks = [f"{self.ranks} ranks"] if self.ranks else []
        return ", ".join([*([self.mode] if self.mode else []), *ranks, *said])


def seam(owner: Any, name: str) -> Callable[[Make], Patch]:
    """Make a patch of a function that takes the real one and returns the wrong one."""
    return lambda make: Patch(owner, name, make)


@contextmanager
def planted(patches: tuple[Patch, ...]) -> Iterator[None]:
    """Plant all patches for a while."""
    with ExitStack() as stack:
        for owner, name, make in patches:
            original = _found(owner, name)
            wrong = make(original)
            _same_parameters(owner, name, original, wrong)
            stack.enter_context(swapped(owner, name, wrong))
        yield


@contextmanager
def swapped(owner: Any, name: str, wrong: Call) -> Iterator[None]:
    """Replace one function for a while."""
    original = _found(owner, name)
    setattr(owner, name, wrong)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _found(owner: Any, name: str) -> Call:
    original = vars(owner).get(name)
    if not isinstance(original, FunctionType):
        raise SeamGone(f"{owner.__name__}.{name} is no function there any more; mend the mutant")
    return original


def _same_parameters(owner: Any, name: str, original: Call, wrong: Call) -> None:
    before = [(p.name, p.kind) for p in inspect.signature(original).parameters.values()]
    after = [(p.name, p.kind) for p in inspect.signature(wrong).parameters.values()]
    if before != after:
        raise SeamGone(f"{owner.__name__}.{name} takes {before}, the mutant {after}; mend it")
