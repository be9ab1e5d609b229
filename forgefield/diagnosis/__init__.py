"""Callbacks that observe a training (gradients, losses, embeddings, speed, energy), their records and their figures."""
