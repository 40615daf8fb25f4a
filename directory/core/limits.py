"""Every limit of treecored in one file, with the relations between them asserted.

A loop, queue or message that has no line here is a defect. Units stand last in the names.
"""

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

MESSAGE_BYTES_MAX: Final = 16 * MIB
"""One wire message. A prompt of 1 M tokens is 4 MiB of packed ids, its pages at most as much."""
TOKENS_BYTES_MAX: Final = 8 * MIB
PAGES_BYTES_MAX: Final = 4 * MIB
FDS_PER_FRAME_MAX: Final = 250

INSTANCE_CHARS_MAX: Final = 128
FINGERPRINT_BYTES_MAX: Final = 64 * KIB
REQUEST_CHARS_MAX: Final = 256
KEY_PART_CHARS_MAX: Final = 1024
NAMESPACES_MAX: Final = 65_536

PAGE_SIZE_MAX: Final = 4_096
POOL_PAGES_MAX: Final = 1 << 26
POOLS_MAX: Final = 1_024
"""Registrations at once; each rank of a group is one."""
RANKS_PER_GROUP_MAX: Final = 64
GENERATIONS_KEPT_MAX: Final = 65_536
"""Instances whose last generation is remembered, those that live included."""
BUFFERS_PER_POOL_MAX: Final = 4_096
SEGMENTS_MAX: Final = 1 << 16
SLOTS_PER_SEGMENT_MAX: Final = 1 << 16

LEASES_PER_POOL_MAX: Final = 65_536
BACKUPS_IN_FLIGHT_MAX: Final = 64
BACKUPS_PENDING_MAX: Final = 262_144
RESTORES_PER_POOL_MAX: Final = 1_024
BACKUP_PAGES_MAX: Final = 4_096
"""Pages of one backup; a longer node is split so that no single copy holds the queue long."""

UNACKED_MESSAGES_MAX: Final = 65_536
KEPT_ANSWERS_MAX: Final = 65_536
GROUP_LAG_MESSAGES_MAX: Final = 65_536
"""Messages that some rank of a group has sent and another one has not."""
GROUP_LAG_BYTES_MAX: Final = 256 * MIB
"""Tokens and page lists of those messages."""
RESENT_AT_ONCE_MAX: Final = 1_024
STORY_LINES_MAX: Final = 64
VIOLATIONS_REPORTED_MAX: Final = 1_000

FENCE_DEADLINE_MS: Final = 5_000
CALL_DEADLINE_MS: Final = 2_000
RESEND_AFTER_MS: Final = 200

assert TOKENS_BYTES_MAX + PAGES_BYTES_MAX < MESSAGE_BYTES_MAX
assert KEPT_ANSWERS_MAX >= UNACKED_MESSAGES_MAX
assert GROUP_LAG_BYTES_MAX >= MESSAGE_BYTES_MAX
assert GENERATIONS_KEPT_MAX > POOLS_MAX, "a live instance keeps its generation"
assert RESEND_AFTER_MS < CALL_DEADLINE_MS < FENCE_DEADLINE_MS
assert SEGMENTS_MAX * SLOTS_PER_SEGMENT_MAX <= 1 << 32, "a host slot id is 32 bits"
