"""Text to tokens to batches: tokenizers, `.bin/.idx` files, sample order, corpora."""
