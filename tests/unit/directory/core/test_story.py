"""Stories: bounded, oldest first."""

from directory.core.story import Story


def test_a_story_keeps_only_its_last_lines() -> None:
    story = Story(lines_max=3)
    for number in range(5):
        story.add("event", number)
    assert len(story) == 3
    assert story.tell() == "event 2\nevent 3\nevent 4"
