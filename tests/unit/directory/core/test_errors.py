"""The error tree and its codes."""

from directory.core.errors import StaleError, StaleNode, TreecoredError, error_classes


def test_every_error_class_has_a_code_of_its_own() -> None:
    classes = error_classes()
    found, queue = [], list(TreecoredError.__subclasses__())
    while queue:
        cls = queue.pop()
        if cls.__module__ == TreecoredError.__module__:
            found.append(cls)
            queue.extend(cls.__subclasses__())
    assert {cls.code: cls for cls in found} == {
        code: cls for code, cls in classes.items() if cls in found
    }
    assert len({cls.code for cls in found}) == len(found)


def test_a_class_is_found_by_the_code_that_travels() -> None:
    assert error_classes()["stale_node"] is StaleNode
    assert issubclass(StaleNode, StaleError)
