"""Every page is in exactly one state, and the check finds any that is not."""

from __future__ import annotations

import pytest

from scheduler_svc.scheduler.page_ledger import LedgerError, PageLedger


def counts(ledger: PageLedger) -> tuple[int, int, int, int]:
    return ledger.num_free, ledger.num_owned, ledger.num_cached, ledger.num_quarantined


def test_a_page_without_a_step_in_flight_is_free_at_once() -> None:
    ledger = PageLedger(4)
    pages = ledger.take(3)
    assert counts(ledger) == (1, 3, 0, 0)
    ledger.check([pages], [])
    for page in pages:
        ledger.give_back(page, None)
    assert counts(ledger) == (4, 0, 0, 0)
    ledger.check([], [])


def test_pages_wait_in_quarantine_for_the_last_step_that_may_write_them() -> None:
    ledger = PageLedger(2)
    first, second = ledger.take(2)
    ledger.retire(6)
    ledger.give_back(first, 8)
    ledger.give_back(second, 7)
    assert counts(ledger) == (0, 0, 0, 2)
    assert ledger.num_available == 0
    ledger.check([], [])
    ledger.retire(7)
    assert ledger.take(1) == [second]
    ledger.retire(8)
    assert ledger.take(1) == [first]


def test_a_step_that_has_retired_needs_no_quarantine() -> None:
    ledger = PageLedger(1)
    (page,) = ledger.take(1)
    ledger.retire(5)
    ledger.give_back(page, 5)
    assert counts(ledger) == (1, 0, 0, 0)


def test_cached_pages_are_shared_and_counted_once() -> None:
    ledger = PageLedger(3)
    pages = ledger.take(2)
    ledger.enter_cache(pages[0])
    ledger.share(pages[0])
    ledger.check([pages, pages[:1]], pages[:1])
    assert counts(ledger) == (1, 2, 0, 0)
    ledger.give_back(pages[0], None)
    ledger.give_back(pages[0], 99)  # complete pages need no quarantine
    assert counts(ledger) == (1, 1, 1, 0)
    assert ledger.num_available == 2
    ledger.share(pages[0])
    assert counts(ledger) == (1, 2, 0, 0)
    ledger.give_back(pages[0], None)
    ledger.leave_cache(pages[0])
    assert counts(ledger) == (2, 1, 0, 0)


def test_misuse_is_refused() -> None:
    ledger = PageLedger(2)
    (page,) = ledger.take(1)
    with pytest.raises(LedgerError, match="2 pages wanted, 1 free"):
        ledger.take(2)
    with pytest.raises(LedgerError, match="private"):
        ledger.share(page)
    ledger.enter_cache(page)
    with pytest.raises(LedgerError, match="cannot leave"):
        ledger.leave_cache(page)
    with pytest.raises(LedgerError, match="cannot enter"):
        ledger.enter_cache(page)
    ledger.give_back(page, None)
    with pytest.raises(LedgerError, match="nobody holds it"):
        ledger.give_back(page, None)


def test_the_check_finds_what_does_not_add_up() -> None:
    ledger = PageLedger(3)
    pages = ledger.take(2)
    with pytest.raises(LedgerError, match="in no state"):
        ledger.check([pages[:1]], [])
    with pytest.raises(LedgerError, match="holders"):
        ledger.check([pages, pages], [])
    with pytest.raises(LedgerError, match="one account only"):
        ledger.check([pages], pages[:1])
    free = ({0, 1, 2} - set(pages)).pop()
    with pytest.raises(LedgerError, match="free and owned"):
        ledger.check([pages, [free]], [])
