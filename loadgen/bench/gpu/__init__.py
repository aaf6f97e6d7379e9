"""The engine on a GPU against what the GPU allows: steps, aliases, turns, and transformers on the same machine."""
