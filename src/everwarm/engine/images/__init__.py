"""Images as the model sees them: embeddings cached by content, prompts with images in them, and their prefill."""
