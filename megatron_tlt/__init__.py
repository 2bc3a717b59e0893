"""Evolving-subnetwork pretraining and adaptive-drafter RL on megatron-core."""

__version__ = "0.1.0"
