"""llama-server's slot actions: save a slot's conversation to a file, restore it, erase it.

``slot_commands`` takes the action from its frame and has the file work done on a thread of its own, the slot's on the
loop's while it is idle. ``slot_io`` captures, writes and puts back, in the formats of ``state.store.slot_file``:
llama.cpp's own file, and a companion with more checkpoints that also says which model and namespace the file belongs
to.
"""
