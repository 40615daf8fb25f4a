"""A stand-in for a daemon or a worker, run as a script: speaks the messages, moves no page.

`fake_processes.py daemon [ready|silent|broken] ...` or `fake_processes.py worker BEHAVIOUR ...`.
"""

import argparse
import os
import select
import signal
import socket
import sys
import time

import msgspec

from scheduler_shim.worker_messages import (
    AskSummary,
    Configure,
    Configured,
    Finished,
    Prompt,
    Quit,
    Summary,
    ToWorker,
)
from transfer.ipc.channel import FdChannel


def daemon(behaviour: str, ready_fd: int) -> int:
    """Say that it is ready, then wait for a signal."""
    if behaviour == "broken":
        sys.stderr.write("the lock is held by process 1\n")
        return 3
    if behaviour == "dying":
        os.write(ready_fd, b"1")
        time.sleep(0.2)
        sys.stderr.write("out of luck\n")
        return 4
    os.write(ready_fd, b"1")
    os.close(ready_fd)
    signal.sigwait([signal.SIGTERM])
    return 0


class FakeWorker:
    """Answers prompts; `behaviour` says how. `most`: most prompts that were in hand at once."""

    def __init__(self, behaviour: str, fd: int) -> None:
        self.behaviour = behaviour
        self.channel = FdChannel(socket.socket(fileno=fd))
        self.configure: Configure | None = None
        self.in_hand: list[Prompt] = []
        self.most = 0

    def run(self) -> int:
        """Serve until told to quit."""
        decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
        while True:
            # Everything that has been sent is taken in before anything is answered.
            select.select([self.channel], [], [], None if not self.in_hand else 0.05)
            frames = self.channel.receive()
            for payload, _ in frames:
                message = decoder.decode(payload)
                if isinstance(message, Quit):
                    return 0
                self.take(message)
            if not frames and self.in_hand and self.behaviour != "mute":
                self.finish(self.in_hand.pop())

    def take(self, message: ToWorker) -> None:
        """Take a message in."""
        if isinstance(message, Configure):
            self.configure = message
            ok = self.behaviour != "refused"
            self.say(Configured(ok, detail="" if ok else "no daemon at the runtime folder"))
        elif isinstance(message, Prompt):
            if self.behaviour == "dies":
                sys.stderr.write("cannot go on\n")
                sys.stderr.flush()
                os._exit(7)
            if self.behaviour == "raves":
                self.channel.send(b"\xc1")
                return
            self.in_hand.append(message)
            self.most = max(self.most, len(self.in_hand))
        elif isinstance(message, AskSummary):
            assert self.configure is not None
            name, mode = self.configure.instance, self.configure.mode
            counters = {"most_in_hand": self.most, "checked": int(message.check)}
            self.say(Summary(name, mode, (50.0, 70.0), counters, {"bytes_backed_up": 1 << 20}, ()))

    def finish(self, prompt: Prompt) -> None:
        """Pretend that the prompt's first page was in the own pool."""
        tokens = prompt.length or len(prompt.tokens) // 4
        self.say(Finished(prompt.number, tokens, 1, 0, 0, 1, 0, 0.001))

    def say(self, message: msgspec.Struct) -> None:
        """Send a message."""
        self.channel.send(msgspec.msgpack.encode(message))


def main() -> int:
    """Run as what the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role")
    parser.add_argument("behaviour")
    parser.add_argument("--fd", type=int)
    parser.add_argument("--ready-fd", type=int)
    known, _ = parser.parse_known_args()
    if known.role == "daemon":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        return daemon(known.behaviour, known.ready_fd)
    return FakeWorker(known.behaviour, known.fd).run()


if __name__ == "__main__":
    sys.exit(main())
