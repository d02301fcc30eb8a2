"""A GPT-2-like language model in one readable file.

Pre-norm blocks, learned positions, a head tied to the token embedding, causal attention through
`scaled_dot_product_attention`, a GELU MLP four times as wide as the model. It is an ordinary
`nn.Module` that knows nothing of chunks: the command line trains it, the benchmarks measure it, and
it shows that a model needs no change to be trained by the engine. Initialisation is GPT-2's
(Radford et al. 2019, section 2.3): normal with deviation 0.02, and the layers that write into the
residual stream divided by the square root of their number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Checkpointing = Literal["reentrant", "non-reentrant"]


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    Attributes:
        layers: number of blocks.
        width: size of the residual stream; a multiple of `heads`.
        heads: attention heads of every block.
        vocabulary: number of token ids.
        positions: longest sequence, in tokens.
        init_std: deviation of the initial weights.
        checkpointing: recompute every block in the backward instead of keeping its activations,
            with `torch.utils.checkpoint` in the mode named; None keeps them.

    Raises:
        ValueError: a size is not positive, or `width` is no multiple of `heads`.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int = 256
    positions: int = 512
    init_std: float = 0.02
    checkpointing: Checkpointing | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "vocabulary", "positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"GPTConfig.{name} is {getattr(self, name)}; it must be positive")
        if self.width % self.heads:
            raise ValueError(
                f"GPTConfig.width is {self.width}, which {self.heads} heads cannot share; "
                "choose a multiple of the number of heads"
            )
        if self.checkpointing not in (None, "reentrant", "non-reentrant"):
            raise ValueError(
                f"GPTConfig.checkpointing is {self.checkpointing!r}; use None, 'reentrant' or "
                "'non-reentrant'"
            )


class ResidualProjection(nn.Linear):
    """A linear layer whose output is added to the residual stream; it starts smaller."""


class Attention(nn.Module):
    """Causal self-attention of [batch, length, width]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = ResidualProjection(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, head width]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return projected


class Mlp(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = ResidualProjection(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.down(F.gelu(self.up(x)))
        return projected


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = Mlp(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """The language model of `config`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.positions, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        if module is self.head:
            return  # its weight is the token embedding's
        if isinstance(module, nn.Linear | nn.Embedding):
            std = self.config.init_std
            if isinstance(module, ResidualProjection):
                std /= math.sqrt(2 * self.config.layers)
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Predict the next tokens.

        Args:
            tokens: int64 [batch, length], length at most `config.positions`.
            targets: int64 [batch, length], the token after each of `tokens`; -100 is ignored.

        Returns:
            the mean cross entropy in fp32, a scalar; without targets the logits
            [batch, length, vocabulary] in the training precision.

        Raises:
            ValueError: a sequence is longer than `config.positions`.
        """
        length = tokens.shape[1]
        if length > self.config.positions:
            raise ValueError(
                f"a sequence of {length} tokens is longer than the model's "
                f"{self.config.positions} positions; shorten it or build a model with more"
            )
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = self._run(block, x)
        logits: torch.Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def _run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        mode = self.config.checkpointing
        out: torch.Tensor = (
            block(x) if mode is None else checkpoint(block, x, use_reentrant=mode == "reentrant")
        )
        return out
