"""From a request body to the engine and back, for every dialect.

``request_gate`` reads the body, admits the request and bounds its time. ``request_preparer`` makes the ``Submit`` that
the engine gets: prompt, sampling, images, constraint. ``generate`` runs the choices of a request against the engine and
yields them as ``ReplyEvent``. ``replies`` joins these: it streams a reply through a ``Dialect`` (what each API adds: how
events, errors and keep-alives are written) or collects it whole. ``background`` recognises calls that no user waits for.
``prewarm`` offers the likely next prompt to the engine for its idle time, with results of tool calls that it guesses.
"""
