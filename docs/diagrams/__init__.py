"""The drawings of the documentation, drawn from a few lines of text each."""
