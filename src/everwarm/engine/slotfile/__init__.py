"""llama-server's slot actions: save, restore and erase a slot, with files that are bound to a model and a namespace."""
