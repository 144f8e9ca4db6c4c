"""Task streams, image sources and the feature cache."""
