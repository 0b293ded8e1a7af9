"""Images and sounds in requests: content parts in, pixels and samples out, in bounds of bytes, pixels, memory and time.

``image_loader`` is what requests use: it reads base64, caches images per namespace, and lends pixels to requests while an
engine needs them. ``decoder_worker`` is the child process that decodes images, confined so that a crash or an exploit does
no harm; the one for sounds is in ``llama.media``. ``image_download`` fetches from hosts that the operator allowed, and from
no other. Knows no model and no prompt.
"""
