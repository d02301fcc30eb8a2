"""What an iteration computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from patrickstar.config import load_config
from patrickstar.engine.from_config import settings_from
from patrickstar.machine import Machine, Processor
from patrickstar.models import GPT, preset
from patrickstar.planning.rehearsed import Rehearsed, rehearse_run
from patrickstar.planning.timing import Measured, roofline


def rehearsed(provider: type[nn.Module] | None = None) -> Rehearsed:
    settings = settings_from(load_config({}))
    tokens = torch.zeros(2, 64, dtype=torch.long, device="meta")
    return rehearse_run(lambda: GPT(preset("gpt-tiny")), ((tokens, tokens), {}), settings)


RUN = rehearsed()
MACHINE = Machine(
    name="m",
    source="a test",
    processor=Processor(name="p", flops={"float32": 1e10}, copy_bytes_per_s=1e10),
)


def test_flops_are_six_for_every_weight_and_token_and_attention_beside() -> None:
    shape = preset("gpt-tiny")
    products = 12 * shape.layers * shape.width**2 + shape.vocabulary * shape.width
    attention = 2 * 2 * 64 * shape.width * shape.layers  # a token: scores and values
    tokens = 2 * 64
    # The backward of attention makes the scores again: 5 products for the forward's 2.
    expected = tokens * (3 * 2 * products + attention * 3.5)
    assert pytest.approx(expected, rel=0.01) == RUN.work.flops


def test_layers_that_are_alike_are_of_one_kind() -> None:
    deep = preset("gpt-tiny").layers
    linear = [kind for kind in RUN.work.kinds if "addmm" in str(kind.func)]
    assert all(sum(RUN.work.kinds[kind].values()) == deep for kind in linear)


def test_a_kind_is_measured_once_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "operators.json"
    kind = next(kind for kind in RUN.work.kinds if "addmm" in str(kind.func))

    def never(_: object) -> float:
        raise AssertionError("it can be measured")

    first = Measured(never, file, "key")
    took = first(kind)
    first.keep()
    assert 0 < took < 1
    assert Measured(never, file, "key")(kind) == took
    assert not Measured(never, file, "another")._known


def test_what_is_not_timed_is_as_far_from_its_bound_as_the_same_operator_was() -> None:
    first, second = [kind for kind in RUN.work.kinds if "addmm" in str(kind.func)][:2]
    measured = Measured(lambda kind: kind.flops * 1e-9, None, "key")
    took = measured(first)
    assert measured.guess(first) == took
    assert measured.guess(second) == pytest.approx(took * second.flops / first.flops)
    assert second.name not in measured._known


def test_no_operator_beats_the_roofline() -> None:
    bound = roofline(MACHINE)
    for kind in RUN.work.kinds:
        assert bound(kind) >= max(kind.flops, kind.nbytes) / 1e10


def test_every_update_is_read_and_written_once() -> None:
    # fp32: gradient in, weight and two moments in and out.
    padded = sum(RUN.sizes[chunk] // 4 for chunk in RUN.updates)
    assert RUN.update_bytes == padded * 4 * (1 + 2 * 3)
