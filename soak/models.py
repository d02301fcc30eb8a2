"""Models of many kinds and sizes, drawn at random, with batches for them.

A model is described by plain values (`Spec`), so that a failure can be repeated from what is
written down of it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from patrickstar.models import GPT, GPTConfig

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Spec:
    """One model and its data.

    Attributes:
        kind: a key of `MODELS`.
        width, depth: its size, whatever these mean for the kind.
        batch, length: of its data.
        option: what else the kind knows.
    """

    kind: str
    width: int
    depth: int
    batch: int
    length: int = 16
    option: str = ""

    def build(self) -> nn.Module:
        module: nn.Module = MODELS[self.kind](self)
        return module

    def batches(self, count: int, seed: int = 3) -> list[Batch]:
        draw = torch.Generator().manual_seed(seed)
        if self.kind == "gpt":
            shape = (self.batch, self.length + 1)
            made = [torch.randint(0, 256, shape, generator=draw) for _ in range(count)]
            return [
                {"tokens": t[:, :-1].contiguous(), "targets": t[:, 1:].contiguous()} for t in made
            ]
        if self.kind in ("table", "recurrent"):
            shape = (self.batch, self.length)
            return [{"x": torch.randint(0, 200, shape, generator=draw)} for _ in range(count)]
        if self.kind == "images":
            shape4 = (self.batch, 3, self.length, self.length)
            return [{"x": torch.randn(shape4, generator=draw)} for _ in range(count)]
        shape3 = (self.batch, self.length, self.width)
        return [{"x": torch.randn(shape3, generator=draw)} for _ in range(count)]


class Layers(nn.Module):
    """Linear layers of unequal width, some of them frozen or used twice."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        wide = spec.width * 3 + 5
        self.up = nn.ModuleList(nn.Linear(spec.width, wide) for _ in range(spec.depth))
        self.down = nn.ModuleList(nn.Linear(wide, spec.width) for _ in range(spec.depth))
        if spec.option == "frozen":
            for layer in self.up:
                layer.requires_grad_(False)
        if spec.option == "tied":
            self.down[-1].weight = self.down[0].weight
        if spec.option == "unused":
            self.unused = nn.Linear(spec.width, spec.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.tanh(up(x)))
        return x.float().square().mean()


class Images(nn.Module):
    """Convolutions with batch norms, whose statistics are buffers that change."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for _ in range(spec.depth):
            layers += [nn.Conv2d(channels, spec.width, 3, padding=1), nn.BatchNorm2d(spec.width)]
            layers += [nn.ReLU(inplace=spec.option == "in place")]
            channels = spec.width
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(spec.width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean((2, 3))).float().square().mean()


class Encoder(nn.Module):
    """PyTorch's own transformer layers, with dropout."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            spec.width, 4, 2 * spec.width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, spec.depth, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().square().mean()


class Table(nn.Module):
    """An embedding far larger than the rest."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.table = nn.Embedding(200 * spec.depth, spec.width)
        self.head = nn.Linear(spec.width, spec.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x)).float().square().mean()


class Recurrent(nn.Module):
    """One cell that is used at every place of a sequence."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.table = nn.Embedding(200, spec.width)
        self.cells = nn.ModuleList(
            nn.GRUCell(spec.width, spec.width) for _ in range(min(spec.depth, 3))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = self.table(x)
        for cell in self.cells:
            state, out = torch.zeros_like(values[:, 0]), []
            for place in range(values.shape[1]):
                state = cell(values[:, place], state)
                out.append(state)
            values = torch.stack(out, 1)
        return values.float().square().mean()


class Experts(nn.Module):
    """Every row goes to the expert that its values choose, so the path depends on the data."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.router = nn.Linear(spec.width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(spec.width, 2 * spec.width),
                nn.GELU(),
                nn.Linear(2 * spec.width, spec.width),
            )
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        share = self.router(rows).float().softmax(-1)
        chosen, out = share.argmax(-1), torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().flatten()
            if mine.numel():
                weight = share[mine, number].unsqueeze(-1).to(rows.dtype)
                out = out.index_add(0, mine, weight * expert(rows[mine]))
        return (rows + out).float().square().mean()


def _gpt(spec: Spec) -> nn.Module:
    mode: Any = spec.option if spec.option in _OPTIONS["gpt"][1:] else None
    return GPT(GPTConfig(spec.depth, spec.width, 4, positions=spec.length, checkpointing=mode))


MODELS: dict[str, Any] = {
    "layers": Layers,
    "images": Images,
    "encoder": Encoder,
    "table": Table,
    "recurrent": Recurrent,
    "experts": Experts,
    "gpt": _gpt,
}
_OPTIONS = {
    "layers": ("", "frozen", "tied", "unused"),
    "images": ("", "in place"),
    "gpt": ("", "reentrant", "non-reentrant"),
}


def draw_spec(draw: random.Random, *, large: bool = False) -> Spec:
    """Any model; a large one has hundreds of MiB of state."""
    if large:
        kind = draw.choice(["encoder", "gpt", "layers"])
        return Spec(kind, 512, draw.randint(6, 12), 1, draw.choice([16, 64]))
    kind = draw.choice(sorted(MODELS))
    option = draw.choice(_OPTIONS.get(kind, ("",)))
    if kind == "images":
        return Spec(kind, draw.choice([16, 48, 96]), draw.randint(1, 5), 2, 16, option)
    width = 4 * draw.randint(8, 80)
    batch, length = draw.randint(1, 6), draw.choice([1, 7, 16, 33, 64])
    if kind == "table":
        return Spec(kind, width, draw.choice([1, 20, 100]), batch, length, option)
    if kind == "recurrent":
        length = min(length, 16)
    return Spec(kind, width, draw.randint(1, 6), batch, length, option)
