"""The lease as a state machine: every test plays a conversation between a cell and the shared store on a clock of its own."""

from __future__ import annotations

import random

import pytest

from turngate.gateway.cell.lease import CLOCK_DRIFT, Lease

TTL = 30.0
EARLY = TTL * CLOCK_DRIFT


def register(lease: Lease, sent: float) -> None:
    lease.confirm(lease.send(sent))


def test_the_deadline_counts_from_before_the_request_was_sent() -> None:
    lease = Lease("a", TTL)
    assert lease.state(0) == "waiting"
    request = lease.send(100.0)
    lease.confirm(request)  # answered at 112, say: the answer's way does not count
    assert lease.deadline == 130.0 - EARLY
    assert lease.state(129.0) == "held"
    assert lease.state(129.5) == "lapsed"


def test_a_lapsed_lease_that_was_not_taken_over_is_held_again_after_a_renewal() -> None:
    lease = Lease("a", TTL)
    register(lease, 0.0)
    assert lease.state(50.0) == "lapsed"
    register(lease, 50.0)
    assert lease.state(51.0) == "held"


def test_a_lost_lease_stays_lost_until_the_cell_starts_over() -> None:
    lease = Lease("a", TTL)
    register(lease, 0.0)
    late = lease.send(20.0)
    lease.lose(lease.send(40.0))
    assert lease.state(41.0) == "lost"
    lease.confirm(late)  # an answer that was on its way
    assert lease.state(41.0) == "lost"
    lease.start_over("b", 42.0)
    assert (lease.state(42.0), lease.registered, lease.next_request()) == ("waiting", False, 42.0)
    lease.confirm(late)  # an answer to the old id does not extend the new one
    lease.lose(late)
    assert lease.state(42.0) == "waiting"
    register(lease, 43.0)
    assert lease.state(44.0) == "held"


def test_answers_out_of_order_never_shorten_a_lease() -> None:
    lease = Lease("a", TTL)
    first, second = lease.send(0.0), lease.send(10.0)
    lease.confirm(second)
    lease.confirm(first)
    assert lease.deadline == 40.0 - EARLY


@pytest.mark.parametrize(("failures", "longest"), [(1, 0.3), (5, 0.3), (6, 1.1), (50, 1.1)])
def test_requests_are_repeated_soon_while_the_shared_store_is_away(failures: int, longest: float) -> None:
    lease = Lease("a", TTL)
    register(lease, 0.0)
    assert lease.next_request() == TTL / 3
    for _ in range(failures):
        lease.fail(20.0)
    assert 0 < lease.next_request() - 20.0 <= longest
    register(lease, 25.0)
    assert lease.next_request() == 35.0


def test_a_failed_request_does_not_extend_the_deadline() -> None:
    lease = Lease("a", TTL)
    register(lease, 0.0)
    lease.send(10.0)
    lease.fail(12.0)
    assert lease.state(29.9) == "lapsed"


@pytest.mark.parametrize("seed", range(20))
def test_the_cell_never_serves_after_the_shared_store_lets_another_take_over(seed: int) -> None:
    """Random delays, losses and pauses, and a clock of the cell that runs up to 1 % slow."""
    chance = random.Random(seed)
    speed = chance.uniform(0.99, 1.01)  # of the cell's clock
    lease, now, lease_until, taken = Lease("a", TTL), 0.0, -1.0, False
    for _ in range(400):
        now += chance.choice([0.1, 1.0, 5.0, 40.0])
        if now > lease_until and lease.registered and chance.random() < 0.5:
            taken = True
        if taken:
            assert lease.state(now * speed) != "held"
        sent = lease.send(now * speed)
        now += chance.choice([0.0, 0.05, 2.0, 35.0])  # on the way there
        if chance.random() < 0.3:
            lease.fail(now * speed)
            continue
        if taken:
            lease.lose(sent)
            lease.start_over(f"{now}", now * speed)
            taken, lease_until = False, -1.0
            continue
        lease_until = now + TTL
        now += chance.choice([0.0, 0.05, 2.0, 35.0])  # on the way back
        if now > lease_until and chance.random() < 0.5:
            taken = True
        if chance.random() < 0.8:
            lease.confirm(sent)
        else:
            lease.fail(now * speed)
        if taken:
            assert lease.state(now * speed) != "held"
