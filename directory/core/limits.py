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
ARENA_BYTES_MAX: Final = 1024 * MIB
"""Of one client's token arena, which the daemon maps and does not own."""
PAGE_NUMBER_BYTES: Final = 4
PROMPT_PAGES_MAX: Final = PAGES_BYTES_MAX // PAGE_NUMBER_BYTES
"""Pages of one path that Match and Insert take; at page size 1 so many tokens. It is what bounds
the page lists of their answers."""
WORD_BYTES_MAX: Final = 20
"""A (span, value, count) of an answer as packed: a header, 4 + 1, 8 + 1 and 4 + 1 bytes."""
RUN_BYTES_MAX: Final = 16
"""A (span, first page, count) of a report as packed: a header and three times 4 + 1 bytes."""
GAVE_UP_PAGES_MAX: Final = 1 << 16
"""Pages given up by one message: an answer to Evict or to a thin pool's Flush (for more the client
asks again), or a mirrored report of evicted pages (a mirror that gives up more reports it in
several, each with the words as they were moved on for it)."""
LIVE_REQUESTS_MAX: Final = 4_096
"""Requests in one part of a list of live ones."""
FDS_PER_FRAME_MAX: Final = 250

INSTANCE_CHARS_MAX: Final = 128
FINGERPRINT_BYTES_MAX: Final = 64 * KIB
REQUEST_CHARS_MAX: Final = 256
KEY_PART_CHARS_MAX: Final = 1024
NAMESPACES_MAX: Final = 65_536

PAGE_SIZE_MAX: Final = 4_096
POOL_PAGES_MAX: Final = 1 << 26
POOLS_MAX: Final = 1_024
"""Registrations at once; each rank of a group is one. Those that have ended count until nothing of
them is left."""
RANKS_PER_GROUP_MAX: Final = 64
GENERATIONS_KEPT_MAX: Final = 65_536
"""Instances whose last generation is remembered, those that live included."""
BUFFERS_PER_POOL_MAX: Final = 4_096
SEGMENTS_MAX: Final = 1 << 16
SLOTS_PER_SEGMENT_MAX: Final = 1 << 16

LEASES_PER_POOL_MAX: Final = 65_536
CLOSED_A_STEP_MAX: Final = 64
"""Leases, and nodes of the tree, that one event takes from pools that have ended."""
BACKUPS_IN_FLIGHT_MAX: Final = 64
BACKUPS_PENDING_MAX: Final = 262_144
BACKUPS_LOOKED_AT_MAX: Final = 64
"""Wishes that come to nothing, in one event, while the end of a backup will see to the others."""
ENDED_WISHES_LOOKED_AT_MAX: Final = 512
"""The same while the next step of a pool's end will: half a millisecond, and those of pools that
live are not behind more steps than that takes."""
RESTORES_PER_POOL_MAX: Final = 1_024
LANDING_COUNTERS_MAX: Final = 1_024
"""Landing counters of one pool; each serves one load at a time."""
LANDING_VALUE_MAX: Final = (1 << 63) - 1
"""Highest value of a landing counter: a waiting stream compares with a sign."""
BACKUP_PAGES_MAX: Final = 4_096
"""Pages of one backup; a longer node is split so that no single copy holds the queue long."""

JOURNAL_TOKENS_BYTES_MAX: Final = 64 * KIB
"""Tokens in one record of the host tier's journal (a single page's where those are more): what
one damaged place can cost."""
JOURNAL_RECORD_BYTES_MAX: Final = 256 * KIB
"""One record. A reader looks no further for its end."""
JOURNAL_SPACE_AGAIN_BYTES: Final = 64 * KIB
"""A namespace in use is named again in the log after so much, so that no damage to one record
costs all of its pages."""
JOURNAL_COMPACT_BYTES_MIN: Final = 4 * MIB
"""A log is not worth compacting before; above, it is once it is twice what was left last time."""
JOURNAL_COMPACT_NODES_A_STEP: Final = 32
JOURNAL_COMPACT_BYTES_A_STEP: Final = 64 * KIB
"""What one event does at most for a compaction (and one record more)."""

KV_EVENTS_SCHEDULERS_MAX: Final = 64
"""Addresses for KV events: one an instance; that of a dead one is given to another when needed."""
KV_EVENTS_RECORDS_MAX: Final = 65_536
"""Changes that wait for the publisher of KV events; beyond, they are dropped, all is told anew."""
KV_EVENTS_QUEUE_BYTES_MAX: Final = 64 * MIB
"""Tokens of those changes."""
KV_EVENTS_RECORDS_A_MESSAGE: Final = 64
KV_EVENTS_MESSAGE_BYTES: Final = 64 * KIB
"""A message to the publisher is closed at so much (and a record more)."""
KV_EVENTS_MESSAGES_QUEUED: Final = 256
"""Messages in each of the two queues between daemon and publisher."""
KV_EVENTS_NODES_A_STEP: Final = 32
"""Nodes that one turn of the loop tells of while everything is told anew."""
KV_EVENTS_BATCH_PAGES: Final = 4_096
"""Pages of one batch of KV events that is sent live."""
KV_EVENTS_REPLAY_BATCHES_MAX: Final = 10_000
KV_EVENTS_REPLAY_BYTES_MAX: Final = 64 * MIB
"""Batches of one stream that are kept for those who missed some."""

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
DEVICE_DEADLINE_MS: Final = 10_000
"""One slice of a copy at the device, which takes milliseconds: the device hangs."""
COPY_WAIT_MS_MAX: Final = 5_000
"""A copy waits so long for a mover that serves; nothing of it was touched when it is given up."""
CALL_DEADLINE_MS: Final = 2_000
RESEND_AFTER_MS: Final = 200
MOVER_START_MS_MAX: Final = 60_000
"""Silence of a mover that starts, or maps or unmaps memory: one driver call may take seconds."""
MOVER_SILENCE_MS_MAX: Final = 1_200
"""Silence of a mover that has copies to do; between two slices of them it answers."""
MOVER_PING_AFTER_MS: Final = 250

assert TOKENS_BYTES_MAX + PAGES_BYTES_MAX + ENVELOPE_BYTES_MAX <= MESSAGE_BYTES_MAX
assert 8 * PROMPT_PAGES_MAX <= TOKENS_BYTES_MAX, "so long a prompt fits, with 64-bit ids as well"
assert 2 * PAGES_BYTES_MAX + ENVELOPE_BYTES_MAX <= MESSAGE_BYTES_MAX, "canonical and duplicates"
assert (
    GAVE_UP_PAGES_MAX * (PAGE_NUMBER_BYTES + WORD_BYTES_MAX) + ENVELOPE_BYTES_MAX
    <= MESSAGE_BYTES_MAX
), "every page given up may have a word of its own"
assert (
    GAVE_UP_PAGES_MAX * (RUN_BYTES_MAX + WORD_BYTES_MAX) + ENVELOPE_BYTES_MAX <= MESSAGE_BYTES_MAX
), "every page reported as given up may be a run of its own, with a word of its own"
assert LIVE_REQUESTS_MAX * (4 * REQUEST_CHARS_MAX + 16) + ENVELOPE_BYTES_MAX <= MESSAGE_BYTES_MAX, (
    "names of four bytes a character, with their attempts"
)
assert KEPT_ANSWERS_MAX >= UNACKED_MESSAGES_MAX
assert KEPT_ANSWERS_BYTES_MAX >= MESSAGE_BYTES_MAX, "the answer that is kept now stays"
assert MOVER_PING_AFTER_MS < MOVER_SILENCE_MS_MAX < MOVER_START_MS_MAX
assert GROUP_LAG_BYTES_MAX >= MESSAGE_BYTES_MAX
assert LANDING_COUNTERS_MAX <= RESTORES_PER_POOL_MAX, "more loads are never under way"
assert GENERATIONS_KEPT_MAX > POOLS_MAX, "a live instance keeps its generation"
assert MOVER_SILENCE_MS_MAX < FENCE_DEADLINE_MS < DEVICE_DEADLINE_MS
assert RESEND_AFTER_MS < CALL_DEADLINE_MS < FENCE_DEADLINE_MS
assert 16 * PAGE_SIZE_MAX <= JOURNAL_TOKENS_BYTES_MAX, "a page of pairs of 64-bit ids"
assert (
    2 * JOURNAL_TOKENS_BYTES_MAX + FINGERPRINT_BYTES_MAX + 12 * KEY_PART_CHARS_MAX
    <= JOURNAL_RECORD_BYTES_MAX
), "at page size 1 a slot takes as much as a token; a namespace fits as well"
assert SEGMENTS_MAX * SLOTS_PER_SEGMENT_MAX <= 1 << 32, "a host slot id is 32 bits"
assert KV_EVENTS_RECORDS_A_MESSAGE < KV_EVENTS_RECORDS_MAX
assert KV_EVENTS_MESSAGE_BYTES < KV_EVENTS_QUEUE_BYTES_MAX
