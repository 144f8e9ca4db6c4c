"""The trainers, the run folder and the metrics."""
