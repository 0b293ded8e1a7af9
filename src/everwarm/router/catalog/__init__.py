"""Every model a server can offer, as values: files and settings are looked at, nothing is loaded.

``catalog`` lists the models of a folder, a TOML file, one GGUF file or the Hugging Face Hub, with their settings and
what is wrong with those that cannot be used. ``gguf_files`` finds GGUF files and says what their names mean, and
``gguf_header`` reads their metadata within bounds. ``models_file`` checks the TOML file, or llama-server's INI file;
``hub`` finds and downloads models of the Hub. ``memory_estimate`` says from a header what a model will take, so that the
router can make room first.
"""
