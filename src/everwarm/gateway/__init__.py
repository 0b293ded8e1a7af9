"""The wire: chat templates here, HTTP dialects later. Knows text and JSON; never loads libllama."""
