"""Lines of system text that a client changes without need: learned, reported, and changed by rules of the operator.

``volatile_lines`` says which lines of two texts differ, and counts them for each namespace. ``rules`` applies the
rules of ``--rewrite`` to messages (pure), and ``rules_file`` reads them. Without a file of rules nothing is changed.
"""
