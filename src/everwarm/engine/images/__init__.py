"""Images as the model sees them: pixels from a request in, cells of a sequence out.

``image_prompt`` makes one prompt of a text with images: each image is one item, and the text around it is tokenized as the
model's own rule wants it. ``image_cache`` encodes an image once and keeps its embedding, each namespace apart, within a
budget of bytes. ``image_prefill`` decodes an embedding whole, between two steps of text.
"""
