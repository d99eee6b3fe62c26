"""The model of image.yaml, the tables that all specs share, locks and names."""
