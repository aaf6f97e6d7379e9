"""Pocket, the small tool-calling model that ships with Holdfast: weights, chat template and card, in `weights/`."""
