"""Who answers each image: tensors in, tensors out."""
