"""How Pocket, the shipped model, is made: data, training, scores; inflation and GGUF."""
