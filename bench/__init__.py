"""Measurements. Every speed claim in the docs names one of these and the command that ran it."""
