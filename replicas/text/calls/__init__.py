"""Tool calls in the text of a reply: formats, and how each is read as it streams."""
