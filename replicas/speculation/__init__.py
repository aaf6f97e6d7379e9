"""Speculative decoding without a draft model: n-grams of the sequence and of the tenant's earlier turns, and the layer
for one more token that some checkpoints have.
"""
