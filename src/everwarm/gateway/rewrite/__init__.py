"""Lines of system text that a client changes without need: left out, learned and reported, and changed by rules.

``rules`` leaves out known noise, and reads the rules of ``--rewrite`` and applies them to messages. ``volatile_lines`` says
which lines of two texts differ, and counts them for each namespace. Without a file of rules only noise is left out.
"""
