"""Reads a stream of KV events and throws it away: `python -m benchmarks.subscriber ADDRESS`.

Owns its socket. A router's place, so that what is published has somewhere to go. At the end of its
standard input it prints how many batches it has read.
"""

from __future__ import annotations

import sys

import zmq


def main() -> None:
    """Read until standard input ends."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    heard = 0
    with context.socket(zmq.SUB) as events:
        events.setsockopt(zmq.SUBSCRIBE, b"")
        events.connect(sys.argv[1])
        poller = zmq.Poller()
        poller.register(events, zmq.POLLIN)
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if events in ready:
                events.recv_multipart()
                heard += 1
            elif ready:
                break
    context.term()
    print(heard)


if __name__ == "__main__":
    main()
