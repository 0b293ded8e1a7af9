"""One engine: ``supervisor`` keeps it running, ``engine_process`` is one process of it, ``pending`` its open requests,
``ram_memory`` what outlives it, ``restart_policy`` when it is started again, ``engine_stderr`` its last lines."""
