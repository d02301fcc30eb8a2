"""Where a run computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from patrickstar.engine.device import device_named, move_unmanaged
from patrickstar.errors import ConfigError

needs_none = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="this machine has an accelerator"
)


def test_the_cpu_can_be_asked_for_on_any_machine() -> None:
    assert device_named("cpu") is None


@needs_none
def test_auto_is_the_cpu_without_an_accelerator() -> None:
    assert device_named("auto") is None


@needs_none
def test_an_accelerator_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'cuda:1'.*no accelerator.*'auto' or 'cpu'"):
        device_named("cuda:1")


def test_what_is_no_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"patrickstar\.device: 'gpu7'"):
        device_named("gpu7")


def test_buffers_move_to_the_device() -> None:
    module = nn.BatchNorm1d(3, affine=False)
    move_unmanaged(module, torch.device("meta"))
    assert module.running_mean is not None
    assert module.running_mean.is_meta
