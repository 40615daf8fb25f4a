"""Every limit of treecored in one file, with the relations between them asserted.

A loop, queue or message that has no line here is a defect. Units stand last in the names.
"""

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

MESSAGE_BYTES_MAX: Final = 16 * MIB
"""One wire message. A prompt of 1 M tokens is 4 MiB of packed ids, its pages at most as much."""
ENVELOPE_BYTES_MAX: Final = 64 * KIB
"""All of a message but its tokens, pages and words: envelope, request, namespace, numbers."""
TOKENS_BYTES_MAX: Final = 8 * MIB
PAGES_BYTES_MAX: Final = 4 * MIB
PAGE_NUMBER_BYTES: Final = 4
PROMPT_PAGES_MAX: Final = PAGES_BYTES_MAX // PAGE_NUMBER_BYTES
"""Pages of one path that Match and Insert take; at page size 1 so many tokens. It is what bounds
the page lists of their answers."""
WORD_BYTES_MAX: Final = 20
"""A (span, value, count) of an answer as packed: a header, 4 + 1, 8 + 1 and 4 + 1 bytes."""
GAVE_UP_PAGES_MAX: Final = 1 << 19
"""Pages in one answer to Evict or to a thin pool's Flush; for more the client asks again."""
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
KEPT_ANSWERS_BYTES_MAX: Final = 32 * MIB
"""Of one registration; the answers that were sent longest ago go first."""
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
MOVER_START_MS_MAX: Final = 60_000
"""Silence of a mover that starts, or maps or unmaps memory: one driver call may take seconds."""
MOVER_SILENCE_MS_MAX: Final = 1_500
"""Silence of a mover that has copies to do; between two slices of them it answers."""
MOVER_PING_AFTER_MS: Final = 250

assert TOKENS_BYTES_MAX + PAGES_BYTES_MAX + ENVELOPE_BYTES_MAX <= MESSAGE_BYTES_MAX
assert 8 * PROMPT_PAGES_MAX <= TOKENS_BYTES_MAX, "so long a prompt fits, with 64-bit ids as well"
assert 2 * PAGES_BYTES_MAX + ENVELOPE_BYTES_MAX <= MESSAGE_BYTES_MAX, "canonical and duplicates"
assert (
    GAVE_UP_PAGES_MAX * (PAGE_NUMBER_BYTES + WORD_BYTES_MAX) + ENVELOPE_BYTES_MAX
    <= MESSAGE_BYTES_MAX
), "every page given up may have a word of its own"
assert KEPT_ANSWERS_MAX >= UNACKED_MESSAGES_MAX
assert KEPT_ANSWERS_BYTES_MAX >= MESSAGE_BYTES_MAX, "the answer that is kept now stays"
assert MOVER_PING_AFTER_MS < MOVER_SILENCE_MS_MAX < MOVER_START_MS_MAX
assert GROUP_LAG_BYTES_MAX >= MESSAGE_BYTES_MAX
assert GENERATIONS_KEPT_MAX > POOLS_MAX, "a live instance keeps its generation"
assert RESEND_AFTER_MS < CALL_DEADLINE_MS < FENCE_DEADLINE_MS
assert SEGMENTS_MAX * SLOTS_PER_SEGMENT_MAX <= 1 << 32, "a host slot id is 32 bits"
