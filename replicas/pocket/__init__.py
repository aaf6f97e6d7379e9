"""Pocket: the small tool-calling model that ships with Holdfast, its data, training, scores and inflation."""
