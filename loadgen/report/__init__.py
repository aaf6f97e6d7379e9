"""A comparison as one HTML page: its plots (`plots`) and the page around them (`page`)."""
