"""Stands in for setuptools while a source archive is fetched: pip asks what it is, and would compile it to know."""
