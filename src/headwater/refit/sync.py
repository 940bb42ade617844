"""Weight versions: which policy the generator samples from.

With the `shared` transport the generator reads the trainer's own module, so nothing moves and the two
cannot differ; a push only makes the new version known.
"""

from __future__ import annotations

from headwater.engines.base import GenerateEngine


class WeightSync:
    """Gives each trained policy to the generator under a version number that only rises."""

    def __init__(self, generator: GenerateEngine, version: int) -> None:
        self._generator = generator
        self.version = version
        generator.receive_weights(version)

    def push(self, version: int) -> None:
        """Give the trained weights to the generator as `version`, which must be newer than the last."""
        assert version > self.version, f"version {version} after {self.version}"
        self._generator.receive_weights(version)
        self.version = version
