"""Settings shared by every test: hypothesis profiles and the order in which slow tests run.

Owns nothing but these settings. Fixtures live beside the tests that use them, so that a reader
never has to look in more than one folder.
"""

import os

import pytest
from hypothesis import HealthCheck, settings

# A time limit per example says more about the machine than about the code. In CI the examples are
# the same on every run, so that a red run can be repeated; elsewhere each run tries new ones.
settings.register_profile(
    "local",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "ci", settings.get_profile("local"), derandomize=True, database=None, max_examples=200
)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests last: the quick ones find most mistakes. Simulation and storm are left out of
    the coverage, for a tracer makes them several times slower."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
    for item in items:
        if item.path.parent.name in ("simulation", "storm"):
            item.add_marker(pytest.mark.no_cover)
