"""Memory that no chunk owns, counted to the byte, and foreseen."""

from __future__ import annotations

import gc

import torch
from torch import nn

from patrickstar.memory.live import LiveStorages, WatchOperators


class Watched:
    """What operators of a block do to live memory, and what was announced before each."""

    def __init__(self, managed: frozenset[int] = frozenset()) -> None:
        self.live = LiveStorages(lambda storage: storage in managed, "cpu")
        self.announced: list[int] = []
        self.after: list[int] = []
        self.mode = WatchOperators(self.live, self.announced.append, self.note)

    def note(self) -> None:
        self.after.append(self.live.nbytes)


def test_new_storages_are_counted_until_they_die() -> None:
    watched = Watched()
    with watched.mode:
        first = torch.ones(1000)
        second = first * 2
        assert watched.live.nbytes == 8000
        del first
        assert watched.live.nbytes == 4000
    del second
    gc.collect()
    assert watched.live.nbytes == 0


def test_views_and_in_place_changes_take_nothing() -> None:
    watched = Watched()
    with watched.mode:
        tensor = torch.ones(100, 10)
        view = tensor.t()[2:]
        tensor.add_(1)
        assert watched.live.nbytes == 4000
        del tensor
        assert watched.live.nbytes == 4000, "the view keeps the storage"
        del view
    assert watched.live.nbytes == 0


def test_what_an_operator_will_make_is_known_before_it_runs() -> None:
    watched = Watched()
    a, b = torch.ones(30, 40), torch.ones(40, 50)
    with watched.mode:
        c = a @ b
        c.relu_()
        d = torch.cat([c, c])
    assert watched.announced == [30 * 50 * 4, 0, 60 * 50 * 4]
    assert d.shape == (60, 50)


def test_managed_storages_are_not_counted() -> None:
    mine = torch.ones(1000)
    watched = Watched(frozenset({mine.untyped_storage()._cdata}))
    watched.live.add(mine)
    assert watched.live.nbytes == 0


def test_a_forward_and_backward_leave_what_they_leave() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    watched = Watched()
    with watched.mode:
        model(torch.ones(3, 10)).sum().backward()
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    gc.collect()
    assert watched.live.nbytes == gradients
    assert max(watched.after) > gradients


def test_watching_does_not_change_random_numbers() -> None:
    def draw() -> torch.Tensor:
        torch.manual_seed(3)
        x = nn.functional.dropout(torch.ones(1000), 0.5)
        return torch.cat([x, torch.rand(10), torch.randperm(10).float(), x.clone().normal_()])

    plain = draw()
    with Watched().mode:
        watched = draw()
    assert torch.equal(plain, watched)


def test_sizes_that_depend_on_data_are_estimated_by_what_goes_in() -> None:
    watched = Watched()
    x = torch.tensor([0.0, 1.0, 0.0, 2.0])
    with watched.mode:
        found = x.nonzero()
    assert found.tolist() == [[1], [3]]
    assert watched.announced == [x.nbytes]


def test_sparse_tensors_are_counted_by_their_indices_and_values() -> None:
    watched = Watched()
    indices, values = torch.tensor([[0, 2, 5]]), torch.ones(3, 8)
    with watched.mode:
        made = torch.sparse_coo_tensor(indices, values, (100, 8)) * 2
        assert watched.live.nbytes >= made._indices().nbytes + made._values().nbytes
        dense = made.to_dense()
    assert dense.nbytes == 3200
    assert 3200 in watched.announced
    del made, dense, indices, values
    gc.collect()
    assert watched.live.nbytes == 0


def test_data_that_operators_only_look_at_is_not_counted() -> None:
    data = torch.randn(100, 8)
    live = LiveStorages(lambda _: False, "cpu")
    with WatchOperators(live, lambda _: None, lambda: None):
        kept = [data[i].view(2, 4).t() for i in range(3)]
        kept[0].mul_(2)
        made = kept[1] + 1
    assert live.nbytes == made.nbytes
