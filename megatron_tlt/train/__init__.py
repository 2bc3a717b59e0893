"""Training: one model, one optimizer, no RL words."""
