"""One engine: ``supervisor`` keeps it running, ``engine_process`` is one process of it, ``pending`` its open requests,
``restart_policy`` decides when it is started again."""
