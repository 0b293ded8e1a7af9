"""Monitoring and administration of a server.

``status`` (health, readiness, numbers), ``metrics`` (Prometheus), ``traces`` (OpenTelemetry), ``request_log`` (the
last requests and a log line for each), ``events`` (a stream of what happens), ``cache_api`` with ``cache_encode``
(the contents of the cache; pin, drop), ``models`` (list, load, unload), ``web_ui`` (the page at ``/``, whose files are in
``page/``).
"""
