"""Images as the model sees them: embeddings cached by content, and prompts with images in them."""
