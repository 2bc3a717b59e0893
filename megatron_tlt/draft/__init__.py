"""Training of the drafter: what it learns from, and when."""
