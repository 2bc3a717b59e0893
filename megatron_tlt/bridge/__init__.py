"""Conversion between Hugging Face folders, GGUF files and checkpoints, verified against transformers."""
