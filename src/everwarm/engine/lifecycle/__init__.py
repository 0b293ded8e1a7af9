"""A request's life in the engine, before and after it runs.

``intake`` checks what a caller wants and makes a request of it. ``starting`` gives it a slot, restores what is known of
its prompt and says why the rest is read; ``cut_plan`` says where its prompt is cut for checkpoints. ``keeping`` takes
checkpoints while it runs, and decides what stays when it ends. ``core_status`` publishes how many requests run and wait.
In between a request belongs to ``engine.core``, which applies what these parts return.
"""
