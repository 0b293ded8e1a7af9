"""Lines of system text that a client changes without need: learned, reported, and changed by rules of the operator.

``line_changes`` says which lines of two texts differ (pure), ``volatile_lines`` counts them for each namespace, and
``rules`` applies the rules of ``--rewrite`` to messages (pure), and ``rules_file`` reads them.
Without a file of rules nothing is changed.
"""
