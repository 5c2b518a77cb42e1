"""Torch modules as policies."""

from clusterenv.adapters.torch.policy import TorchPolicy

__all__ = ["TorchPolicy"]
