"""The error tree: one small hierarchy grouped by cause, each leaf with its wire code.

Owns the codes; docs/protocol.md lists them and a test holds the two equal. Never raised for a
miss: a miss is always a correct answer. The message says what to do.
"""

from typing import ClassVar


class TreecoredError(Exception):
    """Base of every error that treecored raises on purpose; `code` travels on the wire."""

    code: ClassVar[str] = "internal"


class ProtocolError(TreecoredError):
    """The peer said something that the protocol does not allow."""

    code = "protocol"


class BadMessage(ProtocolError):
    """A frame or field that cannot be decoded or is out of range."""

    code = "bad_message"


class TooLarge(ProtocolError):
    """A message, list or string beyond its limit (directory/core/limits.py)."""

    code = "too_large"


class VersionMismatch(ProtocolError):
    """Client and daemon speak no common protocol version; the message names both."""

    code = "version_mismatch"


class NotAuthorised(ProtocolError):
    """A ZeroMQ identity that did not prove itself with the secret of its session."""

    code = "not_authorised"


class OutOfOrder(ProtocolError):
    """A gap in the numbered stream; resend from the acknowledged position."""

    code = "out_of_order"


class ConflictError(TreecoredError):
    """Two claims about one fact; the later one is refused."""

    code = "conflict"


class InstanceLive(ConflictError):
    """The instance id is registered by a process that is alive; choose another or end that one."""

    code = "instance_live"


class Diverged(ConflictError):
    """A report contradicts what the pool reported before; its residency is dropped: republish."""

    code = "diverged"


class GroupMismatch(ConflictError):
    """A rank that differs from the others of its instance; the message names both."""

    code = "group_mismatch"


class GroupIncomplete(ConflictError):
    """Not every rank of the instance is registered yet; nothing was done."""

    code = "group_incomplete"


class WrongMode(ConflictError):
    """A thin client's question from a mirrored pool, or the reverse."""

    code = "wrong_mode"


class CapacityError(TreecoredError):
    """A limit or a memory is full."""

    code = "capacity"


class TooMany(CapacityError):
    """Too many pools, leases, namespaces or operations of one kind."""

    code = "too_many"


class StaleError(TreecoredError):
    """A handle of something that is gone."""

    code = "stale"


class StaleNode(StaleError):
    """The node id is no longer in the tree; match again."""

    code = "stale_node"


class StaleReceipt(StaleError):
    """The receipt is unknown, used, or another owner's; nothing was released."""

    code = "stale_receipt"


class StaleEpoch(StaleError):
    """The message belongs to another boot of the daemon; register again."""

    code = "stale_epoch"


class UnknownPool(StaleError):
    """The registration is gone (or never was); register again."""

    code = "unknown_pool"


class AnswerGone(StaleError):
    """The message was carried out and its answer is no longer kept; take it for no answer."""

    code = "answer_gone"


class TransferError(TreecoredError):
    """A copy did not happen."""

    code = "transfer"


class ImportFailed(TransferError):
    """A pool's memory cannot be imported; the message names the buffer and the reason."""

    code = "import_failed"


class LayoutError(TransferError):
    """A pool layout that cannot be addressed exactly; never repaired by a hidden copy."""

    code = "bad_layout"


class InternalError(TreecoredError):
    """A defect of treecored itself; carries the story of the object."""

    code = "internal"


class InvalidTransition(InternalError):
    """A life cycle was asked for a step that its state table does not have."""

    code = "invalid_transition"


def error_classes() -> dict[str, type[TreecoredError]]:
    """Return every error class by wire code; groups that are never raised are included.

    A class without a code of its own is a variety of the one that it has the code from.
    """
    found: dict[str, type[TreecoredError]] = {}
    # Without the root, whose code stands for "a defect": that is InternalError's.
    queue: list[type[TreecoredError]] = list(TreecoredError.__subclasses__())
    while queue:
        cls = queue.pop()
        if "code" in vars(cls):
            found.setdefault(cls.code, cls)
        queue.extend(cls.__subclasses__())
    return found
