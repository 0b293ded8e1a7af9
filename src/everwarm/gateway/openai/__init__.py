"""OpenAI's chat completions and completions: request schema, routes, and the JSON of replies. Its ``ChatBody`` is the
form into which every other dialect is translated.
"""
