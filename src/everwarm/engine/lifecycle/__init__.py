"""A request's life in the engine, before and after it runs.

``starting`` checks what a caller wants and makes a request of it, gives it a slot, restores what is known of its
prompt, says why the rest is read, and plans where that is cut for checkpoints. ``keeping`` takes checkpoints while it
runs, and decides what stays when it ends. In between a request belongs to ``engine.core``, which applies what these
parts return.
"""
