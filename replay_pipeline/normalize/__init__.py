"""Select the pairs that are fit to publish, by data-juicer recipes."""

from replay_pipeline.normalize.normalizer import (
    DJNormalizer,
    NormalizeReport,
    NormalizeResult,
)
from replay_pipeline.normalize.recipe import bundled_recipes, load_recipe

__all__ = [
    "DJNormalizer",
    "NormalizeReport",
    "NormalizeResult",
    "bundled_recipes",
    "load_recipe",
]
