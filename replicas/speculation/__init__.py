"""Speculative decoding without a draft model: n-grams of the sequence and of the tenant's earlier turns."""
