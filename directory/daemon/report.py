"""Reports for people who look after a daemon: what its pools are and hold.

Owns the wording of nothing and no state; it reads the directory's pools and must never change one.
"""

from directory.core.place import PoolState
from directory.protocol.admin import PoolReport


def pool_report(pool: PoolState) -> PoolReport:
    """One registration, with all of its ranks."""
    return PoolReport(
        pool=pool.place,
        instance=pool.instance,
        generation=pool.generation,
        mode=pool.mode,
        phase=str(pool.phase),
        ranks=sum(member != 0 for member in pool.members),
        world_size=len(pool.members),
        page_count=pool.page_count,
        pages=pool.pages,
        protected_pages=pool.locked_pages,
        leases=len(pool.leases),
        copies=len(pool.copies),
    )
