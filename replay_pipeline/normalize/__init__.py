"""From preference pairs to pairs that are fit to publish, by data-juicer recipes."""

from replay_pipeline.normalize.normalizer import (
    DJNormalizer,
    NormalizeReport,
    NormalizeResult,
    NormalizeStream,
)
from replay_pipeline.normalize.recipe import bundled_recipes, load_recipe

__all__ = [
    "DJNormalizer",
    "NormalizeReport",
    "NormalizeResult",
    "NormalizeStream",
    "bundled_recipes",
    "load_recipe",
]
