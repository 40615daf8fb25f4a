"""Deterministic simulation of a whole node without a socket, a real clock or a GPU.

Real code: Directory, Endpoint, ReceiveStream, SendStream, DaemonClient, Mirror, SpanTable,
PageAllocator, Engine with its planner. Simulated: time (`heap`), network, the mover's device, the
scheduler's GPU (`streams`), memory, the daemon's shell (`daemon`, `mover`), scheduler processes
(`process`, `restoring`, `scheduler`). docs/simulation.md tells how it works.

Seams for deliberate bugs. Every name below is looked up at each call, so a test replaces it on its
class or module (pytest's `monkeypatch.setattr`), then runs `Simulation(draw(seed)).run()` and reads
`Result.checker`. A run keeps nothing in modules, so undoing the replacement is enough.

- core: `Tree.split/merge/retire/lose/lock/find_space`, `pool.insert_pages/evict_pages`,
  `pool._held_prefix/_check_insert`, `LeaseTable.claim/release`, `HostSlots.reserve/release`,
  `Transfers.doom/evict_host/_begin_restore/_finish_backup`, `Guard.written/source`, `Registry`.
  Functions that other modules import by name are replaced in the importing module.
- protocol: `ReceiveStream.arrive/again`, `SendStream.due/on_reply`, `Endpoint._attach/close_pool`,
  `DaemonClient._release_late/_take`.
- transfer: `engine.pending`, `engine.mismatched` (names in `transfer.engine`),
  `Engine._words_hold/_settle/_start/submit/release_pool`.
- shim: `SpanTable.give_up/give_up_all/allocate`, `Mirror.evict/flush/insert`.
- fences as a scheduler takes them: `ModelScheduler.written` (source), `Restoring.quiet` (target).
- processes: `Process.look_for_loss` (quarantine), `Simulation.movers_of_earlier_boots_live` (a boot
  waits for orphans), `SimDaemon.still_touched` (a registration waits for the mover to let go),
  `SimDaemon.lose_mover` (told when it is dead).
- journal: `HostJournal.invalidate/give_up/_step`, `find` (name in `directory.core.directory`),
  `Builder._parent`, `Kept.check/_must_be_invalid` (the claims about the journal itself).
"""
