"""HTTP below the routes: bounded connections and bodies in, responses and server-sent events out.

``connection`` is one TCP connection: how many there are, how long a head may be, how slow a client. ``request_body``
reads a body within a budget and parses it, beside the event loop if it is large; ``json_weight`` estimates what parsing
costs before that, and ``json_scan`` counts exactly where the estimate is not enough. ``sse`` writes JSON and event streams
and notices clients that disconnect; ``error_body`` has each dialect's errors.
"""
