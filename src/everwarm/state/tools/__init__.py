"""What ``everwarm cache`` does with a state directory: list, inspect, prune, export and import. Works without an
engine.
"""
