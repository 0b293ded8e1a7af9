"""Constrained decoding with llguidance: a constraint as a grammar, compiled and matched, tried out in a process of its
own.
"""
