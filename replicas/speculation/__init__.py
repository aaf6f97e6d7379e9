"""Drafts without a draft model: prompt lookup, the tenant's earlier turns, and the skeletons of declared calls."""
