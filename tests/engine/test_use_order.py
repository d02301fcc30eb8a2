"""What is used next is known from the iteration before, and from nothing else."""

from __future__ import annotations

from patrickstar.engine.use_order import NEVER, Order, UseOrder


def run(order: UseOrder, groups: list[tuple[int, ...]], *, complete: bool = True) -> list[bool]:
    """Whether the rest is foreseen after each of `groups` in one iteration."""
    order.begin("training")
    foreseen = []
    for group in groups:
        order.note(group)
        foreseen.append(order.foreseen)
    order.end(complete=complete)
    return foreseen


def test_nothing_is_foreseen_in_a_first_iteration_and_all_of_it_in_the_second() -> None:
    order, groups = UseOrder(), [(1,), (2, 3), (1,)]
    assert run(order, groups) == [False, False, False]
    assert run(order, groups) == [True, True, True]


def test_an_iteration_that_departs_foresees_nothing_any_more_and_the_next_one_does() -> None:
    order = UseOrder()
    run(order, [(1,), (2,), (3,)])
    assert run(order, [(1,), (9,), (3,)]) == [True, False, False]
    assert run(order, [(1,), (2,), (3,)]) == [True, True, True]


def test_two_in_a_row_that_depart_are_what_is_expected_from_then_on() -> None:
    order = UseOrder()
    run(order, [(1,), (2,)])
    run(order, [(1,), (3,)])
    run(order, [(1,), (3,)])
    assert run(order, [(1,), (3,)]) == [True, True]


def test_an_iteration_that_ends_before_its_order_has_departed() -> None:
    order = UseOrder()
    run(order, [(1,), (2,)])
    run(order, [(1,)])
    run(order, [(1,)])
    order.begin("training")
    order.note((1,))
    assert list(order.coming()) == []


def test_an_iteration_that_was_abandoned_is_no_model() -> None:
    order = UseOrder()
    run(order, [(1,), (2,)], complete=False)
    assert run(order, [(1,), (2,)]) == [False, False]


def test_kinds_of_iterations_have_orders_of_their_own() -> None:
    order = UseOrder()
    run(order, [(1,), (2,)])
    assert not order.begin("evaluation")


def test_next_uses_are_counted_from_a_place() -> None:
    order = Order()
    for group in [(1,), (2, 3), (1,)]:
        order.add(group)
    assert [order.next_use(1, place) for place in (-1, 0, 1, 2)] == [0, 2, 2, NEVER]
    assert order.next_use(3, 0) == 1
