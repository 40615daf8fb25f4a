"""The layer counter: where SGLang's KV pool waits, layer by layer, for loads that still move.

Owns which loads the next forward pass has to wait for, and nothing of the loads. SGLang asks it
whenever a layer's buffers are read (`register_layer_transfer_counter`, on the KV pool alone: the
worker's consumer numbers belong to SGLang's own host tier and are not needed). Every read waits for
all loads of the batch, because the pool does not say whose pages are read. It must never raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from scheduler_shim.landings import Landings


class Layers(NamedTuple):
    """What a pool offers to loads that land layer by layer.

    `number`: of its layers. `disown`: some names' pages are their row's own again, like computed
    ones. `stream`: the stream in which the forward pass runs now; None where this thread runs it.
    """

    landings: Landings
    number: int
    disown: Callable[[bytes], None]
    stream: Callable[[], int] | None = None


class Waited(Protocol):
    """A load as the counter sees it."""

    def wait(self, layer: int) -> bool:
        """Wait for a layer, or see to it that the stream does; False: for nothing any more."""
        ...


class LayerCounter:
    """One KV pool's. Used from the scheduler's thread, which runs the forward passes, too."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self._loads: list[Waited] = []

    @property
    def consumer_index(self) -> int:
        """Whether anything is waited for (0) or not (-1), as SGLang's graph runners ask."""
        return 0 if self._loads else -1

    def set_consumer(self, index: int) -> None:
        """SGLang's way of naming one of several counters; here it is always the same one."""

    def wait_until(self, layer: int) -> None:
        """The buffers of a layer (from 0 up) are about to be read."""
        if self._loads:
            self._loads = [load for load in self._loads if load.wait(layer)]

    def begin(self, load: Waited) -> None:
        """The next forward pass reads what a load brings."""
        self._loads.append(load)

    def end(self, load: Waited) -> None:
        """Nothing of a load is to be waited for. Repeatable."""
        if load in self._loads:
            self._loads.remove(load)

    def __repr__(self) -> str:
        return f"<LayerCounter of {self.num_layers} layers, {self._loads}>"
