"""Codec: bytes to messages and back, with reused encoders and every limit checked first.

Owns the coders. A frame that is too large, too deep, of the wrong arity or type raises a typed
error; nothing else leaves these functions.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from directory.core import limits
from directory.core.errors import BadMessage, TooLarge
from directory.protocol.messages import (
    Envelope,
    ReplyEnvelope,
    SessionReply,
    SessionRequest,
)

_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(Envelope)
_replies = msgspec.msgpack.Decoder(ReplyEnvelope)
_session_requests: msgspec.msgpack.Decoder[SessionRequest] = msgspec.msgpack.Decoder(SessionRequest)
_session_replies: msgspec.msgpack.Decoder[SessionReply] = msgspec.msgpack.Decoder(SessionReply)

T = TypeVar("T")


def encode(message: msgspec.Struct) -> bytes:
    """Encode any message of this protocol."""
    return _encoder.encode(message)


def decode_envelope(frame: bytes | memoryview) -> Envelope:
    """Decode a client's ZeroMQ frame, or raise `BadMessage` / `TooLarge`."""
    return _decode(_envelopes, frame)


def decode_reply(frame: bytes | memoryview) -> ReplyEnvelope:
    """Decode a daemon's ZeroMQ frame, or raise `BadMessage` / `TooLarge`."""
    return _decode(_replies, frame)


def decode_session_request(frame: bytes | memoryview) -> SessionRequest:
    """Decode a client's session frame, or raise `BadMessage` / `TooLarge`."""
    return _decode(_session_requests, frame)


def decode_session_reply(frame: bytes | memoryview) -> SessionReply:
    """Decode a daemon's session frame, or raise `BadMessage` / `TooLarge`."""
    return _decode(_session_replies, frame)


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes | memoryview) -> T:
    if len(frame) > limits.MESSAGE_BYTES_MAX:
        raise TooLarge(f"a frame of {len(frame)} bytes, at most {limits.MESSAGE_BYTES_MAX}")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(f"not a message of this protocol: {error}") from None
