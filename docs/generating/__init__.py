"""The pages that are written from the code, one module each. Each has a function that returns the whole page."""
