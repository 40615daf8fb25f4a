"""Fixtures of the tests that run real SGLang, and which of them run where.

Two kinds of tests live below this folder. Those marked `sglang` import SGLang and run inside one
of its environments, with the stand-ins on the path; those marked `engines` start engines as
processes and run in the project's environment. Each kind is skipped in the other's place.
"""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sglang import environments, model
from tests.sglang.engines import Nursery
from tests.sglang.node import Node
from tests.sglang.oracle import Oracle

INSIDE = importlib.util.find_spec("sglang") is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what cannot run here; a run that asks for engines by name must not skip them."""
    missing = [version for version in environments.VERSIONS if not environments.ready(version)]
    if INSIDE:
        reason = "starts engines from outside of SGLang's environments"
    elif missing:
        reason = f"no environment for SGLang {', '.join(missing)}: make sglang-envs"
    else:
        return
    expression = str(config.getoption("markexpr"))
    if not INSIDE and "engines" in expression and "not engines" not in expression:
        raise pytest.UsageError(reason)
    for item in items:
        if item.get_closest_marker("engines") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def nursery(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Nursery]]:
    """The nursery of a version. All that will be wanted start together: it takes them a while."""
    folder = tmp_path_factory.mktemp("nurseries")
    names = [item.nodeid for item in request.session.items]
    started: dict[str, Nursery] = {
        version: Nursery(version, folder)
        for version in environments.VERSIONS
        if any(version in name for name in names)
    }

    def of(version: str) -> Nursery:
        if version not in started:
            started[version] = Nursery(version, folder)
        return started[version]

    yield of
    for one in started.values():
        one.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models: `one` and `two` of the same shape, an adapter for them, and `latent`,
    whose pool is of the other kind."""
    folder = tmp_path_factory.mktemp("models")
    model.llama(folder / "one")
    model.llama(folder / "two", seed=1)
    model.deepseek(folder / "latent")
    model.adapter(folder / "adapter")
    return folder


@pytest.fixture(scope="session")
def oracle(
    nursery: Callable[[str], Nursery], models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Oracle]:
    """What stock engines without any cache answer."""
    found = Oracle(nursery, models, tmp_path_factory.mktemp("oracle"))
    yield found
    found.close()


@pytest.fixture
def node(nursery: Callable[[str], Nursery], models: Path, tmp_path: Path) -> Iterator[Node]:
    """A daemon of the test's own, with model `one`."""
    with Node(tmp_path, nursery, models / "one") as made:
        yield made
