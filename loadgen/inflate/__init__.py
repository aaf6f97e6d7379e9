"""`holdfast inflate`: Pocket in the shape of a large model, with the same answers at that model's cost."""

from pathlib import Path

WEIGHTS = Path(__file__).parents[2] / "replicas" / "pocket" / "weights"
"""The folder of the shipped model."""
CUT = r"""\p{L}+|\p{N}|[\s"{}\[\]:,]+|[^\p{L}\p{N}\s"{}\[\]:,]"""
"""How Pocket's tokenizer cuts text into words: by the class of each character, regardless of its neighbours."""
