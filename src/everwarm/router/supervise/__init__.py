"""One model's engine, whichever process it is at the moment: questions and prompts in, its messages out.

``supervisor`` starts the engine, keeps it running, and keeps the RAM tier's memory from one process to the next.
``engine_process`` is one process: its socket, its standard error, its heartbeat, and how it ended. ``pending`` holds the
requests without their last answer: those that have streamed nothing are sent to the next process. ``restart_policy``
decides, purely, when that one starts, and names what the last one died of.
"""
