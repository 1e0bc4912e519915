"""Rebuilds what the embedded task ships: the starter model, its tokenizer and the pool it was measured on.

``scripts/make_starter.py`` runs it.
"""
