"""Rollouts on the published SGLang: an engine in its own process, driven through the Protocol."""
