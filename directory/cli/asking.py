"""Asking a running daemon: one session, questions and answers.

Owns the handshake, the deadlines and the one sentence for a daemon that does not answer. It must
never register anything or end anything: it opens a session, asks and leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import click

from directory.core.errors import ProtocolError
from directory.daemon.config import load_settings
from directory.daemon.runtime import SESSION_NAME
from directory.protocol.admin import AdminRequest
from directory.protocol.codec import decode_session_reply, encode
from directory.protocol.messages import Hello, SessionRefused, SessionReply, Welcome
from directory.protocol.version import VERSION_MAX, VERSION_MIN
from transfer.ipc.channel import FdChannel, close_fds

EXIT_NO_ANSWER: Final = 2
DEADLINE_S: Final = 60.0

Reply = TypeVar("Reply")
Command = TypeVar("Command", bound=Callable[..., Any])


class NoAnswer(Exception):
    """No daemon answered; the message says where and why."""


class Asking:
    """A session with the daemon of a runtime folder. Raises `NoAnswer`, here and in `ask`."""

    def __init__(self, folder: Path, deadline_s: float, software: str) -> None:
        self._path = folder / SESSION_NAME
        self._deadline_s = deadline_s
        try:
            self._channel = FdChannel.connect(str(self._path), deadline_s)
        except OSError as error:
            raise NoAnswer(
                f"no daemon listens at {self._path} ({error.strerror or error}); start one with "
                f"`treecored serve --runtime-dir {folder}`, or name the folder of the one that "
                "runs with --runtime-dir"
            ) from None
        try:
            self._expect(self._call(Hello(VERSION_MIN, VERSION_MAX, software)), Welcome)
        except BaseException:
            self._channel.close()
            raise

    def ask(self, request: AdminRequest, kind: type[Reply]) -> Reply:
        """Ask a question whose answer is of a kind."""
        return self._expect(self._call(request), kind)

    def _call(self, message: Hello | AdminRequest) -> SessionReply:
        try:
            payload, fds = self._channel.call(encode(message), deadline_s=self._deadline_s)
            close_fds(fds)
            return decode_session_reply(payload)
        except (ProtocolError, OSError) as error:
            raise NoAnswer(f"the daemon at {self._path} did not answer: {error}") from None

    def _expect(self, reply: object, kind: type[Reply]) -> Reply:
        if isinstance(reply, kind):
            return reply
        if isinstance(reply, SessionRefused):
            raise NoAnswer(f"the daemon refused: {reply.code}: {reply.message}")
        raise NoAnswer(f"the daemon answered with {type(reply).__name__}")

    def close(self) -> None:
        """Leave."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def daemon_options(command: Command) -> Command:
    """Add the options that name a running daemon."""
    for option in reversed(
        (
            click.option(
                "--config",
                type=click.Path(path_type=Path),
                help="TOML file of settings (or TREECORED_CONFIG) that names the runtime folder.",
            ),
            click.option(
                "--runtime-dir",
                help="Folder of the daemon's sockets. "
                "[$XDG_RUNTIME_DIR/treecored, else $TMPDIR/treecored-UID]",
            ),
        )
    ):
        command = option(command)
    return command


def folder_of(config: Path | None, runtime_dir: str | None) -> Path:
    """The runtime folder that the options name. Raises `ConfigError`."""
    return load_settings(config, {"runtime_dir": runtime_dir}).runtime_dir
