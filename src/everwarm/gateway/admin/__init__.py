"""Monitoring and administration: what a server does, for operators, dashboards and the page; and orders to it.

Every choice of a request leaves a record in ``request_log``, which writes a log line when it ends; ``traces`` sends it to
OpenTelemetry, ``metrics`` counts it for Prometheus and measures the event loop's lag, ``events`` streams it to
watchers. ``status`` answers health, readiness and ``/metrics``. ``cache_api`` shows what is cached and pins or drops it, in
the JSON of ``cache_encode``; ``cache_plan`` says what prompts would cost, and reads some ahead. ``models`` lists, loads,
unloads, downloads and deletes models. ``web_ui`` is the page at ``/``, whose files are in ``page/``; ``markdown`` renders
replies for it, with formulas.
"""
