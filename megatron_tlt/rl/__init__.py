"""Reinforcement learning: the only place that sees both trainer and rollout engine."""
