"""Reinforcement-learning post-training in which every checkpoint and weight sync is proven fresh."""

__version__ = "0.1.0"
