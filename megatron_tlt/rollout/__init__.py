"""Rollout engines behind one Protocol, drafters, and the policy that picks a speculation strategy."""
