"""Which chunk comes next is known from the iteration before, and from nothing else."""

from __future__ import annotations

from patrickstar.engine.gather_order import GatherOrder


def asked(order: GatherOrder, chunks: list[int], *, complete: bool = True) -> list[int | None]:
    """What is foreseen after each of `chunks` in one iteration."""
    order.begin("training")
    foreseen = [order.after(chunk) for chunk in chunks]
    order.end(complete=complete)
    return foreseen


def test_nothing_is_foreseen_in_a_first_iteration() -> None:
    assert asked(GatherOrder(), [1, 2, 3]) == [None, None, None]


def test_a_second_iteration_is_foreseen_from_the_first() -> None:
    order = GatherOrder()
    asked(order, [1, 2, 1, 3])
    assert asked(order, [1, 2, 1, 3]) == [2, 1, 3, None]


def test_an_iteration_that_departs_foresees_nothing_any_more() -> None:
    order = GatherOrder()
    asked(order, [1, 2, 3, 4])
    assert asked(order, [1, 9, 3, 4]) == [2, None, None, None]
    assert asked(order, [1, 2, 3, 4]) == [2, 3, 4, None]


def test_an_iteration_that_was_abandoned_is_no_model() -> None:
    order = GatherOrder()
    asked(order, [1, 2], complete=False)
    assert asked(order, [1, 2]) == [None, None]


def test_kinds_of_iterations_have_orders_of_their_own() -> None:
    order = GatherOrder()
    asked(order, [1, 2])
    assert not order.begin("evaluation")
    assert order.after(1) is None
