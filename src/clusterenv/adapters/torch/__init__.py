"""Torch modules as policies."""

from clusterenv.adapters.torch.normalising import Normaliser, RewardScaler
from clusterenv.adapters.torch.policy import TorchPolicy

__all__ = ["Normaliser", "RewardScaler", "TorchPolicy"]
