"""Evaluation of a model on tasks, outside any training: ``scripts/evaluate.py``; ``vipfast.evaluate`` is training's own."""
