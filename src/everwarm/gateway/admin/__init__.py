"""What people and monitors see of a server, and orders to it.

``status`` (health, readiness, numbers), ``metrics`` (Prometheus), ``traces`` (OpenTelemetry), ``request_log`` (the
last requests and a log line for each), ``events`` (what happens, as a stream), ``cache_api`` with ``cache_encode``
(what is kept; pin, drop), ``models`` (list, load, unload), ``web_ui`` (the page at ``/``, whose files are in
``page/``).
"""
