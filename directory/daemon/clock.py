"""The daemon's clock: the one place where the control process reads the time.

Owns nothing. The directory itself never reads it; time reaches it as a field of an event.
"""

import time


def now_us() -> int:
    """Monotonic microseconds."""
    return time.monotonic_ns() // 1000
