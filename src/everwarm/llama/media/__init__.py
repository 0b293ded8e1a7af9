"""Images through libmtmd: a projector file and decoded pixels in, embeddings and their cells out.

``projector_file`` checks everything in a projector that libmtmd would abort on, before it is opened. ``media_model`` is
the open projector beside its text model: what an image takes, and its embeddings. ``mtmd_abi`` declares libmtmd's
structs and functions; ``llama.lib`` loads it.
"""
