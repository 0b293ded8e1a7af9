"""Anthropic's messages: request schema, translation to a chat body, routes, and the events of a stream."""
