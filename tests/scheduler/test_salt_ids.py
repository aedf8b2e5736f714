"""Equal numbers only ever mean the same salt."""

from __future__ import annotations

from scheduler_svc.scheduler.salt_ids import SaltIds


def test_salts_have_numbers_of_their_own() -> None:
    salts = SaltIds()
    assert salts.id_of("") == 0
    first, second = salts.id_of("a"), salts.id_of("b")
    assert len({0, first, second}) == 3
    assert (salts.id_of("a"), salts.id_of("b"), salts.id_of("")) == (first, second, 0)


def test_a_forgotten_salt_never_gets_another_ones_number() -> None:
    salts = SaltIds(max_salts=2)
    first = salts.id_of("a")
    others = {salts.id_of(name) for name in "bc"}
    again = salts.id_of("a")
    assert again not in {0, first, *others}
    assert salts.id_of("c") in others  # used later than "b", which is forgotten now
