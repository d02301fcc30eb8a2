"""Activations on lower tiers, under any engine: `offload_activations`."""

from patrickstar.activations.offloading import ActivationOffloading, offload_activations

__all__ = ["ActivationOffloading", "offload_activations"]
