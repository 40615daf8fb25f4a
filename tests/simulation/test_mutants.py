"""The deliberate bugs are found: each by its recorded seed, which is clean without the bug.

Strategy: one seed a mutant. A change of the simulation or of the core may lead a recorded seed
elsewhere; then the first seeds are tried, so many as are promised. A mutant that they do not find
is a missing checker.
"""

from __future__ import annotations

import pytest

from directory.core.tree import Tree
from tests.simulation.mutants import (
    BY_NAME,
    DOCUMENT,
    MUTANTS,
    Kill,
    UncleanSeed,
    documented,
    hunt,
    main,
    recorded,
    table,
)
from tests.simulation.mutants_seams import (
    BrokenMutant,
    Call,
    Mutant,
    Patch,
    SeamGone,
    planted,
)

SEEDS_PROMISED = 80


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", list(BY_NAME))
def test_a_mutant_is_found_and_its_seed_is_clean_without_it(name: str) -> None:
    mutant = BY_NAME[name]
    kill = hunt(mutant, [recorded()[name].seed, *range(SEEDS_PROMISED)])
    assert kill is not None, f"no checker sees that {mutant.what}"


def test_every_mutant_is_recorded_within_the_seeds_promised() -> None:
    known = recorded()
    assert known.keys() == BY_NAME.keys()
    assert len(BY_NAME) == len(MUTANTS) >= 15
    assert max(kill.seeds for kill in known.values()) <= SEEDS_PROMISED


def test_the_document_has_the_table_of_the_record() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert documented(text, recorded().values()) == text, "run the mutants with --write"


def test_a_bug_that_is_none_survives_its_seeds() -> None:
    assert hunt(Mutant("nothing", "nothing is wrong", ()), range(1)) is None


def test_a_seed_that_fails_without_the_bug_is_not_taken_for_found() -> None:
    bug = BY_NAME["split-loses-a-lease"].patches
    with pytest.raises(UncleanSeed, match="nothing, seed 0, without the bug: "):
        hunt(Mutant("nothing", "the world is wrong already", (), world=bug), range(1))


def test_a_survivor_is_named_and_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(BY_NAME, "nothing", Mutant("nothing", "nothing is wrong", ()))
    assert main(["--only", "nothing", "--seeds-max", "1"]) == 1
    said = capsys.readouterr().out
    assert "nothing SURVIVED 1 seeds: nothing is wrong" in said
    assert "survivors: ['nothing']" in said


def test_a_seam_that_is_gone_is_an_error_and_not_a_survivor() -> None:
    gone = Patch(Tree, "no_such_function", lambda original: original)
    with pytest.raises(SeamGone, match="no_such_function"):
        Mutant("gone", "", (gone,)).run(0)


def test_a_seam_with_other_parameters_is_an_error() -> None:
    def make(original: Call) -> Call:
        def split(self: Tree, node: object) -> None:
            """Takes one parameter less."""

        return split

    with pytest.raises(SeamGone, match=r"Tree\.split takes"):
        Mutant("other", "", (Patch(Tree, "split", make),)).run(0)


def test_a_mutant_that_stumbles_over_itself_is_not_taken_for_found() -> None:
    def make(original: Call) -> Call:
        def split(self: Tree, node: object, pages: int) -> object:
            return original(self, node, pages, "one too many")

        return split

    with pytest.raises(BrokenMutant, match="broken"):
        hunt(Mutant("broken", "", (Patch(Tree, "split", make),)), range(10))


def test_planted_bugs_are_taken_out_again() -> None:
    before = Tree.split
    with planted(BY_NAME["split-loses-a-lease"].patches):
        assert Tree.split is not before
    assert Tree.split is before


def test_the_table_stands_between_the_markers_and_leaves_the_rest() -> None:
    kill = Kill("split-loses-a-lease", 4, ("recount",))
    text = documented("# Page\n\nWords.\n", [kill])
    assert text.startswith("# Page\n\nWords.\n")
    assert "| recount | 5 |" in table([kill])
    assert documented(text + "More.\n", [kill]) == text + "More.\n"
