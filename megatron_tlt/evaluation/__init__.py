"""What a trained model does: text out of it, and its loss on text."""
