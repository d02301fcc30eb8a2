"""The GPT: what it computes, how it starts, what it refuses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from patrickstar.models import GPT, GPTConfig

SMALL = GPTConfig(layers=2, width=32, heads=4, positions=16)


def build(**changes: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(dataclasses.replace(SMALL, **changes))


def tokens(batch: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(1))


def test_the_loss_is_the_fp32_cross_entropy_of_the_logits() -> None:
    model = build().bfloat16()
    inputs, targets = tokens()[:, :-1], tokens()[:, 1:]
    logits = model(inputs)
    loss = model(inputs, targets)
    assert logits.shape == (2, 8, 256) and logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert torch.equal(loss, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()))


def test_no_position_sees_what_comes_after_it() -> None:
    model = build()
    before = tokens()
    after = before.clone()
    after[:, 5:] = 255 - after[:, 5:]
    assert torch.equal(model(before)[:, :5], model(after)[:, :5])
    assert not torch.equal(model(before)[:, 5:], model(after)[:, 5:])


def test_a_fresh_model_guesses_evenly() -> None:
    inputs = tokens()
    loss = build()(inputs[:, :-1], inputs[:, 1:])
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_the_head_is_the_token_embedding() -> None:
    model = build()
    assert model.head.weight is model.tokens.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_layers_that_write_into_the_residual_stream_start_smaller() -> None:
    model = build(layers=8, width=128)
    block = model.blocks[0]
    assert block.mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert block.attention.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert not block.mlp.down.bias.any()


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_checkpointing_changes_no_gradient(mode: str) -> None:
    inputs, targets = tokens()[:, :-1], tokens()[:, 1:]
    plain, recomputed = build(), build(checkpointing=mode)
    for model in (plain, recomputed):
        model(inputs, targets).backward()
    for ours, theirs in zip(recomputed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_checkpointing_keeps_fewer_activations() -> None:
    def kept(model: GPT) -> int:
        bytes_kept = 0

        def pack(saved: torch.Tensor) -> torch.Tensor:
            nonlocal bytes_kept
            bytes_kept += saved.nbytes
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            model(tokens()[:, :-1], tokens()[:, 1:])
        return bytes_kept

    assert kept(build(checkpointing="non-reentrant")) < kept(build()) / 2


def test_a_sequence_longer_than_the_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="17 tokens is longer than the model's 16 positions"):
        build()(tokens(length=17))


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"layers": 0}, "layers is 0"),
        ({"width": 30}, "multiple of the number of heads"),
        ({"checkpointing": "full"}, "'full'"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(SMALL, **changes)
