"""A comparison as one HTML page: what is drawn (`series`), how (`plots`), and the page around it (`page`)."""
