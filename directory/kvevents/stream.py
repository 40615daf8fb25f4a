"""One stream: its sequence numbers, and the batches that are kept for those who missed some.

Owns no socket. Sequence numbers begin at the clock and go up by one a batch, so they never go back,
whoever is restarted: a consumer that saw a higher number would ignore everything after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from directory.core import limits
from directory.kvevents.wire import (
    END,
    Event,
    Form,
    encode_batch,
    live_frames,
    replay_frames,
    sequence_frame,
)


class Stream:
    """Batches of one publisher. `now_us`: wall clock, microseconds."""

    def __init__(self, form: Form, now_us: Callable[[], int]) -> None:
        self.form = form
        self._now_us = now_us
        self.next_sequence = now_us()
        self.sent_us = 0
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0

    def publish(self, events: Sequence[Event]) -> list[bytes]:
        """Return the frames of the next batch, and keep it."""
        self.sent_us = self._now_us()
        payload = encode_batch(events, self.form, self.sent_us / 1e6)
        frames = live_frames(self.next_sequence, payload)
        self.next_sequence += 1
        self._kept.append(payload)
        self._kept_bytes += len(payload)
        while self._kept and (
            len(self._kept) > limits.KV_EVENTS_REPLAY_BATCHES_MAX
            or self._kept_bytes > limits.KV_EVENTS_REPLAY_BYTES_MAX
        ):
            self._kept_bytes -= len(self._kept.popleft())
        return frames

    def replay(self, first: int, everything: Callable[[], Sequence[Event]]) -> list[list[bytes]]:
        """Return what to send to who asks for all batches from `first` on, and the end mark.

        Where they are not all kept, one batch with everything stands in for them, under the number
        of the last one: the next live batch follows it.
        """
        oldest = self.next_sequence - len(self._kept)
        replies: list[list[bytes]] = []
        if oldest <= first:
            kept = list(self._kept)[first - oldest :]
            for sequence, payload in enumerate(kept, first):
                replies.append(replay_frames(sequence_frame(sequence), payload, self.form))
        elif self.next_sequence:
            payload = encode_batch(everything(), self.form, self._now_us() / 1e6)
            last = sequence_frame(self.next_sequence - 1)
            replies.append(replay_frames(last, payload, self.form))
        return [*replies, replay_frames(END, b"", self.form)]

    def __repr__(self) -> str:
        return f"<Stream next={self.next_sequence}, {len(self._kept)} batches kept>"
