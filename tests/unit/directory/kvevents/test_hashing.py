"""Hashes against what a real SGLang 0.5.23 published (captured from its socket)."""

from array import array

from directory.kvevents.hashing import chain, published, seed

PAGE = 16
TOKENS = [*range(10, 80), *range(100, 126)]
PUBLISHED = [
    -566699301931663091,
    -7644183375079679766,
    -3736555478254321870,
    -1950107955434560300,
    3361931784405102192,
    -2946977548518180863,
]
SALTED = [-7622451296689985740, -2327907742308681343, 5973515840547768411]


def hashes(tokens: list[int], parent: bytes) -> list[int]:
    """The published hashes of a prompt's pages."""
    packed = array("I", tokens).tobytes()
    return [published(digest) for digest in chain(parent, packed, 4 * PAGE)]


def test_hashes_are_those_that_sglang_published() -> None:
    assert hashes(TOKENS, seed(None)) == PUBLISHED


def test_a_salt_is_in_the_hash_as_sglang_has_it() -> None:
    assert hashes(TOKENS[:48], seed("tenantA")) == SALTED


def test_a_chain_goes_on_from_its_parents_whole_digest() -> None:
    packed = array("I", TOKENS).tobytes()
    whole = chain(b"", packed, 4 * PAGE)
    assert chain(whole[1], packed[8 * PAGE :], 4 * PAGE) == whole[2:]


def test_pages_of_an_adapter_never_pass_for_the_models_own() -> None:
    seeds = {seed(None), seed("s"), seed("")}
    seeds |= {seed(None, ("a", 1)), seed(None, ("a", 2)), seed("s", ("a", 1)), seed(None, ("b", 1))}
    assert len(seeds) == 7
