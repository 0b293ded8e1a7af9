"""Images and sounds through libmtmd: a projector file and decoded pixels or samples in, embeddings and their cells out.

``projector_file`` checks everything in a projector that libmtmd would abort on, before it is opened. ``media_model`` is
the open projector beside its text model: what each takes, and its embeddings. ``mtmd_abi`` declares libmtmd's
structs and functions; ``llama.lib`` loads it. ``sound_worker`` is a child process of the gateway that decodes sound files.
"""
