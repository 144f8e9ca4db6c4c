"""What PEFT sees: the configuration, the layer and the model."""
